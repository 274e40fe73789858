"""Calls of Mistral: `[TOOL_CALLS]` before each call, or before one JSON array of calls.

Since tokenizer version 11 each call is `[TOOL_CALLS]look[ARGS]{"at": "x"}`, in version 11 with `[CALL_ID]...` after the
name; before, all calls are `[TOOL_CALLS][{"name": "look", "arguments": {"at": "x"}}]`. Loose: no `[ARGS]` between name
and arguments, which vLLM reads. Sources: vLLM 0.32, `parser/mistral.py`; SGLang 0.5.23,
`function_call/mistral_detector.py`; `tokens/tokenizers/instruct.py` of mistral-common, whose versions 11 and 13 always
write `[ARGS]`, as a control token.
"""

from __future__ import annotations

from dataclasses import replace

from tito_core.parsing import grammar as g
from tito_core.parsing.call_format import CallFormat
from tito_core.parsing.call_text import Malformed, ParsedCallText, is_valid_name
from tito_core.parsing.completion import Completion, Frame, Tools
from tito_core.parsing.cursor import Cursor
from tito_core.parsing.detection import Marks
from tito_core.parsing.formats.json_array import forced_array, read_array
from tito_core.parsing.json_call import after_blank, call_of_arguments, json_end
from tito_core.parsing.markup import Markup
from tito_core.parsing.reasoning import BRACKET_THINK
from tito_core.parsing.registry import register_format

OPEN, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class MistralCalls(CallFormat):
    """Both forms. A call has no closing tag: it ends at the next call or at the end of the completion."""

    tags = (OPEN, CALL_ID, ARGUMENTS)
    opening = frozenset({OPEN})

    def read(self, completion: Completion, start: int, tag: str) -> int:
        """Read one call, or the array."""
        body = start + len(OPEN)
        first = after_blank(completion.text, body)
        if completion.text.startswith("[", first) and not _is_tag(completion, first):
            return read_array(completion, start, body, alone=True, call_id="id")
        search = body
        if completion.markup.token_of(OPEN) is None:  # then a JSON string may spell the tag
            arguments = completion.next_mark(body, {ARGUMENTS})
            search = body if arguments is None else json_end(completion.text, arguments.stop)
        following = completion.next_mark(search, self.opening)
        stop = len(completion.text) if following is None else following.start
        frame = Frame(start, body, stop, stop, True)
        if completion.truncated and following is None and not _is_complete(completion, frame):
            completion.add_unclosed(start, stop, "The call is cut off.")
            return stop
        try:
            call = _call(Cursor(completion, body, stop))
        except Malformed as fault:
            completion.add_malformed(start, stop, fault.reason, fault.name)
            completion.uncertain = True  # the next call may be part of its arguments
        else:
            completion.add(start, stop, call)
        return stop

    def grammar(self, markup: Markup, tools: Tools) -> g.Grammar:
        """Return the grammar of one call, in the form for the vocabulary."""
        if markup.token_of(ARGUMENTS) is None:
            return g.sequence(g.tag(markup, OPEN), forced_array(tools))
        calls = (
            g.sequence(g.text(name), g.tag(markup, ARGUMENTS), g.arguments_json(schema))
            for name, schema in tools.items()
        )
        return g.sequence(g.tag(markup, OPEN), g.either(calls))


def _is_tag(completion: Completion, char: int) -> bool:
    mark = completion.next_mark(char)
    return mark is not None and mark.start == char


def _is_complete(completion: Completion, frame: Frame) -> bool:
    """Return whether the arguments of a call at the end of a completion are complete."""
    arguments = completion.next_mark(frame.body, {ARGUMENTS})
    return arguments is not None and json_end(completion.text, arguments.stop) > arguments.stop


def _call(cursor: Cursor) -> ParsedCallText:
    if cursor.peek() is None:
        head, brace, rest = cursor.take_rest().partition("{")
        lacks = cursor.error(f"The call lacks {ARGUMENTS} or {CALL_ID}.")
        if not brace or not is_valid_name(head.strip()):
            raise lacks
        return replace(call_of_arguments(cursor.tool_name(head.strip()), brace + rest), loose=lacks.reason)
    name, written = cursor.tool_name(cursor.until_tag(ARGUMENTS, CALL_ID).strip()), None
    if cursor.taken == CALL_ID:
        written = cursor.until_tag(ARGUMENTS).strip()
        if not written.isalnum():
            raise cursor.error(f"The call's id must be letters and digits, not {written[:60]!r}.")
    return call_of_arguments(name, cursor.take_rest(), written)


register_format("mistral", MistralCalls(), reasoning=BRACKET_THINK, marks=Marks(("[TOOL_CALLS]",)))
