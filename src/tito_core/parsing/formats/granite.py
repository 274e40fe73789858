"""Calls of Granite 3: `<|tool_call|>` and a JSON array of calls. Granite 3.1 spells `<tool_call>` instead.

Source: vLLM 0.32, `parser/granite.py`. The array's `]` ends the calls; text may follow. There is no reasoning.
"""

from __future__ import annotations

import json

from tito_core.parsing import grammar as g
from tito_core.parsing.call_format import CallFormat
from tito_core.parsing.completion import Completion, Tools
from tito_core.parsing.formats.json_array import read_array
from tito_core.parsing.markup import Markup
from tito_core.parsing.registry import register_format

OPEN, OLD_OPEN = "<tool_call>", "<|tool_call|>"


class GraniteCalls(CallFormat):
    """One array."""

    tags = (OPEN, OLD_OPEN)
    opening = frozenset({OPEN, OLD_OPEN})

    def read(self, said: Completion, opened: int, tag: str) -> int:
        """Read the array after the tag."""
        return read_array(said, opened, opened + len(tag), alone=False)

    def grammar(self, markup: Markup, tools: Tools) -> g.Grammar:
        """Force one call, with the tag that the vocabulary has as a token."""
        tag = OPEN if markup.token_of(OLD_OPEN) is None else OLD_OPEN
        return g.sequence(g.tag(markup, tag), forced_array(tools))


def forced_array(tools: Tools) -> g.Grammar:
    """An array of one call."""
    return g.either(
        g.sequence(
            g.text('[{"name": ' + json.dumps(name, ensure_ascii=False) + ', "arguments": '),
            g.arguments_json(schema),
            g.text("}]"),
        )
        for name, schema in tools.items()
    )


register_format("granite", GraniteCalls(), reasoning=None)
