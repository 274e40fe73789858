"""Calls of Qwen3-Coder, Qwen3.5 and later, Nemotron 3, Step 3.5, MiMo and Seed-OSS: a function with parameters.

    <tool_call>
    <function=look>
    <parameter=at>
    x
    </parameter>
    </function>
    </tool_call>

MiMo and Seed-OSS write values directly between the tags, without line breaks; Seed-OSS writes lists and objects as
Python does. Sources: the chat templates of Qwen3.5 to 3.8 and of Nemotron 3 (both in TRL 1.16), of Step 3.5, MiMo-V2
and Seed-OSS, and vLLM 0.32, `parser/{qwen3,nemotron_v3,step3p5,mimo,seed_oss}.py`. In the other families a value
without these line breaks is taken as it is, as vLLM documents it.
Loose: a function on lines of its own without `<tool_call>`, a call without `</tool_call>` at the end of the completion,
a value with a line break on one side only, several functions in one pair of `<tool_call>` tags. vLLM 0.32 and SGLang
0.5.23 read all four.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from tito_core.parsing import grammar as g
from tito_core.parsing.call_format import CallFormat
from tito_core.parsing.call_values import ParsedCallText
from tito_core.parsing.completion import Completion, Cursor, Frame, Tools
from tito_core.parsing.markup import Markup
from tito_core.parsing.registry import Marks, register_format
from tito_core.parsing.turn import ReasoningTags

FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
_STEPS = {FUNCTION: 1, END_FUNCTION: -1, PARAMETER: 1, END_PARAMETER: -1}


class Qwen3CoderCalls(CallFormat):
    """One function per call.

    Attributes:
        open: Opens a call.
        close: Closes it.
        frame: The text on both sides of a value.
        in_python: Whether lists and objects are always written as Python does; see `Cursor.reading`.
    """

    def __init__(
        self,
        open: str = "<tool_call>",
        close: str = "</tool_call>",
        frame: str = "\n",
        in_python: bool = False,
    ) -> None:
        self.open, self.close, self.frame, self.in_python = open, close, frame, in_python
        self.tags = (open, close, FUNCTION, END_FUNCTION, PARAMETER, END_PARAMETER)
        self.opening = frozenset({open, FUNCTION})
        self.pairs = {open: close, FUNCTION: END_FUNCTION, PARAMETER: END_PARAMETER}
        self._steps = {open: 0, close: 0, **_STEPS}

    def read(self, completion: Completion, start: int, tag: str) -> int | None:
        """Read one call."""
        if tag == FUNCTION:
            return self._unopened(completion, start)
        frame = completion.frame(start, start + len(self.open), self.close, {self.open})
        ends = self._ends(completion, frame)
        if len(ends) < 2:
            return completion.read_frame(frame, self.close, self._function, self_delimiting=True)
        first, loose = len(completion.calls), f"Each function must be in {self.open} tags of its own."
        for begin, end in pairwise((frame.body, *ends)):
            completion.add_parsed(begin, end, self._function, Cursor(completion, begin, end), loose)
        if not all(call.status.runs for call in completion.calls[first:]):
            for i in range(first, len(completion.calls)):
                completion.mark_malformed(i, loose)
        return frame.stop

    def _ends(self, completion: Completion, frame: Frame) -> list[int]:
        """Return where each of several functions in one pair of tags ends; nothing if other text is between them."""
        found: list[int] = []
        mark = completion.next_mark(frame.body)
        while frame.closed and mark is not None and mark.stop <= frame.body_end:
            following = completion.next_mark(mark.stop)
            if mark.tag == END_FUNCTION:
                if following is None or following.tag not in (FUNCTION, self.close):
                    return []
                if completion.text[mark.stop : following.start].strip():
                    return []
                found.append(mark.stop)
            mark = following
        return found

    def grammar(self, markup: Markup, tools: Tools) -> g.TagFormat:
        """Return the grammar of one call."""
        parameters = g.Parameters(
            lambda key, _: g.sequence(g.text(PARAMETER), key, g.text(f">{self.frame}")),
            f"{self.frame}{END_PARAMETER}",
            "\n",
        )
        functions = (
            g.sequence(g.text(f"\n{FUNCTION}{name}>\n"), *parameters.all(markup, schema), g.text(f"{END_FUNCTION}\n"))
            for name, schema in tools.items()
        )
        return g.sequence(g.tag(markup, self.open), g.either(functions), g.tag(markup, self.close))

    def _unopened(self, completion: Completion, start: int) -> int | None:
        """Read a function without the opening tag before it; None if it is text about a function.

        It is a call if it names a tool, begins a line outside any open tag or code fence, and only a closing tag or
        another call follows it.
        """
        end = completion.next_mark(start + len(FUNCTION), {END_FUNCTION, FUNCTION, self.open, self.close})
        inner = completion.next_mark(start + len(FUNCTION))
        if end is not None and end.tag in self.opening and inner is not None and inner.tag == PARAMETER:
            completion.uncertain = True  # what follows may be part of the argument
        head = completion.text[start + len(FUNCTION) : len(completion.text) if inner is None else inner.start]
        name, ended, _ = head.partition(">")
        before = completion.previous_mark(start)
        ahead = completion.text[0 if before is None else before.stop : start]
        begins = not ahead.rpartition("\n")[2].strip() and not ahead.rstrip().endswith(self.open)
        if not ended or name not in completion.tools or not begins or end is None or end.tag != END_FUNCTION:
            return None
        after = completion.next_mark(end.stop)
        if completion.text[end.stop : len(completion.text) if after is None else after.start].strip():
            return None
        stop = after.stop if after is not None and after.tag == self.close else end.stop
        following = completion.next_mark(stop)
        ends_other = following is not None and following.tag in (END_FUNCTION, PARAMETER, END_PARAMETER)
        if ends_other or completion.is_nested(start, self._steps):
            return None
        loose = f"The call has no opening {self.open} tag."
        completion.add_parsed(start, stop, self._function, Cursor(completion, start, end.stop), loose)
        return stop

    def _function(self, cursor: Cursor, loose: str = "") -> ParsedCallText:
        cursor.mark_loose(loose)
        cursor.tag(FUNCTION)
        name = cursor.tool_name(cursor.until_text(">"))
        arguments: dict[str, Any] = {}
        while cursor.peek() == PARAMETER:
            cursor.tag(PARAMETER)
            key = _key(cursor, self.frame)
            if key in arguments:
                raise cursor.error(f"The parameter {key!r} appears twice.")
            value = _unframed(cursor, key) if self.frame else cursor.until_tag(END_PARAMETER)
            arguments[key] = cursor.reading(value, self.in_python)
        cursor.tag(END_FUNCTION)
        cursor.expect_end()
        return ParsedCallText(name, arguments, loose=cursor.loose)


def _key(cursor: Cursor, frame: str) -> str:
    """Take a parameter's name and the `>` after it. A name with a `>` is one only if the schema declares it."""
    declared = [] if cursor.schema is None else cursor.schema.names()
    if any(">" in name for name in declared):
        written = [name for name in declared if cursor.follows(f"{name}>{frame}")]
        if len(written) > 1:
            raise cursor.error(f"The parameter can be any of {written[:5]}: the names have '>' in them.")
        if written:
            cursor.expect(f"{written[0]}>")
            return written[0]
    key = cursor.until_text(">")
    if not key or key != key.strip() or not key.isprintable() or set(key) & set("<\"'="):
        raise cursor.error(f"The parameter has no valid name: {key[:60]!r}.")
    return key


def _unframed(cursor: Cursor, key: str) -> str:
    """Take a value without the line breaks around it: one on each side or none, or one in an empty value."""
    value = cursor.until_tag(END_PARAMETER)
    if value == "\n":
        return ""
    if value.startswith("\n") != value.endswith("\n"):
        cursor.mark_loose(f"The value of {key!r} must be on lines of its own.")
    return value.removeprefix("\n").removesuffix("\n")


_MIMO = ("<parameter=example_parameter_1>value_1</parameter>",)
register_format(
    "qwen3_coder",
    Qwen3CoderCalls(),
    "qwen3_xml",
    "qwen_xml",
    "nemotron",
    "nemotron_v3",
    "nanbeige",
    "step3p5",
    marks=Marks(("<tool_call>", "<function=", "<parameter="), _MIMO),
)
register_format("mimo", Qwen3CoderCalls(frame=""), marks=Marks(("<tool_call>", "<function=", *_MIMO)))
register_format(
    "seed_oss",
    Qwen3CoderCalls("<seed:tool_call>", "</seed:tool_call>", "", in_python=True),
    reasoning=ReasoningTags("<seed:think>", "</seed:think>"),
    marks=Marks(("<seed:tool_call>", "<function=")),
)
