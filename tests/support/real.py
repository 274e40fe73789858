"""Real engines for the integration tests."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import tito_engines as engines
from support.scripted import tokenizer
from tito_core import Policy, TITOModel
from tito_core.backend import Backend, SamplingParams, TokenRequest
from tito_core.backend.generate import generate
from tito_core.store import LedgerFile
from tito_engines.spec import EngineSpec, find


@dataclass(frozen=True)
class Served:
    kind: str
    url: str
    policy: Policy

    def model(self, **sampling: Any) -> TITOModel:
        return self.policy.model(sampling=sampling)

    def policy_with(self, file: LedgerFile) -> Policy:
        return replace(self.policy, store=file)


async def mid_answer(backend: Backend, tokens: int = 32) -> None:
    """Wait until the engine has sampled about `tokens` tokens of its running requests, whatever the machine's speed.

    This samples another answer of that length.
    """
    prompt = np.arange(1000, 1008, dtype=np.int32)
    sampling = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    await generate(backend, TokenRequest(prompt, sampling, uuid.uuid4().hex))


async def policy_at(kind: str, url: str, name: str = "smollm2", **options: Any) -> Policy:
    return await Policy.connect_async(backend=kind, base_url=url, tokenizer=tokenizer(name), timeout_s=120, **options)


@contextmanager
def serve(
    kind: str,
    name: str = "smollm2",
    *,
    spec: EngineSpec | None = None,
    environment: Mapping[str, str] | None = None,
    server_args: Sequence[str] = (),
) -> Iterator[Served]:
    """Run a server of a model, with another version, environment variables or arguments."""
    spec = spec or find(kind)
    if environment is not None:
        spec = replace(spec, env=lambda launch, of=spec.env: {**of(launch), **environment})
    with engines.running_sync(spec, model=name, server_args=server_args) as url:
        policy = Policy.connect(backend=kind, base_url=url, tokenizer=tokenizer(name), timeout_s=120)
        yield Served(kind, url, policy)
