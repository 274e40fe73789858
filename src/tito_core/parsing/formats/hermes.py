"""Hermes calls (Qwen2.5, Qwen3, and the tool template of `smollm2`).

`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, with any number of `<think>...</think>` blocks between.
Loose: an "id" or "type" beside, or no closing tag where the completion ends. vLLM 0.32 and SGLang 0.5.23 read both.
"""

from __future__ import annotations

import json

from tito_core.parsing import grammar as g
from tito_core.parsing.call_format import CallFormat
from tito_core.parsing.completion import Completion, Tools
from tito_core.parsing.cursor import Cursor
from tito_core.parsing.detection import Marks
from tito_core.parsing.json_call import json_end, json_value, said_object
from tito_core.parsing.markup import Markup
from tito_core.parsing.registry import register_format
from tito_core.parsing.said import Said

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_EXTRA = frozenset({"id", "type"})


class HermesCalls(CallFormat):
    """One JSON object a call."""

    tags = (OPEN, CLOSE)
    opening = frozenset({OPEN})

    def read(self, said: Completion, opened: int, tag: str) -> int:
        """Read one call."""
        body = opened + len(OPEN)
        # Without control tokens a JSON string may hold the closing tag, so look for it after the JSON value.
        begin = json_end(said.text, body) if said.markup.token_of(CLOSE) is None else body
        frame = said.frame(opened, body, CLOSE, self.opening, begin)
        return said.read(frame, CLOSE, _call, ends=True)

    def grammar(self, markup: Markup, tools: Tools) -> g.Grammar:
        """Force one call."""
        bodies = (
            g.sequence(
                g.text('\n{"name": ' + json.dumps(name, ensure_ascii=False) + ', "arguments": '),
                g.arguments_json(schema),
                g.text("}\n"),
            )
            for name, schema in tools.items()
        )
        return g.sequence(g.tag(markup, OPEN), g.either(bodies), g.tag(markup, CLOSE))


def _call(cursor: Cursor) -> Said:
    text = cursor.rest()
    return said_object(json_value(text), text, loosely=_EXTRA)


register_format(
    "hermes",
    HermesCalls(),
    "qwen",
    "qwen25",
    "qwen3_json",
    marks=Marks(("<tool_call>", '{"name": ', '"arguments": '), ("<function=", "<arg_key>", "<|tool_call>")),
)
