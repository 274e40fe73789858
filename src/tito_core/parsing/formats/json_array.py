"""Calls as the elements of one JSON array (Granite, Mistral, Phi-4-mini, xLAM)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tito_core.parsing.completion import Completion
from tito_core.parsing.json_call import after_blank, json_end, json_value, said_object
from tito_core.parsing.said import Malformed, Said, shortened


def read_array(
    said: Completion,
    opened: int,
    start: int,
    *,
    alone: bool,
    stop: int | None = None,
    call_id: str | None = None,
    read: Callable[[Any, str], Said] | None = None,
) -> int:
    """Read the array at character `start` into calls.

    An array that is broken is one malformed call, from `opened` on: nothing tells where its calls begin and end.

    Args:
        said: The completion.
        opened: First character of the markup.
        start: First character of the array, or a blank before it.
        alone: Whether nothing but blanks may follow.
        stop: One past the last character of the calls, markup included; by default that of the array.
        call_id: Key under which a call may hold an id.
        read: Reads one call from its value and its text; by default `said_object`.

    Returns:
        The character after the array, or after the completion where the array is broken.
    """
    text, total = said.text, len(said.text)
    end = json_end(text, start)
    if end == start:
        _broken(said, opened, start)
        return total
    if alone and text[end:].strip():
        said.malformed(opened, total, f"Stray text follows the calls: {shortened(text[end:].strip())}.")
        return total
    last = end if stop is None else stop
    try:
        value = json_value(text[start:end])
    except Malformed as fault:
        said.malformed(opened, last, fault.reason)
        return end
    if not isinstance(value, list) or not value:
        kind = "an empty one" if value == [] else type(value).__name__
        said.malformed(opened, last, f"The calls must be a JSON array that holds some, not {kind}.")
        return end
    at, begun = after_blank(text, start) + 1, opened
    for i, element in enumerate(value):
        after = json_end(text, at)
        until = last if i == len(value) - 1 else after
        if read is None:
            said.judge(begun, until, said_object, element, text[at:after], call_id=call_id)
        else:
            said.judge(begun, until, read, element, text[at:after])
        begun = at = after_blank(text, after) + 1  # past the comma
    return end


def _broken(said: Completion, opened: int, start: int) -> None:
    try:
        json_value(said.text[start:])
    except Malformed as fault:
        said.unclosed(opened, len(said.text), fault.reason)
    else:
        raise AssertionError("A JSON value has an end.")
