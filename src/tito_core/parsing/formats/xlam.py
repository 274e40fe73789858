"""Calls of xLAM: a message that is a JSON array of calls and nothing else.

Source: vLLM 0.32, `tool_parsers/xlam_tool_parser.py`, which also looks in fenced blocks and in other families' tags.
An array whose first element does not begin with a "name" is an answer, not a call.
"""

from __future__ import annotations

import re

from tito_core.parsing import grammar as g
from tito_core.parsing.completion import Completion, Tools
from tito_core.parsing.formats.granite import forced_array
from tito_core.parsing.formats.json_array import read_array
from tito_core.parsing.markup import Markup
from tito_core.parsing.registry import register_format

_BEGINS = re.compile(r'\[\s*\{\s*"name"\s*:')


class XlamCalls:
    """One array."""

    tags = ()
    anchors = ()
    bare = "["
    opening: frozenset[str] = frozenset()

    def read(self, said: Completion, opened: int, tag: str) -> int:
        """No tag opens calls."""
        raise AssertionError(f"{tag} opens no call.")

    def read_bare(self, said: Completion, start: int) -> int | None:
        """Read the array, where the message begins as one of calls does."""
        if not _BEGINS.match(said.text, start):
            return None
        read_array(said, start, start, alone=True)
        return len(said.text)

    def grammar(self, markup: Markup, tools: Tools) -> g.Grammar:
        """Force one call."""
        return forced_array(tools)


register_format("xlam", XlamCalls())
