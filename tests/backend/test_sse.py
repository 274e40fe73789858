"""Server-sent events are the same however their bytes are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tito_core.backend.http.body import AnswerSize, BodyTooLargeError
from tito_core.backend.http.streaming import EventReader

SIZE = AnswerSize(1 << 20, 1 << 20)
DATA = st.lists(st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"]), min_size=1).map(str.strip))


@given(
    DATA.map(lambda found: [text for text in found if text and text != "[DONE]"]),
    st.data(),
    st.sampled_from(["\n", "\r\n"]),
)
def test_events_are_whole_however_the_bytes_are_cut(events: list[str], data: st.DataObject, end: str) -> None:
    blanks = st.sampled_from(["", ": ping" + end, end])
    body = "".join(data.draw(blanks) + f"data: {event}{end}{end}" for event in events) + f"data: [DONE]{end}{end}"
    raw = body.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    reader, found = EventReader(SIZE), []
    for start, stop in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        found += reader.feed(raw[start:stop])
    assert [event.decode() for event in found] == events
    assert reader.done


def test_events_after_done_and_incomplete_events_are_ignored() -> None:
    reader = EventReader(SIZE)
    assert reader.feed(b'data:{"a": 1}\n\ndata: {"b"') == [b'{"a": 1}']
    assert not reader.done
    assert reader.feed(b": 2}\ndata: [DONE]\n\ndata: more\n\n") == [b'{"b": 2}']
    assert reader.done


@given(st.integers(1, 20), st.lists(st.integers(1, 20), min_size=1, max_size=3), st.integers(0, 9))
def test_a_line_and_a_stream_are_read_up_to_their_limits(limit: int, lengths: list[int], spare: int) -> None:
    """Whatever comes in one piece is in memory already; so the lines come byte by byte."""
    raw = b"\n".join(b"x" * length for length in lengths)
    reader = EventReader(AnswerSize(limit, len(raw) + spare))
    longest = next((at for at, length in enumerate(lengths) if length > limit), None)
    fits = len(raw) if longest is None else sum(lengths[:longest]) + longest + limit
    for at in range(fits):
        assert reader.feed(raw[at : at + 1]) == []
    if longest is not None:
        with pytest.raises(BodyTooLargeError) as caught:
            reader.feed(raw[fits : fits + 1])
        assert caught.value.limit == limit
    else:
        reader.feed(b"\n" * spare)
        with pytest.raises(BodyTooLargeError) as caught:
            reader.feed(b"\n")
        assert caught.value.limit == len(raw) + spare
