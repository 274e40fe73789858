"""Every sentence about servers, word for word: those that are late, without the model, or not alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from strands_tito.testing import Fault, always
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
from tito_core.backend import (
    BadRequestError,
    ContextLengthError,
    EngineInfo,
    EngineTimeoutError,
    ProtocolViolationError,
    create_backend,
)
from tito_core.backend.checked import generate, score
from tito_core.backend.id_text import IdText
from tito_core.backend.replicas import agreed


@pytest.mark.parametrize("kind", KINDS)
async def test_an_answer_that_does_not_come_in_time(kind: Kind) -> None:
    backend = backend_of(engine_of(kind, fault=always(Fault(hang=True))), timeout_s=0.5)
    with pytest.raises(EngineTimeoutError) as caught:
        await generate(backend, request_of())
    path = {"vllm": "/inference/v1/generate", "sglang": "/generate"}[kind]
    assert str(caught.value) == (
        f"{kind} at http://scripted{path} did not answer within 0.5 s. The request was given up and the server told "
        "to abort it; raise timeout_s if answers take longer."
    )
    assert (caught.value.backend, caught.value.request_id) == (kind, "r")


def serving(models: list[dict[str, Any]], **options: Any) -> Any:
    return answering("vllm", lambda _: http_response(200, json={"data": models, "version": "1"}), **options)


MODELS: list[tuple[list[dict[str, Any]], dict[str, Any], str]] = [
    ([], {}, "The vllm server at http://scripted serves no model: start it with one."),
    (
        [{"id": "m", "owned_by": "sglang"}],
        {},
        "The server at http://scripted says that it is sglang, not vllm: use backend='sglang'.",
    ),
    (
        [{"id": "m"}, {"id": "n"}],
        {"model": "x"},
        "The vllm server at http://scripted does not serve 'x'; it serves 'm', 'n'. Give one of these as model_id, or "
        "leave it out.",
    ),
]


@pytest.mark.parametrize(("models", "options", "sentence"), MODELS)
async def test_a_server_without_the_model(models: Any, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        await serving(models, **options).connect()
    assert (str(caught.value), caught.value.backend) == (sentence, "vllm")


async def test_a_text_of_another_prompt_is_not_sent() -> None:
    engine = engine_of("vllm")
    other = request_of((1, 2, 3))
    with pytest.raises(BadRequestError) as caught:
        await generate(backend_of(engine), replace(request_of(), text=IdText.of(other.input_ids)))
    assert str(caught.value) == (
        "Law 4: the text that was kept of a prompt, of 3 ids, is not that of its 5 ids, so it was not sent. Leave "
        "`text` out of the request and it is written anew."
    )
    assert (caught.value.backend, caught.value.request_id) == ("vllm", "r")


def several(*engines: Any) -> Any:
    addresses = [f"http://server{n}" for n in range(len(engines))]
    return create_backend("vllm", addresses, http_transport=over_sockets(engines), sleep=Waits())


async def test_servers_that_are_not_alike() -> None:
    backend = several(engine_of("vllm"), engine_of("vllm"), engine_of("vllm", vocab_size=50, model="other"))
    with pytest.raises(BadRequestError) as caught:
        await backend.connect()
    assert str(caught.value) == (
        "The vllm servers are not alike, so a rollout cannot move from one to another: model is 'scripted' at "
        "http://server0 and 'other' at http://server2. Start them alike, or leave one out of base_url."
    )
    assert caught.value.backend == "vllm"


async def test_what_was_found_of_each_server_must_be_alike() -> None:
    backend = several(engine_of("vllm"), engine_of("vllm"), engine_of("vllm"))
    infos = iter(
        [EngineInfo("vllm", "m", None, version) for version in ("1", "1", "2", None, "1", "2", "1", None, "1")]
    )

    async def ask(_: Any) -> EngineInfo:
        return next(infos)

    def facts(info: EngineInfo) -> Mapping[str, object]:
        return {"model": info.model, "version": info.version}

    with pytest.raises(BadRequestError) as caught:
        await agreed(backend, ask, facts)
    assert str(caught.value) == (
        "The vllm servers are not alike: version is '1' on number 1 of them and '2' on number 3. Start them alike, or "
        "leave one out of base_url."
    )
    assert caught.value.backend == "vllm"
    with pytest.raises(BadRequestError, match="version is '1' on number 2 of them and '2' on number 3"):
        await agreed(backend, ask, facts)
    assert [info.version for info in await agreed(backend, ask, facts)] == ["1", None, "1"]
    infos = iter([EngineInfo("vllm", "alone", None, "1")])
    assert [info.model for info in await agreed(backend.members[0], ask, facts)] == ["alone"]
    await backend.aclose()


@pytest.mark.parametrize("kind", KINDS)
async def test_what_cannot_be_scored_is_told_of_its_own_backend(kind: Kind) -> None:
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
