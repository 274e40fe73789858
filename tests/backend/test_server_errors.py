"""Errors about servers: late answers, a missing model, and servers that differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from support.backends import (
    KINDS,
    Kind,
    Waits,
    answering,
    backend_of,
    engine_of,
    http_response,
    over_sockets,
    request_of,
)
from tito_conformance.testing import Fault, always
from tito_core.backend import (
    BadRequestError,
    ContextLengthError,
    EngineInfo,
    EngineTimeoutError,
    ProtocolViolationError,
    create_backend,
)
from tito_core.backend.generate import generate, score
from tito_core.backend.id_text import IdText
from tito_core.backend.replicas import agreed


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


async def test_a_text_of_another_prompt_is_not_sent() -> None:
    engine = engine_of("vllm")
    other = request_of((1, 2, 3))
    with pytest.raises(BadRequestError, match=r"Law 4.*3 ids.*5 input ids.*`id_text`") as caught:
        await generate(backend_of(engine), replace(request_of(), id_text=IdText.of(other.input_ids)))
    assert (caught.value.backend, caught.value.request_id) == ("vllm", "r")


def several(*engines: Any) -> Any:
    addresses = [f"http://server{n}" for n in range(len(engines))]
    return create_backend("vllm", addresses, http_transport=over_sockets(engines), sleep=Waits())


async def test_servers_that_differ_are_refused() -> None:
    backend = several(engine_of("vllm"), engine_of("vllm"), engine_of("vllm", vocab_size=50, model="other"))
    with pytest.raises(
        BadRequestError, match=r"'scripted' at http://server0 .*'other' at http://server2.*base_url"
    ) as caught:
        await backend.connect()
    assert caught.value.backend == "vllm"


async def test_facts_of_each_server_must_agree() -> None:
    backend = several(engine_of("vllm"), engine_of("vllm"), engine_of("vllm"))
    infos = iter(
        [EngineInfo("vllm", "m", None, version) for version in ("1", "1", "2", None, "1", "2", "1", None, "1")]
    )

    async def ask(_: Any) -> EngineInfo:
        return next(infos)

    def facts(info: EngineInfo) -> Mapping[str, object]:
        return {"model": info.model, "version": info.version}

    with pytest.raises(BadRequestError, match=r"version is '1' on server 1 and '2' on server 3.*base_url") as caught:
        await agreed(backend, ask, facts)
    assert caught.value.backend == "vllm"
    with pytest.raises(BadRequestError, match="version is '1' on server 2 and '2' on server 3"):
        await agreed(backend, ask, facts)
    assert [info.version for info in await agreed(backend, ask, facts)] == ["1", None, "1"]
    infos = iter([EngineInfo("vllm", "alone", None, "1")])
    assert [info.model for info in await agreed(backend.members[0], ask, facts)] == ["alone"]
    await backend.aclose()


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
