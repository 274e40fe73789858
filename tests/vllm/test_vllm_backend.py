"""The vLLM backend: its request bodies, and recorded answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.backends import EOS, PROMPT, Received, answering, backend_of, choice, engine_of, http_response, request_of
from tito_conformance.testing import Completion, WireResponse
from tito_core.backend.generate import generate, score
from tito_core.ledger.turn import Finish, VersionSpan
from tito_vllm import wire

RECORDED = Path(__file__).parents[1] / "wire" / "vllm-0.32.0"
PROMPT_RECORDED = (785, 3974, 13876, 38835)


def recorded(name: str) -> Any:
    return json.loads((RECORDED / f"{name}.json").read_text())


def replaying(answer: Any) -> Any:
    """A server that gives one recorded answer, its logprobs' tokens named by id as the request asks for."""

    def handler(request: Received) -> WireResponse:
        if request.method == "GET":
            name = "get_v1_models" if request.path == "/v1/models" else "get_version"
            return http_response(200, json=recorded(name)["response"])
        for one in answer["choices"]:
            if one["logprobs"] and one["token_ids"]:
                one["logprobs"]["tokens"] = [f"token_id:{token}" for token in one["token_ids"]]
        return http_response(200, json=answer)

    return answering("vllm", handler)


async def test_the_whole_request_body() -> None:
    engine = engine_of("vllm-completions", lambda _: Completion([5, EOS]))
    await generate(backend_of(engine), request_of(request_id="abc", temperature=0.5, seed=0))
    (request,) = engine.requests
    assert dict(request.body) == {
        "model": "scripted",
        "prompt": list(PROMPT),
        "n": 1,
        "stream": False,
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "max_tokens": 8,
        "min_tokens": 0,
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": [EOS],
        "stop": [],
        "seed": 0,
        "ignore_eos": False,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    assert request.headers["x-request-id"] == "abc"
    assert request.headers["content-type"] == "application/json"


async def test_recorded_server_properties_are_read() -> None:
    info = await replaying({}).connect()
    assert (info.model, info.max_model_len, info.version) == ("qwen3-tiny", 4096, "0.32.0")


@pytest.mark.parametrize(
    ("name", "finish", "stop"),
    [
        ("completions_ids_logprobs0", Finish.LENGTH, None),
        ("stop_eos_completions", Finish.STOP, 151645),
        ("stop_eos_completions_skipspecial_false", Finish.STOP, 151645),
        ("stop_string_completions", Finish.STOP, "eThe"),
        ("stop_string_completions_include", Finish.STOP, "eThe"),
    ],
)
async def test_a_recorded_answer_is_read(name: str, finish: Finish, stop: int | str | None) -> None:
    record = recorded(name)
    answer, request = record["response"], record["request"]["body"]
    ids, logprobs = answer["choices"][0]["token_ids"], answer["choices"][0]["logprobs"]["token_logprobs"]
    sampling = {"max_new_tokens": request["max_tokens"], "stop": request.get("stop") or (), "stop_token_ids": ()}
    response = await generate(replaying(answer), request_of(PROMPT_RECORDED, **sampling))
    assert response.output_ids.tolist() == ids
    assert response.logprobs.tolist() == np.array(logprobs, np.float32).tolist()
    assert (response.finish, response.stop) == (finish, stop)
    assert response.prompt_length == len(PROMPT_RECORDED)
    assert response.cached_tokens == answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_recorded_prompt_logprobs_are_read_as_scores() -> None:
    answer = recorded("completions_n2_prompt_logprobs")["response"]
    scores = await score(replaying(answer), PROMPT_RECORDED)
    assert np.isnan(scores[0])
    assert (
        scores[1:].tolist() == np.array([-12.840740203857422, -11.459646224975586, -17.06833839416504], "f4").tolist()
    )


async def test_an_aborted_answer_is_partial() -> None:
    def edit(value: Any) -> Any:
        """The recording shows the start of its long lists."""
        if isinstance(value, dict):
            return {key: edit(item) for key, item in value.items()}
        if isinstance(value, list):
            return [edit(item) for item in value if not (isinstance(item, str) and item.startswith("...trimmed"))]
        return value

    answer = edit(recorded("aborted_completions_response")["response"])
    answer["usage"]["completion_tokens"] = len(choice(answer)["token_ids"])
    response = await generate(replaying(answer), request_of(PROMPT_RECORDED))
    assert (response.finish, response.message) == (Finish.ABORT, None)
    assert len(response.output_ids) == len(response.logprobs) == len(choice(answer)["token_ids"])


async def test_abort_uses_the_servers_own_id() -> None:
    engine = engine_of("vllm")
    await backend_of(engine).abort("abc")
    (exchange,) = engine.exchanges
    assert (exchange.path, exchange.body) == (
        "/inference/v1/abort_requests",
        b'{"request_ids":["cmpl-abc-0","generate-tokens-abc"]}',
    )


async def test_the_whole_request_body_of_the_token_endpoint() -> None:
    engine = engine_of("vllm", lambda _: Completion([5, EOS]))
    response = await generate(backend_of(engine), request_of(request_id="abc", temperature=0.5, seed=0))
    (request,) = engine.requests
    fields = dict(request.body)
    sampling = fields.pop("sampling_params")
    assert fields == {
        "model": "scripted",
        "stream": False,
        "return_token_ids": True,
        "token_ids": list(PROMPT),
    }
    assert sampling == {**wire.sampling_fields(request_of(temperature=0.5, seed=0).sampling), "n": 1, "logprobs": 0}
    assert request.headers["x-request-id"] == "abc"
    assert response.versions == (VersionSpan(0, 2, "default"),)


@pytest.mark.parametrize(
    ("scale_out", "used"), [(True, "/inference/v1/generate"), (False, "/v1/completions")], ids=["open", "closed"]
)
async def test_the_endpoint_that_the_server_has_is_used(scale_out: bool, used: str) -> None:
    engine = engine_of("vllm", scale_out=scale_out)
    backend = backend_of(engine)
    info = await backend.connect()
    assert (info.endpoints[0], info.endpoints[-1]) == (used, "/v1/completions")
    await generate(backend, request_of())
    assert [request.path for request in engine.requests] == [used]


def answered_by_the_token_endpoint(answer: Any) -> Any:
    def handler(request: Received) -> WireResponse:
        if request.method == "GET":
            name = "get_v1_models" if request.path == "/v1/models" else "get_version"
            return http_response(200, json=recorded(name)["response"])
        return http_response(200, json=answer)

    return answering("vllm", handler, refuses=400)


@pytest.mark.parametrize("older", [False, True], ids=["0.32", "0.31"])
async def test_a_recorded_answer_of_the_token_endpoint_is_read(older: bool) -> None:
    answer = recorded("generate_full")["response"]
    expected = [entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]]
    if older:  # the tokens' ids as text, and neither ranks nor versions
        for entry in answer["choices"][0]["logprobs"]["content"]:
            entry["token"] = f"token_id:{entry.pop('token_id')}"
        for name in ("stop_reason", "weight_versions"):
            del answer["choices"][0][name]
    response = await generate(answered_by_the_token_endpoint(answer), request_of(PROMPT_RECORDED, max_new_tokens=4))
    assert response.output_ids.tolist() == answer["choices"][0]["token_ids"]
    np.testing.assert_array_equal(response.logprobs, np.float32(expected))
    assert response.finish == Finish.LENGTH
    assert response.cached_tokens == 0
    assert response.versions == (VersionSpan(0, 4, None if older else "default"),)
