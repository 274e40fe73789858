"""A model over a scripted engine that says given texts, on either wire."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from typing import Any

from support.backends import instant
from tito_conformance.testing import Completion, InProcessTransport, ScriptedEngine, ScriptedRequest, scripted_engine
from tito_core import Policy, TITOModel
from tito_core.backend import Backend
from tito_core.parsing.registry import ToolCalls
from tito_engines import models
from tito_sglang.backend import SGLangBackend
from tito_vllm.backend import VLLMBackend

BACKENDS = ("vllm", "sglang")
STRANDS = tuple(int(part) for part in version("strands-agents").split(".")[:2])
"""Major and minor version. From 1.62 on Strands has middleware, and models choose how to make structured output."""
END = "<|im_end|>"


@cache
def tokenizer(name: str = "smollm2") -> Any:
    return models.load_tokenizer(name)


def ids_of(text: str, name: str = "smollm2") -> list[int]:
    return list(tokenizer(name).encode(text, add_special_tokens=False))


class Says:
    """Answers turn after turn; each answer is text (the end of turn is added), exact ids, or a function of the prompt.

    A text that ends in "..." is cut there by the token limit.
    """

    def __init__(self, *answers: str | Sequence[int] | Callable[[ScriptedRequest], Any], name: str = "smollm2") -> None:
        self.answers = list(answers)
        self.name = name
        self.turn = 0
        self.requests: list[ScriptedRequest] = []

    def __call__(self, request: ScriptedRequest) -> Completion:
        self.requests.append(request)
        answer = self.answers[self.turn % len(self.answers)]
        self.turn += 1
        if callable(answer):
            answer = answer(request)
        if isinstance(answer, str):
            if answer.endswith("..."):
                return Completion(ids_of(answer[:-3], self.name)[: request.max_new_tokens], finish="length")
            answer = ids_of(answer + END, self.name)
        return Completion(list(answer))


def engine_of(kind: str, script: Any, name: str = "smollm2", **options: Any) -> ScriptedEngine:
    loaded = tokenizer(name)
    defaults: dict[str, Any] = {
        "vocab_size": len(loaded),
        "eos_ids": [loaded.eos_token_id],
        "max_model_len": 4096,
        "encode": lambda text, special: loaded.encode(text, add_special_tokens=special),
    }
    return scripted_engine(kind, script, **{**defaults, **options})


def backend_of(engine: ScriptedEngine, kind: str, **options: Any) -> Backend:
    cls = VLLMBackend if kind == "vllm" else SGLangBackend
    return cls("http://scripted", http_transport=lambda: InProcessTransport(engine), **instant(options))


def model_of(kind: str, script: Any, name: str = "smollm2", **options: Any) -> TITOModel:
    engine_options = {
        key: options.pop(key) for key in ("fault", "latency", "max_model_len", "decode") if key in options
    }
    engine = engine_of(kind, script, name, **engine_options)
    backend = backend_of(engine, kind)
    policy = policy_of(kind, name, options.pop("tool_calls", "strict"))
    shared = replace(policy, backend=backend, store=options.pop("store", None))
    if "max_model_len" in engine_options:
        shared = replace(shared, info=replace(shared.info, max_model_len=engine_options["max_model_len"]))
    model = shared.model(**options)
    model.scripted = engine  # type: ignore[attr-defined]
    return model


def with_parts(model: TITOModel, **parts: Any) -> TITOModel:
    """Return a new model with the options of another, over its policy with other parts."""
    return TITOModel.with_settings(replace(model.policy, **parts), None, model._settings)


@cache
def policy_of(kind: str, name: str = "smollm2", tool_calls: ToolCalls = "strict") -> Policy:
    """Load tokenizer and template once; each model then gets an engine of its own."""
    engine = engine_of(kind, Says(""), name)
    return Policy.connect(backend=backend_of(engine, kind), tokenizer=tokenizer(name), tool_calls=tool_calls)


def structured(name: str, answer: str) -> str:
    """Return a structured output as the installed Strands takes it: bare JSON, or before 1.62 a forced call."""
    return answer if STRANDS >= (1, 62) else call(name, answer)


def call(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'
