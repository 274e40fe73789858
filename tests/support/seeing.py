"""Scripted servers of both wires that read images, with Qwen3-VL's own tokenizer and template."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from support.scripted import tokenizer
from tito_conformance.testing import HashPolicy, ImageSettings, InProcessTransport, ScriptedEngine, scripted_engine
from tito_core import Policy
from tito_core.backend.registry import create_backend

NAME = "qwen3-vl-tiny"
PAD = 151655


def shape() -> dict[str, Any]:
    """Return the options of a scripted engine that reads images, and decodes text where the real one does."""
    qwen = tokenizer(NAME)
    return {
        "vocab_size": len(qwen),
        "eos_ids": [qwen.eos_token_id],
        "images": ImageSettings(PAD),
        "decode": lambda ids: str(qwen.decode(ids)),
        "encode": lambda text, special: qwen.encode(text, add_special_tokens=special),
        "max_model_len": 100_000,
    }


def seeing(kind: str, script: Any) -> tuple[ScriptedEngine, Policy]:
    """Return an engine that reads images, and a policy on it."""
    engine = scripted_engine(kind, script, **shape())
    return engine, replace(_policy(kind), backend=_backend(kind, engine))


@cache
def _policy(kind: str) -> Policy:
    """Connect once: what is found does not depend on the script."""
    qwen = tokenizer(NAME)
    answers = HashPolicy(len(qwen), alphabet=range(1000, 2000), eos_ids=[qwen.eos_token_id])
    return Policy.connect(backend=_backend(kind, scripted_engine(kind, answers, **shape())), tokenizer=qwen)


def _backend(kind: str, engine: ScriptedEngine) -> Any:
    return create_backend(kind, "http://scripted", http_transport=lambda: InProcessTransport(engine))
