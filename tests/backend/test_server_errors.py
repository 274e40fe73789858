"""Errors about servers: late answers, a missing model, and servers that differ."""

from __future__ import annotations

from typing import Any

import pytest

from support.backends import (
    KINDS,
    Kind,
    answering,
    backend_of,
    engine_of,
    http_response,
    request_of,
)
from tito_conformance.testing import Fault, always
from tito_core.backend import (
    BadRequestError,
    ContextLengthError,
    EngineTimeoutError,
    ProtocolViolationError,
)
from tito_core.backend.generate import generate, score


@pytest.mark.parametrize("kind", KINDS)
async def test_a_late_answer(kind: Kind) -> None:
    backend = backend_of(engine_of(kind, fault=always(Fault(hang=True))), timeout_s=0.1)
    with pytest.raises(EngineTimeoutError) as caught:
        await generate(backend, request_of())
    path = {"vllm": "/inference/v1/generate", "sglang": "/generate"}[kind]
    assert f"{kind} at http://scripted{path} did not answer within 0.1 s" in str(caught.value)
    assert "timeout_s" in str(caught.value)
    assert (caught.value.backend, caught.value.request_id) == (kind, "r")


def serving(models: list[dict[str, Any]], **options: Any) -> Any:
    return answering("vllm", lambda _: http_response(200, json={"data": models, "version": "1"}), **options)


MODELS: list[tuple[list[dict[str, Any]], dict[str, Any], str]] = [
    ([], {}, "vllm server at http://scripted serves no model"),
    ([{"id": "m", "owned_by": "sglang"}], {}, "at http://scripted .*backend='sglang'"),
    ([{"id": "m"}, {"id": "n"}], {"model": "x"}, "'x'.*'m', 'n'.*model_id"),
]


@pytest.mark.parametrize(("models", "options", "pattern"), MODELS)
async def test_a_server_without_the_model(models: Any, options: dict[str, Any], pattern: str) -> None:
    with pytest.raises(BadRequestError, match=pattern) as caught:
        await serving(models, **options).connect()
    assert caught.value.backend == "vllm"


@pytest.mark.parametrize("kind", KINDS)
async def test_a_sequence_that_cannot_be_scored_is_an_error_of_its_backend(kind: Kind) -> None:
    engine = engine_of(kind, max_model_len=8)
    backend = backend_of(engine)
    most = (await backend.connect()).max_model_len or 0
    assert len(await score(backend, [5] * (most - 1))) == most - 1
    for bad, error in (([5] * most, ContextLengthError), ([], BadRequestError)):
        with pytest.raises(error) as caught:
            await score(backend, bad)
        assert caught.value.backend == kind
    other = backend_of(engine_of(kind, fault=always(Fault(edit=lambda answer: _scored_wrongly(answer)))))
    with pytest.raises(ProtocolViolationError) as broken:
        await score(other, [5, 6])
    assert (broken.value.backend, len(broken.value.request_id or "")) == (kind, 32)


def _scored_wrongly(answer: Any) -> None:
    if "choices" in answer:
        answer["choices"][0]["prompt_logprobs"] = [None]
    else:
        answer["meta_info"]["input_token_logprobs"] = []
