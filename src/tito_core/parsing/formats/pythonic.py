"""Calls as a Python list of calls: `[look(at="x"), count(far=5)]` (Llama 3.2 and 4, ToolACE, LFM2, OLMo 3).

The message is only the list, or the list is between two tags: for Llama 4 `<|python_start|>` and `<|python_end|>`, for
LFM2 and 2.5 `<|tool_call_start|>` and `<|tool_call_end|>`. OLMo 3 writes each call on its own line between
`<function_calls>` and `</function_calls>`. LFM2 writes a JSON array of calls instead where the system prompt asks for
JSON, as its model cards say; its strings stand as they are, even with line breaks, as in LFM2.5's template. Loose: no
closing tag where the completion ends.
Arguments are keyword arguments with literal values. JSON's true, false and null are accepted too, since templates
render nested values as JSON. A list with any error is one malformed call. Sources: vLLM 0.32,
`tool_parsers/pythonic_tool_parser.py` and `llama4_pythonic_tool_parser.py`; SGLang 0.5.23,
`function_call/pythonic_detector.py`.
"""

from __future__ import annotations

import re

from tito_core.parsing import grammar as g
from tito_core.parsing.call_format import CallFormat
from tito_core.parsing.call_values import Malformed, PythonReader, shortened
from tito_core.parsing.completion import Completion, Tools
from tito_core.parsing.formats.json_array import read_framed_array
from tito_core.parsing.markup import Markup
from tito_core.parsing.registry import Marks, register_format

_BEGINS_JSON = re.compile(r"\s*\[\s*\{")
_BEGINS = re.compile(r"\[\s*[A-Za-z_][\w./-]*\(")


class PythonicCalls(CallFormat):
    """One list.

    Attributes:
        tags: The tags around the list, if any.
        bare: Empty if a list without tags is text.
        lines: Whether each call is on its own line (OLMo 3).
        lfm2: Whether strings may have raw line breaks, and a JSON array of calls may be between the tags.
    """

    def __init__(self, *tags: str, bare: bool = True, lines: bool = False, lfm2: bool = False) -> None:
        self.tags = tags
        self.opening = frozenset(tags[:1])
        self.pairs = {tags[0]: tags[1]} if tags else {}
        self.bare = "[" if bare else ""
        self.lines = lines
        self.lfm2 = lfm2

    def read(self, completion: Completion, start: int, tag: str) -> int:
        """Read the list after the tag."""
        body, close = start + len(tag), self.tags[1]
        frame = completion.frame(start, body, close, self.opening)
        first, reason = len(completion.calls), f"The calls have no closing {close} tag."
        if frame.closed and self.lfm2 and _BEGINS_JSON.match(completion.text, body):
            read_framed_array(completion, frame)
        elif frame.closed:
            _read(completion, start, self._calls(completion, body, frame.body_end), frame.stop)
        elif not self.lines and not completion.truncated and self._is_list(completion, body, frame.stop):
            _read(completion, start, self._calls(completion, body, frame.stop), frame.stop)
            completion.mark_loose(first, reason)
        else:
            completion.add_unclosed(start, frame.stop, reason)
        return frame.stop

    def _calls(self, completion: Completion, body: int, end: int) -> PythonReader:
        return PythonReader(completion.text, body, end, self.lines, breaks=self.lfm2)

    def _is_list(self, completion: Completion, body: int, end: int) -> bool:
        """Return whether one whole list is between two characters, the second of which ends the completion."""
        reader = self._calls(completion, body, end)
        try:
            reader.calls()
        except Malformed:
            return False
        return end == len(completion.text) and not completion.text[reader.at :].strip()

    def read_bare(self, completion: Completion, start: int) -> int | None:
        """Read the list, if the message begins like one."""
        if not self.bare or not _BEGINS.match(completion.text, start):
            return None
        _read(completion, start, self._calls(completion, start, len(completion.text)), len(completion.text))
        return len(completion.text)

    def grammar(self, markup: Markup, tools: Tools) -> g.TagFormat:
        """Raise: engines have no grammar for Python literals by schema."""
        raise g.NoCallGrammarError(
            "A tool call cannot be forced with a pythonic parser: engines have no grammar for Python arguments by "
            f"schema. {g.CHOOSE_AUTO}"
        )


def _read(completion: Completion, start: int, reader: PythonReader, stop: int) -> None:
    first, end = reader.at, reader.stop
    try:
        calls = reader.calls()
        completion.content(first, reader.at)
    except Malformed as fault:
        if reader.at_end and end == len(completion.text):  # the text ends inside the list
            completion.add_unclosed(start, stop, fault.reason)
        else:
            completion.add_malformed(start, stop, fault.reason)
        return
    if rest := completion.text[reader.at : end].strip():
        completion.add_malformed(start, stop, f"Stray text follows the calls: {shortened(rest)}.")
        return
    for i, (call, last) in enumerate(calls):
        until = stop if i == len(calls) - 1 else last
        completion.add(start, until, call)
        start = last + 1  # past the comma


register_format(
    "pythonic",
    PythonicCalls(),
    reasoning=None,
    marks=Marks(("[func_name1(params_name1=params_value1",), ("<tool_call>",)),
)
register_format(
    "llama4_pythonic",
    PythonicCalls("<|python_start|>", "<|python_end|>"),
    reasoning=None,
    marks=Marks(("<|python_start|>", "<|header_start|>"), ('{"name": function name, "parameters": dictionary',)),
)
register_format(
    "lfm2",
    PythonicCalls("<|tool_call_start|>", "<|tool_call_end|>", bare=False, lfm2=True),
    marks=Marks(("<|tool_call_start|>[", "<|tool_call_end|>")),
)
register_format(
    "olmo3",
    PythonicCalls("<function_calls>", "</function_calls>", bare=False, lines=True),
    marks=Marks(("<function_calls>",), ("<｜DSML｜", "<invoke")),
)
