"""Calls of Muse Glimmer: messages to a recipient, with a section of functions in a message to a tool.

     to=self<|message|>Hm.<|eom|><|start|>assistant to=look<|message|><atem:function_calls>
    <atem:invoke name="look">
    <atem:parameter name="at">x</atem:parameter>
    </atem:invoke>
    </atem:function_calls><|eot|>

A message to `self` is reasoning, and one to `user`, or without a recipient, is text; functions in these are text, too.
The generation prompt ends in `<|start|>assistant`, so the first message begins with its recipient. Strings are written
as they are, including blanks; other values are JSON. Loose: a function that is not the recipient; no `<|eom|>` before
the next message. Sources: the template of Muse Glimmer (in TRL 1.16); vLLM 0.32,
`tool_parsers/muse_glimmer_tool_parser.py`; SGLang 0.5.23, `function_call/muse_glimmer_detector.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from tito_core.parsing.call_format import CallFormat, Section, parameters, quoted
from tito_core.parsing.call_values import ParsedCallText, after_blank
from tito_core.parsing.completion import Completion, Cursor
from tito_core.parsing.registry import Marks, register_format
from tito_core.parsing.turn import ReasoningTags

START, MESSAGE, END_MESSAGE, END_TURN = "<|start|>", "<|message|>", "<|eom|>", "<|eot|>"
HEADER = f"{START}assistant"
TO_SELF, TO_USER = f"to=self{MESSAGE}", f"to=user{MESSAGE}"
PARAMETER, END_PARAMETER = "<atem:parameter name=", "</atem:parameter>"
SECTION = Section("<atem:function_calls>", "</atem:function_calls>", "<atem:invoke name=", "</atem:invoke>")
_RECIPIENT = re.compile(r"\s*to=([\w./-]+)\s*")


class MuseCalls(CallFormat):
    """A message to a tool, with a section of functions."""

    tags = (*SECTION.tags, PARAMETER, END_PARAMETER)
    anchors = (START, MESSAGE)
    bare = "t"
    opening = frozenset({HEADER})
    pairs: Mapping[str, str] = {**SECTION.pairs, PARAMETER: END_PARAMETER}
    wrappers = (HEADER, TO_USER, MESSAGE, END_MESSAGE, END_TURN)

    def read(self, completion: Completion, start: int, tag: str) -> int:
        """Read a message that a header begins; of one that is not to a tool, read the header alone."""
        stop = start + len(HEADER)
        mark = completion.next_mark(stop)
        if (
            mark is not None
            and mark.start == after_blank(completion.text, stop)
            and mark.tag in (TO_SELF, *self.wrappers)
        ):
            return stop
        after = self._message(completion, start, stop)
        if after is not None:
            return after
        end = len(completion.text) if mark is None else mark.start
        if completion.text[stop:end].lstrip().startswith("to="):
            completion.add_unclosed(start, end, f"The message has no valid header: {HEADER} to=NAME{MESSAGE}.")
            return end
        return stop

    def read_bare(self, completion: Completion, start: int) -> int | None:
        """Read the message that the generation prompt has begun."""
        return self._message(completion, start, start)

    def _message(self, completion: Completion, start: int, header: int) -> int | None:
        """Read the message to a tool whose recipient is at the character `header`; None if there is none."""
        mark = completion.next_mark(header, {MESSAGE})
        recipient = None if mark is None else _RECIPIENT.fullmatch(completion.text[header : mark.start])
        if mark is None or recipient is None:
            return None
        section = completion.next_mark(mark.stop)
        if section is None or section.tag != SECTION.open or completion.text[mark.stop : section.start].strip():
            stop = len(completion.text) if section is None else section.start
            completion.add_unclosed(start, stop, f"The message to {recipient[1]} has no {SECTION.open}.")
            return stop
        first = len(completion.calls)
        stop = SECTION.read(completion, section.start, lambda cursor: _invoke(cursor, recipient[1]))
        after = completion.next_mark(stop)
        rest = completion.text[stop : len(completion.text) if after is None else after.start]
        if rest.strip() or (after is not None and after.tag not in (END_MESSAGE, END_TURN)):
            completion.mark_loose(first, f"The message has no {END_MESSAGE} after the functions.")
        return stop


def _invoke(cursor: Cursor, recipient: str) -> ParsedCallText:
    name = cursor.tool_name(quoted(cursor))
    if name != recipient:
        cursor.mark_loose(f"The message is to {recipient}, but calls {name}.")
    arguments = parameters(cursor, PARAMETER, END_PARAMETER)
    cursor.expect_end()
    return ParsedCallText(name, arguments, loose=cursor.loose)


register_format(
    "muse_glimmer",
    MuseCalls(),
    "muse",
    reasoning=ReasoningTags(TO_SELF, END_MESSAGE),
    marks=Marks((SECTION.open, SECTION.call)),
)
