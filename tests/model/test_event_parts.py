"""The message, stop reason and events of an answer, for any answer that a parser can return."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tito_core.backend.protocol import TokenChunk, TokenResponse
from tito_core.chat.messages import MALFORMED_CALL
from tito_core.ledger.turn import Finish, VersionSpan
from tito_core.parsing.completion import CallStatus, ParsedCall, ParsedTurn
from tito_core.parsing.turn import Piece, PreviewError
from tito_core.turn.answer import (
    StreamedEvents,
    assistant_message,
    events,
    sampled_arguments,
    stop_reason,
)


def response(**changes: Any) -> TokenResponse:
    given_fields: dict[str, Any] = {
        "output_ids": np.array([7, 8], np.int32),
        "logprobs": np.array([-1.0, -2.0], np.float32),
        "finish": Finish.STOP,
        "stop": 8,
        "prompt_length": 5,
        "cached_tokens": None,
        "latency_s": 1.2346,
        "request_id": "r",
        "versions": (VersionSpan(0, 2, None),),
    }
    return TokenResponse(**{**given_fields, **changes})


def call(status: CallStatus = CallStatus.OK, name: str | None = "look", **changes: Any) -> ParsedCall:
    arguments = {"at": "x"} if status == CallStatus.OK else None
    given_fields = {"raw": f"<{name}>", "start": 0, "stop": 1, "arguments": arguments, **changes}
    return ParsedCall(status, name, **given_fields)


def message_of(parsed: ParsedTurn, finish: Finish = Finish.STOP, malformed: Any = "feedback") -> Any:
    numbers = itertools.count(1)
    return assistant_message(parsed, finish, lambda: f"call_{next(numbers)}", malformed)


def thought(text: str) -> Any:
    return {"reasoningContent": {"reasoningText": {"text": text}}}


def test_reasoning_text_and_calls_come_in_their_order() -> None:
    bad = call(CallStatus.MALFORMED, None, reason="Why.", raw="<bad>")
    named = call(CallStatus.MALFORMED, "find", reason="How.", raw="<find>")
    parsed = ParsedTurn("early\nlate", "Said.", (call(), bad, named, call(id="own")), late_reasoning="late")
    assert message_of(parsed) == {
        "role": "assistant",
        "content": [
            thought("early"),
            {"text": "Said."},
            thought("late"),
            {"toolUse": {"toolUseId": "call_1", "name": "look", "input": {"at": "x"}}},
            {"toolUse": {"toolUseId": "call_2", "name": MALFORMED_CALL, "input": {"reason": "Why.", "raw": "<bad>"}}},
            {
                "toolUse": {
                    "toolUseId": "call_3",
                    "name": MALFORMED_CALL,
                    "input": {"reason": "How.", "raw": "<find>", "name": "find"},
                }
            },
            {"toolUse": {"toolUseId": "call_4.own", "name": "look", "input": {"at": "x"}}},
        ],
    }


@pytest.mark.parametrize("blank", ["", " \n"])
def test_blank_blocks_are_left_out(blank: str) -> None:
    assert message_of(ParsedTurn(blank, blank, ())) == {"role": "assistant", "content": []}
    assert message_of(ParsedTurn(blank, "a ", ()))["content"] == [{"text": "a "}]
    assert message_of(ParsedTurn(" a", blank, ()))["content"] == [thought(" a")]


@pytest.mark.parametrize("malformed", ["feedback", "end_turn", "raise"])
@pytest.mark.parametrize("finish", list(Finish))
def test_calls_stay_text_where_the_answer_was_cut_or_one_is_malformed_and_gets_no_feedback(
    finish: Finish, malformed: Any
) -> None:
    bad = call(CallStatus.MALFORMED, reason="Why.", raw="<bad>")
    sound, broken = ParsedTurn("", "Said.", (call(),)), ParsedTurn("", "", (call(), bad))
    sound_content = message_of(sound, finish, malformed)["content"]
    broken_content = message_of(broken, finish, malformed)["content"]
    if finish.cut_off:
        assert sound_content == [{"text": "Said.\n<look>"}]
    else:
        assert [*sound_content[0], *sound_content[1]] == ["text", "toolUse"]
    if finish.cut_off or malformed != "feedback":
        assert broken_content == [{"text": "<look>\n<bad>"}]
    else:
        assert [block["toolUse"]["name"] for block in broken_content] == ["look", MALFORMED_CALL]


TEXT: Any = {"role": "assistant", "content": [{"text": "a"}]}
USE: Any = {"role": "assistant", "content": [{"text": "a"}, {"toolUse": {"toolUseId": "c", "name": "n", "input": {}}}]}


def test_stop_reasons() -> None:
    cut = response(finish=Finish.LENGTH, stop=None)
    assert [stop_reason(message, cut) for message in (TEXT, USE)] == ["max_tokens"] * 2
    assert [stop_reason(message, response(stop="END")) for message in (TEXT, USE)] == ["stop_sequence", "tool_use"]
    assert [stop_reason(message, response()) for message in (TEXT, USE)] == ["end_turn", "tool_use"]


def metadata(**more: int) -> Any:
    usage = {"inputTokens": 5, "outputTokens": 2, "totalTokens": 7, **more}
    return {"metadata": {"usage": usage, "metrics": {"latencyMs": 1235}}}


def test_the_events_of_an_answer() -> None:
    parsed = ParsedTurn("t", "a", (call(arguments={"é": 1}), call(arguments_text='{"at" : "x"}')))
    message = message_of(parsed)
    arguments = sampled_arguments(message, parsed)
    assert list(events(message, "tool_use", response(cached_tokens=0), arguments)) == [
        {"messageStart": {"role": "assistant"}},
        {"contentBlockStart": {"start": {}}},
        {"contentBlockDelta": {"delta": {"reasoningContent": {"text": "t"}}}},
        {"contentBlockStop": {}},
        {"contentBlockStart": {"start": {}}},
        {"contentBlockDelta": {"delta": {"text": "a"}}},
        {"contentBlockStop": {}},
        {"contentBlockStart": {"start": {"toolUse": {"toolUseId": "call_1", "name": "look"}}}},
        {"contentBlockDelta": {"delta": {"toolUse": {"input": '{"é": 1}'}}}},
        {"contentBlockStop": {}},
        {"contentBlockStart": {"start": {"toolUse": {"toolUseId": "call_2", "name": "look"}}}},
        {"contentBlockDelta": {"delta": {"toolUse": {"input": '{"at" : "x"}'}}}},
        {"contentBlockStop": {}},
        {"messageStop": {"stopReason": "tool_use"}},
        metadata(cacheReadInputTokens=0),
    ]
    assert list(events({"role": "assistant", "content": []}, "end_turn", response(), {})) == [
        {"messageStart": {"role": "assistant"}},
        {"messageStop": {"stopReason": "end_turn"}},
        metadata(),
    ]


class Shows:
    """A parser whose preview returns these pieces, chunk by chunk."""

    def __init__(self, *chunks: list[Piece]) -> None:
        self.chunks = iter(chunks)
        self.tails: list[Any] = []
        self.fed: list[list[int]] = []

    def preview(self, tail: Any) -> Any:
        self.tails.append(tail)
        return self

    def feed(self, ids: Any) -> list[Piece]:
        self.fed.append(ids)
        return next(self.chunks)


def chunk(*ids: int) -> TokenChunk:
    return TokenChunk(np.array(ids, np.int64))


def shown_and_then_whole(cuts: list[list[Piece]], message: Any) -> list[Any]:
    """Return all events of an answer whose beginning a preview streamed."""
    parser: Any = Shows(*cuts)
    showing = StreamedEvents(parser, [1, 2])
    streamed_events = [event for number in range(len(cuts)) for event in showing.of(chunk(number))]
    assert parser.tails == [[1, 2]]
    assert parser.fed == [[number] for number in range(len(cuts))]
    return [*streamed_events, *events(message, "end_turn", response(), {}, showing.blocks)]


def put_together(stream: list[Any]) -> list[Any]:
    """Join the deltas of each block, as Strands does."""
    whole: list[Any] = []
    for event in stream:
        if "contentBlockDelta" in event and whole and "contentBlockDelta" in whole[-1]:
            new, old = event["contentBlockDelta"]["delta"], whole[-1]["contentBlockDelta"]["delta"]
            if "text" in new:
                old["text"] += new["text"]
            else:
                old["reasoningContent"]["text"] += new["reasoningContent"]["text"]
        else:
            whole.append(json.loads(json.dumps(event)))
    return whole


@settings(max_examples=60)
@given(
    reasoning=st.text("ab", max_size=6),
    text=st.text("cd", max_size=6),
    calls=st.integers(0, 2),
    seen=st.integers(0, 12),
    chunks=st.lists(st.integers(0, 12), max_size=4),
)
def test_the_events_are_the_same_whatever_was_streamed_before(
    reasoning: str, text: str, calls: int, seen: int, chunks: list[int]
) -> None:
    message = message_of(ParsedTurn(reasoning, text, (call(),) * calls))
    pieces: list[Piece] = [Piece("reasoning", letter) for letter in reasoning] + [Piece("text", c) for c in text]
    pieces = pieces[:seen]
    edges = [0, *sorted(min(edge, len(pieces)) for edge in chunks), len(pieces)]
    cuts = [pieces[a:b] for a, b in itertools.pairwise(edges)]
    assert put_together(shown_and_then_whole(cuts, message)) == put_together(
        list(events(message, "end_turn", response(), {}))
    )


WRONG = [
    ([Piece("text", "b")], "text 'b'", "'a'"),
    ([Piece("reasoning", "a")], "reasoning 'a'", "'a'"),
    ([Piece("text", "a"), Piece("text", "b")], "text 'b'", "''"),
    ([Piece("text", ""), Piece("reasoning", "")], "text ''", "'a'"),
    ([Piece("text", "b" * 81)], f"text '{'b' * 80}'", "'a'"),
]


@pytest.mark.parametrize(("shown", "piece", "whole"), WRONG)
def test_a_wrong_preview_is_an_error(shown: list[Piece], piece: str, whole: str) -> None:
    with pytest.raises(PreviewError) as caught:
        list(events(TEXT, "end_turn", response(), {}, shown))
    assert [part for part in (piece, whole, "stream=False") if part not in str(caught.value)] == []


def test_a_wrong_preview_of_a_long_answer_shows_its_beginning() -> None:
    message: Any = {"role": "assistant", "content": [{"text": "a" * 81}]}
    with pytest.raises(PreviewError, match=rf" '{'a' * 80}' "):
        list(events(message, "end_turn", response(), {}, [Piece("text", "b")]))
