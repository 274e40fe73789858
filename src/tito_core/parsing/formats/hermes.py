"""Hermes calls (Qwen2.5, Qwen3, Granite 4, Ling 2.6, LongCat-Flash, ERNIE 4.5, and the tool template of `smollm2`).

`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, with any number of `<think>...</think>` blocks between.
Loose: an additional key "id" or "type", or no closing tag at the end of the completion. vLLM 0.32 and SGLang 0.5.23
read both.
"""

from __future__ import annotations

from collections.abc import Sequence

from tito_core.parsing import grammar as g
from tito_core.parsing.call_format import CallFormat
from tito_core.parsing.call_values import ParsedCallText, call_of_object, json_end, json_value
from tito_core.parsing.completion import Completion, Cursor, Tools
from tito_core.parsing.markup import Markup
from tito_core.parsing.registry import Marks, register_format
from tito_core.parsing.turn import LONGCAT_THINK

_EXTRA = frozenset({"id", "type"})


class HermesCalls(CallFormat):
    """One JSON object per call.

    Attributes:
        open: Opens a call.
        close: Closes it.
    """

    def __init__(self, open: str = "<tool_call>", close: str = "</tool_call>", wrappers: Sequence[str] = ()) -> None:
        self.open, self.close = open, close
        self.tags, self.opening, self.wrappers = (open, close), frozenset({open}), wrappers

    def read(self, completion: Completion, start: int, tag: str) -> int:
        """Read one call."""
        body = start + len(self.open)
        # If the closing tag is not a token, a JSON string may spell it, so search for it after the JSON value.
        search = json_end(completion.text, body) if completion.markup.token_of(self.close) is None else body
        frame = completion.frame(start, body, self.close, self.opening, search)
        return completion.read_frame(frame, self.close, _call, self_delimiting=True)

    def grammar(self, markup: Markup, tools: Tools) -> g.Grammar:
        """Return the grammar of one call."""
        begin, end = g.tag(markup, self.open), g.tag(markup, self.close)
        return g.sequence(begin, g.json_calls(tools, before="\n", after="\n"), end)


def _call(cursor: Cursor) -> ParsedCallText:
    text = cursor.take_rest()
    return call_of_object(json_value(text), text, loosely=_EXTRA)


register_format(
    "hermes",
    HermesCalls(),
    "qwen",
    "qwen25",
    "qwen3_json",
    "granite4",
    "trinity",
    marks=Marks(("<tool_call>", '{"name": ', '"arguments": '), ("<function=", "<arg_key>", "<|tool_call>")),
)
register_format("ernie45", HermesCalls(wrappers=("<response>", "</response>")))
register_format(
    "longcat",
    HermesCalls("<longcat_tool_call>", "</longcat_tool_call>"),
    reasoning=LONGCAT_THINK,
    marks=Marks(("<longcat_tool_call>", '"arguments": '), ("<longcat_arg_key>",)),
)
