"""Parts of SGLang's wire: request fields, entries and events."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.backends import Received, answering, http_response, request_of
from tito_conformance.testing import WireResponse
from tito_conformance.testing.sglang_requests import FIELDS
from tito_core.backend import Backend, BadRequestError, OptionalOutputs, ProtocolViolationError, SamplingParams
from tito_core.backend.generate import generate, score
from tito_core.backend.http.streaming import StreamError
from tito_sglang import wire
from tito_sglang import wire as stream

LIMIT = 1 << 20


def event(ids: list[int], count: int) -> bytes:
    meta = {
        "id": "r",
        "finish_reason": None,
        "completion_tokens": count,
        "output_token_logprobs": [[-1.0, token, None] for token in ids],
    }
    return json.dumps({"output_ids": ids, "meta_info": meta}).encode()


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.data())
def test_events_are_cumulative_or_incremental(ids: list[int], data: st.DataObject) -> None:
    for whole in (True, False):
        events, at = stream.EventAssembler(LIMIT), 0
        while at < len(ids):
            end = data.draw(st.integers(at + 1, len(ids)))
            output_ids = ids[:end] if whole else ids[at:end]
            assert list(events.add(event(output_ids, end))) == ids[at:end]
            at = end
        answer = events.result()
        assert answer.output_ids == ids
        assert [entry.token for entry in answer.meta_info.output_token_logprobs or ()] == ids


@pytest.mark.parametrize(("ids", "count"), [([5, 6, 7], 2), ([7, 6], 2), ([6], 3), ([6, 6], 4), ([], 2)])
def test_an_event_that_does_not_continue_is_refused(ids: list[int], count: int) -> None:
    events = stream.EventAssembler(LIMIT)
    events.add(event([5], 1))
    with pytest.raises(StreamError, match=f"event of {len(ids)} ids .*{count} tokens after 1 "):
        events.add(event(ids, count))
    with pytest.raises(StreamError):
        stream.EventAssembler(LIMIT).add(event([5], 2))


@pytest.mark.parametrize(
    ("prompt", "tokens", "every"), [(1, 2, 1), (1023, 1, 1), (1022, 4, 2), (1, 2046, 2), (32000, 300, 32)]
)
def test_a_long_prompt_is_repeated_seldom(prompt: int, tokens: int, every: int) -> None:
    assert stream.stream_interval(request_of([5] * prompt, max_new_tokens=tokens)) == every


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("as_json", [False, True])
def test_a_servers_preferred_parameters_change_no_request(name: str, as_json: bool) -> None:
    """The server sends each request as {**preferred, **request} to the engine (`tokenizer_manager.py` of 0.5.23)."""
    preferred: Any = json.dumps({name: 1}) if as_json else {name: 1}
    info = msgspec.json.decode(json.dumps({"preferred_sampling_params": preferred}), type=wire.ModelInfo)
    found = info.preferred_sampling_params
    assert found == {name: 1}
    sent = wire.sampling_fields(SamplingParams())
    if name in ("beam_width", "watermark", "choice"):
        with pytest.raises(BadRequestError, match=f"adds {name} to every request .--preferred-sampling-params"):
            wire.refuse_preferred(found)
    else:
        wire.refuse_preferred(found)
        assert name in sent or name == "stream_interval", "which concerns only how an answer is cut into events"


def test_preferred_parameters_that_are_no_json_are_a_damaged_answer() -> None:
    with pytest.raises(msgspec.DecodeError, match="truncated"):
        msgspec.json.decode(b'{"preferred_sampling_params": "{"}', type=wire.ModelInfo)


async def test_a_server_whose_preferred_parameters_cannot_be_overridden_is_refused() -> None:
    def handler(request: Received) -> WireResponse:
        models = {"data": [{"id": "m"}]}
        preferred = {"preferred_sampling_params": {"beam_width": 4}}
        return http_response(200, json=models if request.path == "/v1/models" else preferred)

    with pytest.raises(BadRequestError, match="adds beam_width"):
        await answering("sglang", handler).connect()


def loads(*sizes: int | None) -> wire.Loads:
    return wire.Loads(loads=[wire.Load(size) for size in sizes])


@pytest.mark.parametrize(
    ("context", "memory", "usable"),
    [
        (None, (), None),
        (None, (None,), None),
        (100, (), 94),
        (100, (None, 50, 70), 44),
        (40, (50,), 34),
        (None, (9,), 3),
    ],
)
def test_the_length_that_can_be_used(context: int | None, memory: tuple[int | None, ...], usable: int | None) -> None:
    assert wire.usable_length(context, loads(*memory)) == usable


def test_optional_outputs_are_reported() -> None:
    entries = [wire.LogprobEntry(None, 12), wire.LogprobEntry(-1.0, 13), wire.LogprobEntry(-2.0, 14)]
    meta = wire.MetaInfo(
        *(None, 1),
        input_token_logprobs=entries,
        output_top_logprobs=[[wire.LogprobEntry(-1.0, 5)]],
        output_token_sampling_mask=[[5]],
        routed_experts="e",
    )
    request = request_of()
    scoring = replace(request, optional_outputs=OptionalOutputs(prompt_logprobs=True))
    fields = wire.reported(wire.Generation([5], meta), scoring, "r", 100)
    assert fields["prompt_logprobs"] == [(13, -1.0), (14, -2.0)], "the first one has none"
    assert fields["top_logprobs"]() == [[(5, -1.0)]]
    assert (fields["routed_experts"], fields["sampling_mask"]) == ("e", [[5]])
    assert wire.reported(wire.Generation([5], meta), request, "r", 100)["prompt_logprobs"] is None
    nothing = wire.reported(wire.Generation([5], wire.MetaInfo(None, 1)), scoring, "r", 100)
    assert (nothing["prompt_logprobs"], nothing["top_logprobs"]) == (None, None)


async def test_scoring_samples_nothing() -> None:
    bodies: list[Any] = []

    def handler(request: Received) -> WireResponse:
        if request.method == "GET":
            return http_response(200, json={"data": [{"id": "m"}]})
        bodies.append(json.loads(request.content))
        entries = [[None, 11, None], [-1.0, 12, None]]
        meta = {"id": "r", "finish_reason": None, "completion_tokens": 0, "input_token_logprobs": entries}
        return http_response(200, json={"output_ids": [], "meta_info": meta})

    assert (await score(answering("sglang", handler), [11, 12]))[1] == -1.0
    name = bodies[-1].pop("rid")
    assert len(name) == 32
    assert bodies[-1] == {
        "sampling_params": {**wire.NEUTRAL, "max_new_tokens": 0, "temperature": 0.0},
        "logprob_start_len": 0,
        "return_logprob": True,
        "token_ids_logprob": [12],
        "stream": False,
        "input_ids": [11, 12],
    }


async def of_a_turn(backend: Backend) -> list[float]:
    """Return the prompt's logprobs that a turn gets."""
    sent = replace(request_of([11, 12, 13], max_new_tokens=1), optional_outputs=OptionalOutputs(prompt_logprobs=True))
    answer = await generate(backend, sent)
    return [math.nan, *answer.columns["prompt_logprobs"].values.tolist()]


@pytest.mark.parametrize("shift", [0.0, 0.005, 0.02, 3.0])
@pytest.mark.parametrize("scores", [lambda backend: score(backend, [11, 12, 13]), of_a_turn], ids=["score", "turn"])
async def test_the_scores_of_another_request_beside_the_right_ids_are_refused(scores: Any, shift: float) -> None:
    def handler(request: Received) -> WireResponse:
        if request.method == "GET":
            return http_response(200, json={"data": [{"id": "m"}]})
        entries = [[None, 11, None], [-1.0, 12, None], [-2.0 - shift, 13, None]]
        given = [None, [[-9.0, 13, None]], [[-2.0, 13, None]]]
        body = json.loads(request.content)
        assert body["token_ids_logprob"] == [13]
        meta = {"id": body["rid"], "finish_reason": None, "completion_tokens": 0, "input_token_logprobs": entries}
        meta["input_token_ids_logprobs"] = given
        if body["sampling_params"]["max_new_tokens"]:
            meta |= {"finish_reason": {"type": "length"}, "completion_tokens": 1, "prompt_tokens": 3}
            meta["output_token_logprobs"] = [[-1.0, 7, None]]
        ids = [7] * meta["completion_tokens"]
        return http_response(200, json={"output_ids": ids, "meta_info": meta, "prompt_token_ids": [11, 12, 13]})

    backend = answering("sglang", handler)
    if shift <= wire.SAME:
        assert list(await scores(backend))[1:] == pytest.approx([-1.0, -2.0 - shift])
    else:
        with pytest.raises(ProtocolViolationError, match=r"id 13 at offset 2 .* another request's"):
            await scores(backend)


VISION = wire.ModelInfo(has_image_understanding=True, model_type="qwen2_5_vl")
CACHED = wire.ServerInfo(mm_preprocess_cache_size_mb=64)
SUPPORT: list[tuple[wire.ModelInfo | None, wire.ServerInfo | None, bool, str]] = [
    (None, None, False, "takes images"),
    (wire.ModelInfo(model_type="qwen3_vl"), wire.ServerInfo(), False, "takes images"),
    (VISION, wire.ServerInfo(), False, "qwen2_5_vl.*--mm-preprocess-cache-size-mb"),
    (VISION, wire.ServerInfo(mm_preprocess_cache_size_mb=0), False, "--mm-preprocess-cache-size-mb"),
    (VISION, CACHED, True, ""),
    (VISION, None, False, "/server_info does not tell.* --mm-preprocess-cache-size-mb 64"),
    (wire.ModelInfo(has_image_understanding=True, model_type="qwen3_vl"), wire.ServerInfo(), True, ""),
    (wire.ModelInfo(has_image_understanding=True, model_type="qwen3_vl"), None, True, ""),
    (wire.ModelInfo(has_image_understanding=True, model_type="glm4v"), CACHED, False, "not known.* glm4v.* qwen2_5_vl"),
    (wire.ModelInfo(has_image_understanding=True), CACHED, False, "not known"),
]


@pytest.mark.parametrize(("model", "server", "accepted", "words"), SUPPORT)
def test_a_server_that_decodes_prompts_takes_no_images(model: Any, server: Any, accepted: bool, words: str) -> None:
    support = wire.image_support(model, server)
    assert (support.accepted, support.most) == (accepted, None)
    assert re.search(words, support.remedy)


def test_the_limit_of_images_is_the_servers() -> None:
    server = wire.ServerInfo(mm_preprocess_cache_size_mb=64, limit_mm_data_per_request={"image": 3, "video": 0})
    assert wire.image_support(VISION, server).most == 3
