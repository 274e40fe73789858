"""Calls of Phi-4-mini: a message that is `functools[{"name": ..., "arguments": {...}}]` and nothing else.

Source: vLLM 0.32, `tool_parsers/phi4mini_tool_parser.py`, which cuts the array at the first `]` wherever it stands.
"""

from __future__ import annotations

from tito_core.parsing import grammar as g
from tito_core.parsing.call_format import CallFormat
from tito_core.parsing.completion import Completion, Tools
from tito_core.parsing.formats.granite import forced_array
from tito_core.parsing.formats.json_array import read_array
from tito_core.parsing.markup import Markup
from tito_core.parsing.registry import register_format

OPEN = "functools"


class Phi4MiniCalls(CallFormat):
    """One array after a word."""

    bare = OPEN[0]

    def read_bare(self, said: Completion, start: int) -> int | None:
        """Read the array after the word, where the message begins so."""
        if not said.text.startswith(OPEN + "[", start):
            return None
        read_array(said, start, start + len(OPEN), alone=True)
        return len(said.text)

    def grammar(self, markup: Markup, tools: Tools) -> g.Grammar:
        """Force one call."""
        return g.sequence(g.text(OPEN), forced_array(tools))


register_format("phi4_mini", Phi4MiniCalls(), "phi4_mini_json", reasoning=None)
