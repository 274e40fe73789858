"""Calls of Qwen3-Coder, Qwen3.5 and later, and Nemotron 3: a function with parameters on lines of their own.

    <tool_call>
    <function=look>
    <parameter=at>
    x
    </parameter>
    </function>
    </tool_call>

Sources: the chat templates of Qwen3.5 to 3.8 and of Nemotron 3 (both in TRL 1.16), and vLLM 0.32, `parser/qwen3.py` and
`parser/nemotron_v3.py`. A value that stands on the tag's own line is taken as it is, as vLLM's description has it.
Loose: a function on lines of its own without `<tool_call>`, a call without `</tool_call>` where the completion ends, a
value with a line break on one side. vLLM 0.32 and SGLang 0.5.23 read all three.
"""

from __future__ import annotations

from typing import Any

from tito_core.parsing import grammar as g
from tito_core.parsing.call_format import CallFormat
from tito_core.parsing.completion import Completion, Tools
from tito_core.parsing.cursor import Cursor
from tito_core.parsing.detection import Marks
from tito_core.parsing.markup import Markup
from tito_core.parsing.registry import register_format
from tito_core.parsing.said import Said
from tito_core.parsing.typed_value import typed_value

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"


class Qwen3CoderCalls(CallFormat):
    """One function a call."""

    tags = (OPEN, CLOSE, FUNCTION, END_FUNCTION, PARAMETER, END_PARAMETER)
    opening = frozenset({OPEN, FUNCTION})

    def read(self, said: Completion, opened: int, tag: str) -> int | None:
        """Read one call."""
        if tag == FUNCTION:
            return _unopened(said, opened)
        frame = said.frame(opened, opened + len(OPEN), CLOSE, {OPEN})
        return said.read(frame, CLOSE, _function, ends=True)

    def grammar(self, markup: Markup, tools: Tools) -> g.Grammar:
        """Force one call."""
        parameters = g.Parameters(lambda key, _: g.text(f"{PARAMETER}{key}>\n"), f"\n{END_PARAMETER}", "\n")
        functions = (
            g.sequence(g.text(f"\n{FUNCTION}{name}>\n"), *parameters.of(markup, schema), g.text(f"{END_FUNCTION}\n"))
            for name, schema in tools.items()
        )
        return g.sequence(g.tag(markup, OPEN), g.either(functions), g.tag(markup, CLOSE))


def _unopened(said: Completion, opened: int) -> int | None:
    """Read a function without the tag before it; None where text speaks of one.

    It is a call where it names a tool, begins a line, and nothing but a closing tag or another call follows it.
    """
    name, ended = said.text[opened + len(FUNCTION) :].partition(">")[:2]
    before = said.previous(opened)
    ahead = said.text[0 if before is None else before.stop : opened]
    begins = not ahead.rpartition("\n")[2].strip() and not ahead.rstrip().endswith(OPEN)
    end = said.next(opened + len(FUNCTION), {END_FUNCTION, FUNCTION, OPEN, CLOSE})
    if not ended or name not in said.tools or not begins or end is None or end.tag != END_FUNCTION:
        return None
    after = said.next(end.stop)
    if said.text[end.stop : len(said.text) if after is None else after.start].strip():
        return None
    stop = after.stop if after is not None and after.tag == CLOSE else end.stop
    said.judge(opened, stop, _function, Cursor(said, opened, end.stop), f"The call has no opening {OPEN} tag.")
    return stop


def _function(cursor: Cursor, loose: str = "") -> Said:
    cursor.loosen(loose)
    cursor.tag(FUNCTION)
    name = cursor.sound_name(cursor.through(">"))
    arguments: dict[str, Any] = {}
    while cursor.peek() == PARAMETER:
        cursor.tag(PARAMETER)
        key = _key(cursor)
        if key in arguments:
            raise cursor.fault(f"The parameter {key!r} appears twice.")
        arguments[key] = typed_value(_unframed(cursor, key), cursor.tools, name, key)
    cursor.tag(END_FUNCTION)
    cursor.end()
    return Said(name, arguments, loose=cursor.loose)


def _key(cursor: Cursor) -> str:
    key = cursor.through(">")
    if not key or key != key.strip() or not key.isprintable() or set(key) & set("<\"'="):
        raise cursor.fault(f"The parameter has no sound name: {key[:60]!r}.")
    return key


def _unframed(cursor: Cursor, key: str) -> str:
    """Take a value without the line breaks that set it apart, which it has on both sides or on none.

    An empty one may have a single line break.
    """
    value = cursor.upto(END_PARAMETER)
    if value == "\n":
        return ""
    if value.startswith("\n") != value.endswith("\n"):
        cursor.loosen(f"The value of {key!r} must stand on lines of its own.")
    return value.removeprefix("\n").removesuffix("\n")


register_format(
    "qwen3_coder",
    Qwen3CoderCalls(),
    "qwen3_xml",
    "qwen_xml",
    "nemotron",
    "nemotron_v3",
    "nanbeige",
    marks=Marks(("<tool_call>", "<function=", "<parameter=")),
)
