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
from tito_vllm.wire import TOO_MANY_LOGPROBS

Kind = Literal["vllm", "vllm-completions", "sglang"]
KINDS: tuple[Kind, ...] = ("vllm", "sglang")
WIRES: tuple[Kind, ...] = (*KINDS, "vllm-completions")
"""The wires: vLLM's is another one where `/inference/v1/generate` is closed."""
BACKENDS: dict[str, type[HttpBackend]] = {"vllm": VLLMBackend, "vllm-completions": VLLMBackend, "sglang": SGLangBackend}
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
    defaults: dict[str, Any] = {"vocab_size": VOCAB, "eos_ids": [EOS], "scale_out": kind == "vllm"}
    return scripted_engine(engine_name(kind), script or hash_policy(), **{**defaults, **options})


def engine_name(kind: str) -> Literal["vllm", "sglang"]:
    return "sglang" if kind == "sglang" else "vllm"


def backend_of(engine: ScriptedEngine, **options: Any) -> HttpBackend:
    cls = BACKENDS[engine.wire.name]
    options = {"sleep": Waits(), "http_transport": lambda: InProcessTransport(engine), **options}
    return cls("http://scripted", **options)


def answering(kind: Kind, handler: Any, *, refuses: int | None = None, **options: Any) -> HttpBackend:
    """A backend whose server is a function from an httpx request to a response, and refuses the probe so.

    SGLang's then does not tell its vocabulary, and vLLM's has no `/inference/v1/generate` unless it refuses with 400.
    """
    refused = refuses or (400 if kind == "sglang" else 404)

    async def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "POST" and is_probe(json.loads(request.content)):
            return httpx.Response(refused)
        response = handler(request)
        return await response if inspect.isawaitable(response) else response

    options = {"sleep": Waits(), "http_transport": lambda: httpx.MockTransport(answer), **options}
    return BACKENDS[kind]("http://scripted", **options)


def request_of(ids: Sequence[int] = PROMPT, request_id: str = "r", **sampling: Any) -> TokenRequest:
    settings = {"max_new_tokens": 8, "stop_token_ids": (EOS,), **sampling}
    return TokenRequest(np.array(ids, np.int32), SamplingParams(**settings), request_id)


def bodies(engine: ScriptedEngine) -> list[Any]:
    """The bodies of generation and scoring requests that reached the engine, refused ones too, without the probe."""
    paths = ("/v1/completions", "/inference/v1/generate", "/generate")
    sent = [json.loads(e.body) for e in engine.exchanges if e.path in paths]
    return [body for body in sent if not is_probe(body)]


def is_probe(body: Any) -> bool:
    """Tell what a backend has refused at connect: for SGLang's vocabulary, for vLLM's endpoint and top logprobs."""
    if TOO_MANY_LOGPROBS in (body.get("logprobs"), (body.get("sampling_params") or {}).get("logprobs")):
        return True
    return "rid" not in body and "prompt" not in body and not body.get("token_ids")


def choice(answer: Any) -> Any:
    """The part of either wire's answer that holds the ids."""
    return answer["choices"][0] if "choices" in answer else answer
