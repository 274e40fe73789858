"""Calls as a Python list of calls: `[look(at="x"), count(far=5)]` (Llama 3.2 and 4, ToolACE, LFM2, OLMo 3).

The message is the list and nothing else, or the list stands between two tags: for Llama 4 `<|python_start|>` and
`<|python_end|>`, for LFM2 and 2.5 `<|tool_call_start|>` and `<|tool_call_end|>`. OLMo 3 writes calls on lines of their
own between `<function_calls>` and `</function_calls>`.
Arguments are literals by keyword. JSON's true, false and null count beside Python's: templates render nested values so.
A list with any fault is one malformed call. Sources: vLLM 0.32, `tool_parsers/pythonic_tool_parser.py` and
`llama4_pythonic_tool_parser.py`; SGLang 0.5.23, `function_call/pythonic_detector.py`.
"""

from __future__ import annotations

import re

from tito_core.parsing import grammar as g
from tito_core.parsing.call_format import CallFormat
from tito_core.parsing.call_text import Malformed, shortened
from tito_core.parsing.completion import Completion, Tools
from tito_core.parsing.detection import Marks
from tito_core.parsing.formats.python_literals import Calls
from tito_core.parsing.markup import Markup
from tito_core.parsing.registry import register_format

_BEGINS = re.compile(r"\[\s*[A-Za-z_][\w.]*\(")


class PythonicCalls(CallFormat):
    """One list.

    Attributes:
        tags: The markup around it, if any.
        bare: Empty where a list without markup is text.
        lines: Whether calls stand on lines of their own instead (OLMo 3).
    """

    def __init__(self, *tags: str, bare: bool = True, lines: bool = False) -> None:
        self.tags = tags
        self.opening = frozenset(tags[:1])
        self.bare = "[" if bare else ""
        self.lines = lines

    def read(self, said: Completion, opened: int, tag: str) -> int:
        """Read the list after the tag."""
        body, close = opened + len(tag), self.tags[1]
        frame = said.frame(opened, body, close, self.opening)
        if frame.closed:
            _read(said, opened, body, frame.end, frame.stop, self.lines)
        else:
            said.unclosed(opened, frame.stop, f"The calls have no closing {close} tag.")
        return frame.stop

    def read_bare(self, said: Completion, start: int) -> int | None:
        """Read the list, where the message begins as one of calls does."""
        if not self.bare or not _BEGINS.match(said.text, start):
            return None
        _read(said, start, start, len(said.text), len(said.text))
        return len(said.text)

    def grammar(self, markup: Markup, tools: Tools) -> g.Grammar:
        """Refuse: engines have no grammar for Python literals by schema."""
        raise g.NoCallGrammarError(
            "A tool call cannot be forced with a pythonic parser: engines have no grammar for Python arguments by "
            "schema. Leave the choice to the policy, or set sampling.grammar."
        )


def _read(said: Completion, opened: int, start: int, end: int, stop: int, lines: bool = False) -> None:
    reader = Calls(said.text, start, end, lines)
    try:
        calls = reader.read()
    except Malformed as fault:
        if reader.at_end and end == len(said.text):  # the text ends before the list does
            said.unclosed(opened, stop, fault.reason)
        else:
            said.malformed(opened, stop, fault.reason)
        return
    if rest := said.text[reader.at : end].strip():
        said.malformed(opened, stop, f"Stray text follows the calls: {shortened(rest)}.")
        return
    for i, (call, last) in enumerate(calls):
        until = stop if i == len(calls) - 1 else last
        said.add(opened, until, call)
        opened = last + 1  # past the comma


register_format("pythonic", PythonicCalls(), reasoning=None)
register_format(
    "llama4_pythonic",
    PythonicCalls("<|python_start|>", "<|python_end|>"),
    reasoning=None,
    marks=Marks(("<|python_start|>", "<|header_start|>")),
)
register_format(
    "lfm2",
    PythonicCalls("<|tool_call_start|>", "<|tool_call_end|>", bare=False),
    marks=Marks(("<|tool_call_start|>[", "<|tool_call_end|>")),
)
register_format(
    "olmo3",
    PythonicCalls("<function_calls>", "</function_calls>", bare=False, lines=True),
    marks=Marks(("<function_calls>",), ("<｜DSML｜", "<invoke")),
)
