"""Calls of Hunyuan and Cohere Command: a JSON array of calls between two tags.

    <tool_calls>[{"name": "look", "arguments": {"at": "x"}}]</tool_calls>
    <|START_ACTION|>[{"tool_call_id": "0", "tool_name": "look", "parameters": {"at": "x"}}]<|END_ACTION|>

Sources: the templates of Hunyuan-A13B, of Command R7B and of Command A+; vLLM 0.32,
`tool_parsers/hunyuan_a13b_tool_parser.py` and `parser/cohere_command.py`. Both also put answers between tags.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tito_core.parsing import grammar as g
from tito_core.parsing.call_format import CallFormat
from tito_core.parsing.call_text import ParsedCallText, shortened
from tito_core.parsing.completion import Completion, Tools
from tito_core.parsing.detection import Marks
from tito_core.parsing.formats.json_array import read_array
from tito_core.parsing.json_call import after_blank, call_of_object, json_end
from tito_core.parsing.markup import Markup
from tito_core.parsing.reasoning import THINK, ReasoningTags
from tito_core.parsing.registry import register_format


class TaggedArrayCalls(CallFormat):
    """One array between two tags.

    Attributes:
        name: Key of the tool's name.
        arguments: Key of the arguments.
        number: Key of the call's number in the message; empty if it has none.
    """

    def __init__(
        self,
        open: str,
        close: str,
        wrappers: Sequence[str],
        name: str = "name",
        arguments: str = "arguments",
        number: str = "",
    ) -> None:
        self.tags, self.opening, self.wrappers = (open, close), frozenset({open}), wrappers
        self.name, self.arguments, self.number = name, arguments, number

    def read(self, completion: Completion, start: int, tag: str) -> int:
        """Read the array and the tag after it."""
        body, close = start + len(tag), self.tags[1]
        is_array = completion.text.startswith("[", after_blank(completion.text, body))
        end = json_end(completion.text, body) if is_array else body
        # If the closing tag is not a token, a JSON string may spell it, so search for it after the array.
        search = end if completion.markup.token_of(close) is None else body
        frame = completion.frame(start, body, close, self.opening, search)
        if not frame.closed:
            completion.add_unclosed(start, frame.stop, f"The calls have no closing {close} tag.")
            return frame.stop
        if end > frame.body_end or end == body or completion.text[end : frame.body_end].strip():
            what = shortened(completion.text[body : frame.body_end])
            completion.add_malformed(start, frame.stop, f"The calls must be one JSON array, not {what}.")
            return frame.stop
        read_array(completion, start, body, alone=False, stop=frame.stop, read=self._call)
        return frame.stop

    def grammar(self, markup: Markup, tools: Tools) -> g.Grammar:
        """Return the grammar of one call."""
        number = f'"{self.number}": "0", ' if self.number else ""
        calls = (
            g.sequence(
                g.text(f'[{{{number}"{self.name}": {json.dumps(name, ensure_ascii=False)}, "{self.arguments}": '),
                g.arguments_json(schema),
                g.text("}]"),
            )
            for name, schema in tools.items()
        )
        return g.sequence(g.tag(markup, self.tags[0]), g.either(calls), g.tag(markup, self.tags[1]))

    def _call(self, value: Any, text: str) -> ParsedCallText:
        allowed = frozenset({self.number}) if self.number else frozenset()
        return call_of_object(value, text, self.arguments, allowed=allowed, name_key=self.name)


register_format(
    "hunyuan_a13b",
    TaggedArrayCalls("<tool_calls>", "</tool_calls>", ("<answer>", "</answer>")),
    reasoning=THINK,
    marks=Marks(("<tool_calls>", "助手：")),
)
register_format(
    "cohere_command",
    TaggedArrayCalls(
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        "tool_name",
        "parameters",
        "tool_call_id",
    ),
    "cohere_command3",
    "cohere_command4",
    reasoning=ReasoningTags("<|START_THINKING|>", "<|END_THINKING|>"),
    marks=Marks(("<|START_ACTION|>", '"tool_name"')),
)
