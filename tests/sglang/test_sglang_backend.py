"""The SGLang backend: its request bodies, and recorded answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.backends import (
    EOS,
    PROMPT,
    Handler,
    Received,
    Waits,
    answering,
    backend_of,
    engine_of,
    http_response,
    over_socket,
    request_of,
)
from tito_conformance.testing import Completion, WireResponse
from tito_core.backend.generate import generate, score
from tito_sglang.backend import SGLangBackend

WIRE = Path(__file__).parents[1] / "wire"
RECORDED = WIRE / "sglang-0.5.23"


def recorded(name: str, folder: Path = RECORDED) -> Any:
    return json.loads((folder / f"{name}.json").read_text())


def replaying(answer: Any, *, echo: list[int] | None = None) -> Any:
    """A server that gives one recorded answer, with the echo that most recordings did not ask for."""
    documents = {
        "/v1/models": recorded("info_v1_models"),
        "/model_info": recorded("info_model_info"),
        "/v1/loads": recorded("info_v1_loads", WIRE / "sglang-0.5.23-more"),
    }

    def handler(request: Received) -> WireResponse:
        if request.method == "GET" and request.path not in documents:
            return http_response(404, json={"detail": "Not Found"})
        if request.method == "GET":
            return http_response(200, json=documents[request.path]["response_json"])
        if echo is not None:
            answer["prompt_token_ids"] = echo
        return http_response(200, json=answer)

    return answering("sglang", handler)


async def test_the_whole_request_body() -> None:
    engine = engine_of("sglang", lambda _: Completion([5, EOS]))
    await generate(backend_of(engine), request_of(request_id="abc", temperature=0.5, seed=0))
    (request,) = engine.requests
    assert dict(request.body) == {
        "input_ids": list(PROMPT),
        "rid": "abc",
        "return_logprob": True,
        "logprob_start_len": -1,
        "return_prompt_token_ids": True,
        "stream": False,
        "sampling_params": {
            "max_new_tokens": 8,
            "min_new_tokens": 0,
            "temperature": 0.5,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": [EOS],
            "stop": [],
            "sampling_seed": 0,
            "n": 1,
            "logit_bias": None,
            "stop_regex": None,
            "custom_params": None,
            "json_schema": None,
            "regex": None,
            "ebnf": None,
            "structural_tag": None,
            "ignore_eos": False,
            "no_stop_trim": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
        },
    }


async def test_recorded_server_properties_are_read() -> None:
    info = await replaying({}).connect()
    assert (info.model, info.version, info.weight_version) == ("models/qwen3-tiny-f32", "0.5.23", "default")
    assert info.max_model_len == 4090


async def test_the_recorded_echo_is_read() -> None:
    record = recorded("gen_prompt_token_ids")
    answer = record["response_json"]
    entries = [[-1.0, token, None] for token in answer["output_ids"]]
    answer["meta_info"]["output_token_logprobs"] = entries
    request = request_of(record["request"]["json"]["input_ids"], max_new_tokens=2)
    assert (await generate(replaying(answer), request)).output_ids.tolist() == answer["output_ids"]


async def test_recorded_scores_are_read() -> None:
    record = recorded("gen_score_only_max0")
    ids = record["request"]["json"]["input_ids"]
    scores = await score(replaying(record["response_json"]), ids)
    entries = record["response_json"]["meta_info"]["input_token_logprobs"]
    assert np.isnan(scores[0])
    assert scores[1:].tolist() == np.array([entry[0] for entry in entries[1:]], np.float32).tolist()


async def test_abort_is_by_rid() -> None:
    engine = engine_of("sglang")
    await backend_of(engine).abort("abc")
    (exchange,) = engine.exchanges
    assert (exchange.path, exchange.body) == ("/abort_request", b'{"rid":"abc"}')


@pytest.mark.parametrize(
    ("status", "body", "size"),
    [
        (400, recorded("err_logit_bias_oov")["response_json"], 151936),
        (400, {"error": "unknown field `logit_bias`"}, None),
        (400, {"detail": "no"}, None),
        (
            200,
            {"output_ids": [], "meta_info": {"finish_reason": None, "completion_tokens": 0}, "prompt_token_ids": [0]},
            None,
        ),
    ],
)
async def test_the_vocabulary_is_read_or_unknown(status: int, body: Any, size: int | None) -> None:
    def handler(request: Received) -> WireResponse:
        if request.method == "GET":
            return http_response(200, json={"data": [{"id": "m"}]})
        return http_response(status, json=body)

    backend = SGLangBackend("http://scripted", http_transport=over_socket(Handler(handler)))
    assert (await backend.connect()).vocab_size == size


async def test_the_vocabulary_probe_is_harmless() -> None:
    engine = engine_of("sglang", vocab_size=77)
    assert (await backend_of(engine).connect()).vocab_size == 77
    assert engine.requests == []
    assert not engine.state.dead


async def test_the_vocabulary_probe_is_retried() -> None:
    busy = [True]

    def handler(request: Received) -> WireResponse:
        if request.method == "GET":
            return http_response(200, json={"data": [{"id": "m"}]})
        if busy.pop() if busy else False:
            return http_response(503, json=recorded("q_overflow")["response_json"])
        return http_response(400, json=recorded("err_logit_bias_oov")["response_json"])

    waits = Waits()
    backend = SGLangBackend("http://scripted", http_transport=over_socket(Handler(handler)), sleep=waits)
    assert (await backend.connect()).vocab_size == 151936
    assert len(waits.seconds) == 1
