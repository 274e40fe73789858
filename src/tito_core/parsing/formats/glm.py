"""Calls of GLM 4.5 and later, Ling 3, LongCat 2 and Hy3: a name, then keys and values, each in its own tags.

    <tool_call>look<arg_key>at</arg_key><arg_value>x</arg_value></tool_call>

GLM-4.5 and 4.6 write a line break after the name, each key and each value; GLM-4.7 writes none, and allows a call
without arguments. Strings are written as they are, including blanks; other values are JSON. Hy3 writes calls in a
section, ends a name with `<tool_sep>`, and adds a suffix to each tag, such as `:opensource`, that its vocabulary shows.
Sources: the templates of GLM-4.5 (in TRL 1.16) and of Hy3, Laguna and Spark 2.5 (in llama-cpp-python 0.3.36); vLLM
0.32, `parser/glm47_moe.py`, `tool_parsers/hy_v3_tool_parser.py`; SGLang 0.5.23, `function_call/glm47_moe_detector.py`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from tito_core.parsing import grammar as g
from tito_core.parsing.call_format import CallFormat, Section
from tito_core.parsing.call_values import ParsedCallText
from tito_core.parsing.completion import Completion, Cursor, Tools
from tito_core.parsing.markup import Markup
from tito_core.parsing.registry import Marks, register_format, register_tool_parser
from tito_core.parsing.turn import LONGCAT_THINK, ReasoningTags, TurnParser

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class GlmCalls(CallFormat):
    """One call per pair of tags.

    Attributes:
        between: The text after the name, each key and each value.
        open: Opens a call.
        close: Closes it.
        key: Opens the name of an argument.
        end_key: Closes it.
        value: Opens the value of an argument.
        end_value: Closes it.
    """

    def __init__(self, between: str, family: str = "", suffix: str = "") -> None:
        self.between = between
        self.open, self.close = f"<{family}tool_call{suffix}>", f"</{family}tool_call{suffix}>"
        self.key, self.end_key = f"<{family}arg_key{suffix}>", f"</{family}arg_key{suffix}>"
        self.value, self.end_value = f"<{family}arg_value{suffix}>", f"</{family}arg_value{suffix}>"
        self.tags = (self.open, self.close, self.key, self.end_key, self.value, self.end_value)
        self.opening = frozenset({self.open})
        self.pairs = {self.open: self.close, self.key: self.end_key, self.value: self.end_value}

    def read(self, completion: Completion, start: int, tag: str) -> int:
        """Read one call."""
        frame = completion.frame(start, start + len(self.open), self.close, self.opening)
        after = completion.next_mark(frame.stop)
        if frame.closed and after is not None and after.tag in self.tags[1:]:  # closed before its arguments
            completion.add_malformed(start, frame.stop, f"The call has {after.tag} after its closing {self.close}.")
            return frame.stop
        return completion.read_frame(frame, self.close, self._call)

    def grammar(self, markup: Markup, tools: Tools) -> g.TagFormat:
        """Return the grammar of one call."""
        parameters = g.Parameters(lambda key, _: self._head(markup, key), self.end_value, self.between)
        calls = (
            g.sequence(*self._named(markup, name), *parameters.all(markup, schema)) for name, schema in tools.items()
        )
        return g.sequence(g.tag(markup, self.open), g.either(calls), g.tag(markup, self.close))

    def _named(self, markup: Markup, name: str) -> tuple[g.TagFormat, ...]:
        return (g.text(name + self.between),)

    def _head(self, markup: Markup, key: g.TagFormat) -> g.TagFormat:
        between = [g.text(self.between)] if self.between else []
        head = (g.tag(markup, self.key), key, g.tag(markup, self.end_key))
        return g.sequence(*head, *between, g.tag(markup, self.value))

    def _call(self, cursor: Cursor) -> ParsedCallText:
        pairs = cursor.peek() is not None
        name = cursor.tool_name((cursor.until_tag(self.key) if pairs else cursor.take_rest()).strip())
        return self._pairs(cursor, name, pairs)

    def _pairs(self, cursor: Cursor, name: str, pairs: bool) -> ParsedCallText:
        """Take the arguments and the end of the call; `pairs`: the tag before the first argument was taken."""
        arguments: dict[str, Any] = {}
        while pairs:
            key = cursor.until_tag(self.end_key)
            declared = [] if cursor.schema is None else cursor.schema.names()
            if not key or key != key.strip() or (set(key) & set("<>") and key not in declared):
                raise cursor.error(f"The call has no valid argument name: {key[:60]!r}.")
            if key in arguments:
                raise cursor.error(f"The argument {key!r} appears twice.")
            cursor.tag(self.value)
            arguments[key] = cursor.reading(cursor.until_tag(self.end_value))
            if pairs := cursor.peek() is not None:
                cursor.tag(self.key)
        cursor.expect_end()
        return ParsedCallText(name, arguments)


class HyCalls(GlmCalls):
    """A section of calls, with a separator after each name.

    Attributes:
        section: The tags of the section and of a call.
        separator: The tag after a name.
    """

    def __init__(self, suffix: str) -> None:
        super().__init__("\n", suffix=suffix)
        self.separator = f"<tool_sep{suffix}>"
        inner = frozenset({self.separator, *self.tags} - {self.open, self.close})
        self.section = Section(f"<tool_calls{suffix}>", f"</tool_calls{suffix}>", self.open, self.close, inner)
        self.tags = (self.section.open, self.section.close, self.separator, *self.tags)
        self.opening = frozenset({self.section.open})
        self.pairs = {**self.section.pairs, **self.pairs}

    def read(self, completion: Completion, start: int, tag: str) -> int:
        """Read one section of calls."""
        return self.section.read(completion, start, self._call)

    def grammar(self, markup: Markup, tools: Tools) -> g.TagFormat:
        """Return the grammar of a section with one call."""
        blank = g.text("\n")
        begin, end = g.tag(markup, self.section.open), g.tag(markup, self.section.close)
        return g.sequence(begin, blank, super().grammar(markup, tools), blank, end)

    def _named(self, markup: Markup, name: str) -> tuple[g.TagFormat, ...]:
        return g.text(name), g.tag(markup, self.separator), g.text(self.between)

    def _call(self, cursor: Cursor) -> ParsedCallText:
        name = cursor.tool_name(cursor.until_tag(self.separator).strip())
        if pairs := cursor.peek() is not None:
            cursor.tag(self.key)
        return self._pairs(cursor, name, pairs)


register_format("glm45", GlmCalls("\n"), "poolside_v1", marks=Marks(("<tool_call>{function-name}\n<arg_key>",)))
register_format("glm47", GlmCalls(""), "glm", "ling3", "spark25", marks=Marks(("<tool_call>{function-name}<arg_key>",)))
register_format(
    "longcat2",
    GlmCalls("\n", "longcat_"),
    reasoning=LONGCAT_THINK,
    marks=Marks(("<longcat_tool_call>", "<longcat_arg_key>")),
)


@register_tool_parser("hy_v3", "hunyuan", marks=Marks(("<tool_sep", "<arg_key", "<tool_calls")))
def _hy(tokenizer: PreTrainedTokenizerBase) -> TurnParser:
    found = (re.fullmatch(r"<tool_calls(:\w+)?>", token.content) for token in tokenizer.added_tokens_decoder.values())
    suffix = next((match[1] or "" for match in found if match), ":opensource")  # as in the published template
    return TurnParser(tokenizer, HyCalls(suffix), ReasoningTags(f"<think{suffix}>", f"</think{suffix}>"))
