"""Calls of Step 3: a section of functions with parameters.

    <｜tool_calls_begin｜>
    <｜tool_call_begin｜>
    function<｜tool_sep｜><steptml:invoke name="look"><steptml:parameter name="at">x</steptml:parameter>
    </steptml:invoke><｜tool_call_end｜>
    <｜tool_calls_end｜>

Values are written as they are; the template writes lists and objects as Python does. Sources: the description in the
template of Step 3 (what it renders has a misspelt tag); vLLM 0.32, `tool_parsers/step3_tool_parser.py`; SGLang 0.5.23,
`function_call/step3_detector.py`. Step 3.5 writes calls as Qwen3-Coder does.
"""

from __future__ import annotations

from tito_core.parsing.call_format import CallFormat
from tito_core.parsing.call_values import ParsedCallText
from tito_core.parsing.completion import Completion, Cursor
from tito_core.parsing.formats.kimi import Section
from tito_core.parsing.formats.minimax import parameters, quoted
from tito_core.parsing.registry import Marks, register_format

SECTION = Section("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>", "<｜tool_call_begin｜>", "<｜tool_call_end｜>")
SEPARATOR, TYPE = "<｜tool_sep｜>", "function"
INVOKE, END_INVOKE = "<steptml:invoke name=", "</steptml:invoke>"
PARAMETER, END_PARAMETER = "<steptml:parameter name=", "</steptml:parameter>"


class Step3Calls(CallFormat):
    """A section of functions."""

    tags = (
        SECTION.open,
        SECTION.close,
        SECTION.call,
        SECTION.end_call,
        SEPARATOR,
        INVOKE,
        END_INVOKE,
        PARAMETER,
        END_PARAMETER,
    )
    opening = frozenset({SECTION.open})

    def read(self, completion: Completion, start: int, tag: str) -> int:
        """Read one section of calls."""
        return SECTION.read(completion, start, _call)


def _call(cursor: Cursor) -> ParsedCallText:
    kind = cursor.until_tag(SEPARATOR).strip()
    if kind != TYPE:
        raise cursor.error(f"The call's type must be {TYPE!r}, not {kind[:60]!r}.")
    cursor.tag(INVOKE)
    name = cursor.tool_name(quoted(cursor))
    arguments = parameters(cursor, PARAMETER, END_PARAMETER, in_python=True)
    cursor.tag(END_INVOKE)
    cursor.expect_end()
    return ParsedCallText(name, arguments)


register_format("step3", Step3Calls(), marks=Marks(("<steptml:invoke", SECTION.open)))
