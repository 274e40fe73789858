"""Calls as the elements of one JSON array: Granite 3, Phi-4-mini and xLAM; Mistral reads its arrays here, too.

- Granite: `<|tool_call|>` and the array, whose `]` ends the calls; text may follow. Granite 3.1 spells `<tool_call>`.
  There is no reasoning. Source: vLLM 0.32, `parser/granite.py`.
- Phi-4-mini: a message that is `functools[{"name": ..., "arguments": {...}}]` and nothing else. Source: vLLM 0.32,
  `tool_parsers/phi4mini_tool_parser.py`, which cuts the array at the first `]` wherever it stands.
- xLAM: a message that is the array and nothing else; one whose first element does not begin with a "name" is an answer.
  Source: vLLM 0.32, `tool_parsers/xlam_tool_parser.py`, which also looks in fenced blocks and in other families' tags.
"""

from __future__ import annotations

import re
from collections.abc import Set

from tito_core.parsing import grammar as g
from tito_core.parsing.completion import Completion, Tools
from tito_core.parsing.json_call import after_blank, json_end, json_value, said_object
from tito_core.parsing.markup import Markup
from tito_core.parsing.registry import register_format
from tito_core.parsing.said import Malformed, shortened
from tito_core.parsing.turn import TaggedCalls

GRANITE_OPEN, GRANITE_OLD_OPEN = "<tool_call>", "<|tool_call|>"


class GraniteCalls(TaggedCalls):
    """An array after a tag."""

    tags = (GRANITE_OPEN, GRANITE_OLD_OPEN)
    opening = frozenset(tags)

    def read(self, said: Completion, opened: int, tag: str) -> int:
        """Read the array after the tag."""
        return read_array(said, opened, opened + len(tag), alone=False)

    def grammar(self, markup: Markup, tools: Tools) -> g.Grammar:
        """Force one call, with the tag that the vocabulary has as a token."""
        tag = GRANITE_OPEN if markup.token_of(GRANITE_OLD_OPEN) is None else GRANITE_OLD_OPEN
        return g.sequence(g.tag(markup, tag), forced_array(tools))


class BareArray:
    """A message that is an array after a word, or after none.

    Args:
        word: The word.
        begins: What the array begins with where it holds calls, as a regular expression.
    """

    tags = ()
    anchors = ()
    opening: Set[str] = frozenset()

    def __init__(self, word: str, begins: str) -> None:
        self.bare = (word or "[")[0]
        self._word = word
        self._begins = re.compile(re.escape(word) + begins)

    def read(self, said: Completion, opened: int, tag: str) -> int:
        """No tag opens calls."""
        raise AssertionError(f"{tag} opens no call.")

    def read_bare(self, said: Completion, start: int) -> int | None:
        """Read the array, where the message begins as one of calls does."""
        if not self._begins.match(said.text, start):
            return None
        read_array(said, start, start + len(self._word), alone=True)
        return len(said.text)

    def grammar(self, markup: Markup, tools: Tools) -> g.Grammar:
        """Force one call."""
        return g.sequence(g.text(self._word), forced_array(tools)) if self._word else forced_array(tools)


def forced_array(tools: Tools) -> g.Grammar:
    """An array of one call."""
    return g.json_calls(tools, before="[", after="]")


def read_array(said: Completion, opened: int, start: int, *, alone: bool, call_id: str | None = None) -> int:
    """Read the array at character `start` into calls.

    An array that is broken is one malformed call, from `opened` on: nothing tells where its calls begin and end.

    Args:
        said: The completion.
        opened: First character of the markup.
        start: First character of the array, or a blank before it.
        alone: Whether nothing but blanks may follow.
        call_id: Key under which a call may hold an id.

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
    try:
        value = json_value(text[start:end])
    except Malformed as fault:
        said.malformed(opened, end, fault.reason)
        return end
    if not isinstance(value, list) or not value:
        kind = "an empty one" if value == [] else type(value).__name__
        said.malformed(opened, end, f"The calls must be a JSON array that holds some, not {kind}.")
        return end
    at, begun = after_blank(text, start) + 1, opened
    for i, element in enumerate(value):
        stop = json_end(text, at)
        said.judge(begun, end if i == len(value) - 1 else stop, said_object, element, text[at:stop], call_id=call_id)
        begun = at = after_blank(text, stop) + 1  # past the comma
    return end


def _broken(said: Completion, opened: int, start: int) -> None:
    try:
        json_value(said.text[start:])
    except Malformed as fault:
        said.unclosed(opened, len(said.text), fault.reason)
    else:
        raise AssertionError("A JSON value has an end.")


register_format("granite", GraniteCalls(), reasoning=None)
register_format("phi4_mini", BareArray("functools", r"\["), "phi4_mini_json", reasoning=None)
register_format("xlam", BareArray("", r'\[\s*\{\s*"name"\s*:'))
