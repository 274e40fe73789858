"""Parts of vLLM's wire: request fields, entries and events."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from support.backends import BACKENDS, Handler, Received, answering, http_response, over_socket
from tito_conformance.testing import WireResponse
from tito_core.backend import (
    AuthenticationError,
    BadRequestError,
    OptionalOutputs,
    SamplingParams,
    ServerError,
)
from tito_core.backend.generate import score
from tito_core.backend.http.streaming import StreamError
from tito_vllm import wire
from tito_vllm import wire as stream


def completion(**changes: Any) -> bytes:
    """An event of `/v1/completions`."""
    logprobs = {"token_logprobs": [-1.0], "tokens": ["token_id:5"], "text_offset": [changes.pop("offset", 0)]}
    choice = {"finish_reason": None, "token_ids": [5], "logprobs": logprobs, **changes}
    return json.dumps({"choices": [choice]}).encode()


def generation(top: dict[str, Any] | None = None, **changes: Any) -> bytes:
    """An event of `/inference/v1/generate`."""
    content = {"content": [{"logprob": -1.0, "token_id": 5}]}
    choice = {"finish_reason": None, "token_ids": [5], "logprobs": content, **changes}
    return json.dumps({"choices": [choice], **(top or {})}).encode()


def fails(pattern: str, events: stream.EventAssembler[Any], event: bytes) -> None:
    with pytest.raises(StreamError, match=pattern):
        events.add(event)


def test_an_event_of_two_completions_is_refused() -> None:
    two = json.dumps({"choices": [{"finish_reason": None}] * 2}).encode()
    fails("2 completions", stream.EventAssembler(wire.Completion), two)


def test_an_event_after_the_last_is_refused() -> None:
    events = stream.EventAssembler(wire.Completion)
    assert list(events.add(completion(finish_reason="stop"))) == [5]
    fails("finish reason", events, completion())
    assert list(events.add(b'{"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}')) == []


def test_an_echo_in_the_middle_is_refused() -> None:
    events = stream.EventAssembler(wire.Completion)
    assert list(events.add(completion(prompt_token_ids=[1]))) == [5]
    fails("prompt ids", events, completion(prompt_token_ids=[1]))
    other = stream.EventAssembler(wire.Generation)
    assert list(other.add(generation({"prompt_token_ids": [1]}))) == [5]
    fails("prompt ids", other, generation({"prompt_token_ids": [1]}))


def test_a_smaller_text_offset_is_refused_and_an_equal_one_is_not() -> None:
    events = stream.EventAssembler(wire.Completion)
    for offset in (3, 3, 4):
        assert list(events.add(completion(offset=offset))) == [5]
    events.add(json.dumps({"choices": [{"finish_reason": None}]}).encode())
    fails("offset 3 .* 4", events, completion(offset=3))


@pytest.mark.parametrize("kind", [wire.Completion, wire.Generation])
def test_a_long_stream_keeps_few_events(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One takes a kilobyte: a thousand rollouts of 32,000 streamed tokens each would hold 37 GB, in place of 8."""
    make = completion if kind is wire.Completion else generation
    sent = [make(token_ids=[n], finish_reason="stop" if n == 9 else None) for n in range(10)]

    def answer(most: int) -> Any:
        monkeypatch.setattr(wire, "MERGED", most)
        events = stream.EventAssembler(kind)
        for event in sent:
            events.add(event)
            assert len(events._events) <= most
        return events.result()

    assert answer(2) == answer(3) == answer(10)


def test_outputs_that_a_stream_lacks() -> None:
    for generates in (True, False):
        assert not stream.must_not_stream(OptionalOutputs(top_logprobs=1), generates=generates)
        assert stream.must_not_stream(OptionalOutputs(prompt_logprobs=True), generates=generates)
        assert stream.must_not_stream(OptionalOutputs(sampling_mask=True), generates=generates)
        assert stream.must_not_stream(OptionalOutputs(routed_experts=True), generates=generates) is not generates
    assert stream.stream_fields(None) == {"stream": False}
    options = {"include_usage": True, "continuous_usage_stats": True}
    assert stream.stream_fields(lambda _: None) == {"stream": True, "stream_options": options}


def test_a_stop_regex_is_refused() -> None:
    with pytest.raises(BadRequestError, match="vLLM has no stop_regex: end answers with `stop`"):
        wire.sampling_fields(SamplingParams(extra={"stop_regex": "a+"}))


@pytest.mark.parametrize(
    ("refusal", "most", "one_more"),
    [
        ("no number", None, None),
        ("greater than max allowed: 20, got", 20, 19),
        ("max allowed: 0", 0, 0),
    ],
)
def test_the_limit_in_a_refusal(refusal: str, most: int | None, one_more: int | None) -> None:
    plain, generating = (wire.capabilities(refusal, one_more=more, grammar=None) for more in (False, True))
    assert (plain.top_logprobs, generating.top_logprobs) == (most, one_more)
    assert (plain.sampling_mask, generating.sampling_mask) == (False, None)
    for can in (plain, generating):
        assert (can.expert_shape, can.lower_first, can.options) == (True, True, wire.OPTIONS)
        assert (can.prompt_logprobs, can.routed_experts, can.priority) == (None, None, None)


@pytest.mark.parametrize(
    ("text", "token"),
    [
        ("token_id:12", 12),
        ("12", "12"),
        ("token_id:x", "token_id:x"),
        ("token_id:", "token_id:"),
        ("a", "a"),
    ],
)
def test_tokens_by_their_ids(text: str, token: int | str) -> None:
    assert wire.token_of(text) == token
    assert wire.ids_of([wire.TokenLogprob(-1.0, token=text), wire.TokenLogprob(-1.0, 7, text)]) == [token, 7]


def test_top_tokens() -> None:
    rows = [msgspec.Raw(b'{"token_id:5": -1.5, "token_id:6": null}'), msgspec.Raw(b"null")]
    logprobs = wire.Logprobs([], [], top_logprobs=rows)
    assert logprobs.top() == [[(5, -1.5), (6, None)], []]
    assert wire.Logprobs([], []).top() == []
    with pytest.raises(msgspec.ValidationError):
        wire.Logprobs([], [], top_logprobs=[msgspec.Raw(b'{"token_id:5": "x"}')]).top()
    entry = wire.TokenLogprob(-1.0, top_logprobs=msgspec.Raw(b'[{"logprob": -2.0, "token_id": 5}]'))
    assert wire.ContentLogprobs([entry, wire.TokenLogprob(-1.0)]).top() == [[(5, -2.0)], []]


SCORED = {"choices": [{"finish_reason": "length", "prompt_logprobs": [None, {"12": {"logprob": -1.0}}]}]}


async def test_scoring_requests_one_token() -> None:
    requests: list[Any] = []

    def handler(request: Received) -> WireResponse:
        if request.method == "GET":
            return http_response(200, json={"data": [{"id": "m"}], "version": "1"})
        requests.append((request.path, json.loads(request.content), request.headers["x-request-id"]))
        return http_response(200, json={**SCORED, "id": "cmpl-..."})

    assert (await score(answering("vllm", handler), [11, 12]))[1] == -1.0
    path, body, name = requests[-1]
    assert path == "/v1/completions"
    assert body == {
        "model": "m",
        "prompt": [11, 12],
        "max_tokens": 1,
        "temperature": 1.0,
        "top_k": 1,
        "prompt_logprobs": 0,
    }
    assert len(name) == 32


@pytest.mark.parametrize(
    ("status", "error"),
    [(401, AuthenticationError), *((one, None) for one in (403, 404, 405, 501)), (500, ServerError)],
)
async def test_an_unsupported_abort_is_ignored(status: int, error: Any) -> None:
    nothing = Handler(lambda _: http_response(status))
    backend = BACKENDS["vllm"]("http://scripted", patience_s=0, http_transport=over_socket(nothing))
    if error is None:
        await backend.abort("r")
        return
    with pytest.raises(error):
        await backend.abort("r")


IMAGES = [
    (None, (False, None), "--enable-scale-out"),
    ("At most 8 image(s) may be provided in one prompt. (parameter=image)", (True, 8), ""),
    ("At most 0 image(s) may be provided in one prompt.", (False, 0), "--limit-mm-per-prompt"),
    ("Cache miss for image at index 0 but data is not provided.", (True, None), ""),
    ("tiny is not a multimodal model", (False, None), "takes images"),
    ("Requested sample logprobs of 2147483647, greater than max allowed: 20", (False, None), "takes images"),
    ("", (False, None), "takes images"),
]


@pytest.mark.parametrize(("refusal", "found", "words"), IMAGES)
def test_the_refusal_of_many_images_tells_whether_some_are_taken(refusal: Any, found: Any, words: str) -> None:
    support = wire.image_support(refusal)
    assert (support.accepted, support.most) == found
    assert words in support.remedy


STOPPING = SamplingParams(max_new_tokens=8, stop=(".",), stop_token_ids=(7,))


@pytest.mark.parametrize(
    ("reported", "last", "sampling", "stop"),
    [
        (".", 5, STOPPING, "."),
        (7, 7, STOPPING, 7),
        (None, 2, STOPPING, 2),  # null: the model's own end of sequence
        (msgspec.UNSET, 7, STOPPING, 7),
        (msgspec.UNSET, 5, STOPPING, None),  # what ended it is unknown: it may be "."
        (msgspec.UNSET, 5, STOPPING.model_copy(update={"stop": ()}), 5),
        (None, None, STOPPING, None),
    ],
)
def test_what_ended_an_answer(
    reported: int | str | msgspec.UnsetType | None, last: int | None, sampling: SamplingParams, stop: int | str | None
) -> None:
    choice = wire.Generated("stop", token_ids=None if last is None else [5, last], stop_reason=reported)
    assert wire.stop_of(choice, sampling) == stop
