"""Models by the borrowed names, over scripted engines."""

from __future__ import annotations

from typing import Any

from support.scripted import engine_of, tokenizer
from tito_compat.model import LazyModel
from tito_conformance.testing import InProcessTransport, ScriptedEngine
from tito_sglang import SGLangClient, SGLangModel
from tito_vllm import VLLMModel
from tito_vllm.backend import VLLMBackend

URL = "http://scripted"


def client_of(engine: ScriptedEngine, **options: Any) -> SGLangClient:
    return SGLangClient(URL, http_transport=lambda: InProcessTransport(engine), **options)


def named(kind: str, script: Any, *, engine: dict[str, Any] | None = None, **options: Any) -> LazyModel:
    """Make the borrowed model of an engine; it is not connected yet."""
    server = engine_of(kind, script, **(engine or {}))
    if kind == "sglang":
        return SGLangModel(client=client_of(server), tokenizer=tokenizer(), **options)
    backend = VLLMBackend(URL, http_transport=lambda: InProcessTransport(server))
    return VLLMModel(model_id="scripted", tokenizer=tokenizer(), backend=backend, **options)
