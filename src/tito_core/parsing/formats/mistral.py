"""Calls of Mistral: `[TOOL_CALLS]` before each name with its arguments, or before one JSON array.

Since tokenizer version 11 each call is `[TOOL_CALLS]look[ARGS]{"at": "x"}`, in version 11 with `[CALL_ID]...` after the
name; before that all are `[TOOL_CALLS][{"name": "look", "arguments": {"at": "x"}}]`. Sources: vLLM 0.32,
`parser/mistral.py`; SGLang 0.5.23, `function_call/mistral_detector.py`.
"""

from __future__ import annotations

from tito_core.parsing import grammar as g
from tito_core.parsing.call_format import CallFormat
from tito_core.parsing.call_text import ParsedCallText
from tito_core.parsing.completion import Completion, Frame, Tools
from tito_core.parsing.cursor import Cursor
from tito_core.parsing.detection import Marks
from tito_core.parsing.formats.json_array import forced_array, read_array
from tito_core.parsing.json_call import after_blank, json_end, said_arguments
from tito_core.parsing.markup import Markup
from tito_core.parsing.reasoning import BRACKET_THINK
from tito_core.parsing.registry import register_format

OPEN, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class MistralCalls(CallFormat):
    """Both forms; a call has no closing tag, but ends where the next begins or the completion ends."""

    tags = (OPEN, CALL_ID, ARGUMENTS)
    opening = frozenset({OPEN})

    def read(self, said: Completion, opened: int, tag: str) -> int:
        """Read one call, or the array."""
        body = opened + len(OPEN)
        if said.text.startswith("[", after_blank(said.text, body)) and not _is_tag(said, after_blank(said.text, body)):
            return read_array(said, opened, body, alone=True, call_id="id")
        begin = body
        if said.markup.token_of(OPEN) is None:  # then a JSON string may hold the tag
            arguments = said.next(body, {ARGUMENTS})
            begin = body if arguments is None else json_end(said.text, arguments.stop)
        found = said.next(begin, self.opening)
        stop = len(said.text) if found is None else found.start
        frame = Frame(opened, body, stop, stop, True)
        whole = not said.truncated or found is not None or _complete(said, frame)
        if whole:
            said.read(frame, OPEN, _call)
            said.uncertain = said.uncertain or not said.calls[-1].status.runs  # the next may stand in its arguments
            return stop
        said.unclosed(opened, stop, "The call is cut off.")
        return stop

    def grammar(self, markup: Markup, tools: Tools) -> g.Grammar:
        """Force one call, in the form that the vocabulary has."""
        if markup.token_of(ARGUMENTS) is None:
            return g.sequence(g.tag(markup, OPEN), forced_array(tools))
        calls = (
            g.sequence(g.text(name), g.tag(markup, ARGUMENTS), g.arguments_json(schema))
            for name, schema in tools.items()
        )
        return g.sequence(g.tag(markup, OPEN), g.either(calls))


def _is_tag(said: Completion, char: int) -> bool:
    mark = said.next(char)
    return mark is not None and mark.start == char


def _complete(said: Completion, frame: Frame) -> bool:
    """Return whether a call at the end of a completion has its arguments whole."""
    arguments = said.next(frame.body, {ARGUMENTS})
    return arguments is not None and json_end(said.text, arguments.stop) > arguments.stop


def _call(cursor: Cursor) -> ParsedCallText:
    name, written = cursor.sound_name(cursor.upto(ARGUMENTS, CALL_ID).strip()), None
    if cursor.taken == CALL_ID:
        written = cursor.upto(ARGUMENTS).strip()
        if not written.isalnum():
            raise cursor.fault(f"The call's id must be letters and digits, not {written[:60]!r}.")
    return said_arguments(name, cursor.rest(), written)


register_format("mistral", MistralCalls(), reasoning=BRACKET_THINK, marks=Marks(("[TOOL_CALLS]",)))
