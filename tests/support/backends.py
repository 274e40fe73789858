"""Either backend on a scripted engine, in process, with waits that take no time."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
import numpy as np

from tito_core.backend import SamplingParams, TokenRequest
from tito_core.backend.http_backend import HttpBackend
from tito_core.testing import HashPolicy, InProcessTransport, ScriptedEngine, scripted_engine
from tito_core.testing.script import Script
from tito_sglang.backend import SGLangBackend
from tito_vllm.backend import VLLMBackend

Kind = Literal["vllm", "sglang"]
KINDS: tuple[Kind, ...] = ("vllm", "sglang")
BACKENDS: dict[str, type[HttpBackend]] = {"vllm": VLLMBackend, "sglang": SGLangBackend}
VOCAB, EOS = 1000, 2
PROMPT = (11, 12, 13, 14, 15)


@dataclass
class Waits:
    """A sleep that only writes down how long it would have been."""

    seconds: list[float] = field(default_factory=list)

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


def hash_policy() -> HashPolicy:
    return HashPolicy(VOCAB, eos_ids=[EOS])


def engine_of(kind: Kind, script: Script | None = None, **options: Any) -> ScriptedEngine:
    defaults: dict[str, Any] = {"vocab_size": VOCAB, "eos_ids": [EOS]}
    return scripted_engine(kind, script or hash_policy(), **{**defaults, **options})


def backend_of(engine: ScriptedEngine, **options: Any) -> HttpBackend:
    cls = BACKENDS[engine.wire.name]
    options = {"sleep": Waits(), "http_transport": lambda: InProcessTransport(engine), **options}
    return cls("http://scripted", **options)


def answering(kind: Kind, handler: Any, **options: Any) -> HttpBackend:
    """A backend whose server is a function from an httpx request to a response; it does not tell its vocabulary."""

    async def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/generate" and is_vocabulary_probe(json.loads(request.content)):
            return httpx.Response(400)
        response = handler(request)
        return await response if inspect.isawaitable(response) else response

    options = {"sleep": Waits(), "http_transport": lambda: httpx.MockTransport(answer), **options}
    return BACKENDS[kind]("http://scripted", **options)


def request_of(ids: Sequence[int] = PROMPT, request_id: str = "r", **sampling: Any) -> TokenRequest:
    settings = {"max_new_tokens": 8, "stop_token_ids": (EOS,), **sampling}
    return TokenRequest(np.array(ids, np.int32), SamplingParams(**settings), request_id)


def bodies(engine: ScriptedEngine) -> list[Any]:
    """The bodies of generation and scoring requests that reached the engine, refused ones too, without the probe."""
    sent = [json.loads(e.body) for e in engine.exchanges if e.path in ("/v1/completions", "/generate")]
    return [body for body in sent if not is_vocabulary_probe(body)]


def is_vocabulary_probe(body: Any) -> bool:
    """Tell the request that SGLang's backend has refused at connect, to learn the vocabulary's size."""
    return "rid" not in body and "prompt" not in body


def choice(answer: Any) -> Any:
    """The part of either wire's answer that holds the ids."""
    return answer["choices"][0] if "choices" in answer else answer
