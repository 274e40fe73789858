"""Scripted servers for `tito conformance`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from conformance.defects.defect import Defect
from conformance.defects.scripted_policy import ConformancePolicy
from support.scripted import tokenizer
from tito_conformance.testing import ScriptedServer, scripted_server


@contextmanager
def served(wire: str, defect: Defect | None = None) -> Iterator[ScriptedServer]:
    loaded = tokenizer()
    policy: Any = ConformancePolicy(loaded, loaded.eos_token_id)
    script = policy if defect is None or defect.wrap is None else defect.wrap(policy)
    with scripted_server(
        "sglang" if wire == "sglang" else "vllm",
        script,
        vocab_size=len(loaded),
        eos_ids=[loaded.eos_token_id],
        decode=lambda ids: str(loaded.decode(list(ids))),
        fault=None if defect is None else defect.fault(wire),
    ) as server:
        yield server
