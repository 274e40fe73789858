"""Hermes calls (Qwen2.5, Qwen3, and the tool template of `smollm2`).

`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, with any number of `<think>...</think>` blocks between.
"""

from __future__ import annotations

from tito_core.parsing import grammar as g
from tito_core.parsing.completion import Completion, Tools
from tito_core.parsing.json_call import json_call, json_end
from tito_core.parsing.markup import Markup
from tito_core.parsing.registry import register_format
from tito_core.parsing.turn import TaggedCalls

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesCalls(TaggedCalls):
    """One JSON object a call."""

    tags = (OPEN, CLOSE)
    opening = frozenset({OPEN})

    def read(self, said: Completion, opened: int, tag: str) -> int:
        """Read one call."""
        body = opened + len(OPEN)
        # Without control tokens a JSON string may hold the closing tag, so look for it after the JSON value.
        begin = json_end(said.text, body) if said.markup.token_of(CLOSE) is None else body
        frame = said.frame(opened, body, CLOSE, self.opening, begin)
        return said.read(frame, CLOSE, lambda cursor: json_call(cursor.rest()))

    def grammar(self, markup: Markup, tools: Tools) -> g.Grammar:
        """Force one call."""
        return g.sequence(g.tag(markup, OPEN), g.json_calls(tools, before="\n", after="\n"), g.tag(markup, CLOSE))


register_format("hermes", HermesCalls())
