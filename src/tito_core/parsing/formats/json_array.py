"""Calls in one JSON array: Granite 3, Phi-4-mini, xLAM, Hunyuan, Cohere Command and Mistral. LFM2 uses it too.

- Granite: `<|tool_call|>` (in Granite 3.1 `<tool_call>`) and the array; text may follow. No reasoning. Source: vLLM
  0.32, `parser/granite.py`.
- Phi-4-mini: the message is only `functools[{"name": ..., "arguments": {...}}]`. Loose: the same on a line after text.
  Source: vLLM 0.32, `tool_parsers/phi4mini_tool_parser.py`, which reads it anywhere, and cuts the array at the first
  `]`, even inside an argument.
- xLAM: the message is only the array. If its first element does not begin with a "name", it is an answer. Loose: the
  array in a fenced block that is the message, or after another family's tag, as vLLM reads them (0.32,
  `tool_parsers/xlam_tool_parser.py`).
- Hunyuan and Cohere Command: the array between two tags, and answers between tags, too. Sources: the templates of
  Hunyuan-A13B, of Command R7B and of Command A+; vLLM 0.32, `tool_parsers/hunyuan_a13b_tool_parser.py` and
  `parser/cohere_command.py`.

      <tool_calls>[{"name": "look", "arguments": {"at": "x"}}]</tool_calls>
      <|START_ACTION|>[{"tool_call_id": "0", "tool_name": "look", "parameters": {"at": "x"}}]<|END_ACTION|>

- Mistral: since tokenizer version 11 each call is `[TOOL_CALLS]look[ARGS]{"at": "x"}`, in version 11 with
  `[CALL_ID]...` after the name; before, all calls are `[TOOL_CALLS][{"name": "look", "arguments": {"at": "x"}}]`.
  Loose: no `[ARGS]` between name and arguments, which vLLM reads. Sources: vLLM 0.32, `parser/mistral.py`; SGLang
  0.5.23, `function_call/mistral_detector.py`; `tokens/tokenizers/instruct.py` of mistral-common, whose versions 11 and
  13 always write `[ARGS]`, as a control token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tito_core.parsing import grammar as g
from tito_core.parsing.call_format import CallFormat
from tito_core.parsing.call_values import (
    Malformed,
    ParsedCallText,
    after_blank,
    call_of_arguments,
    call_of_object,
    is_valid_name,
    json_end,
    json_value,
    shortened,
)
from tito_core.parsing.completion import FENCES, Completion, Cursor, Frame, Tools
from tito_core.parsing.markup import Markup
from tito_core.parsing.registry import Marks, register_format
from tito_core.parsing.turn import BRACKET_THINK, THINK, ReasoningTags

GRANITE_OPEN, GRANITE_OLD_OPEN = "<tool_call>", "<|tool_call|>"
XLAM_OPEN, XLAM_CLOSE, XLAM_OTHER = "<tool_call>", "</tool_call>", "[TOOL_CALLS]"
CALL, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_BEGINS = re.compile(r'\s*\[\s*\{\s*"name"\s*:')
_FENCE, _END_FENCE = re.compile(r"```(?:json)?\s"), re.compile(r"\s*```")


class GraniteCalls(CallFormat):
    """An array after a tag."""

    tags = (GRANITE_OPEN, GRANITE_OLD_OPEN)
    opening = frozenset(tags)

    def read(self, completion: Completion, start: int, tag: str) -> int:
        """Read the array after the tag."""
        return read_array(completion, start, start + len(tag), alone=False)

    def grammar(self, markup: Markup, tools: Tools) -> g.TagFormat:
        """Return the grammar of an array of one call, after the tag that is a token of the vocabulary."""
        tag = GRANITE_OPEN if markup.token_of(GRANITE_OLD_OPEN) is None else GRANITE_OLD_OPEN
        return g.sequence(g.tag(markup, tag), forced_array(tools))


class Phi4Calls(CallFormat):
    """A message that is only `functools` and an array."""

    tags = ("functools[",)
    opening = frozenset(tags)

    def read(self, completion: Completion, start: int, tag: str) -> int | None:
        """Read the array; after text only if it begins a line outside a code fence, and begins like one of calls."""
        mark = completion.previous_mark(start)
        while mark is not None and mark.tag == tag:
            mark = completion.previous_mark(mark.start)
        body, before = start + len("functools"), completion.text[0 if mark is None else mark.stop : start]
        alone = not before.strip()
        if not alone:
            fenced = sum(map(before.count, FENCES)) % 2
            if fenced or not before.rstrip(" \t").endswith("\n") or not _BEGINS.match(completion.text, body):
                return None
        first = len(completion.calls)
        read_array(completion, start, body, alone=True)
        if not alone:
            completion.mark_loose(first, "The calls must be the whole message.")
        return len(completion.text)

    def grammar(self, markup: Markup, tools: Tools) -> g.TagFormat:
        """Return the grammar of an array of one call."""
        return g.sequence(g.text("functools"), forced_array(tools))


class XlamCalls(CallFormat):
    """An array: alone, in a fenced block, or after another family's tag."""

    bare = "[`"

    tags = (XLAM_OPEN, XLAM_CLOSE, XLAM_OTHER)
    opening = frozenset({XLAM_OPEN, XLAM_OTHER})

    def read(self, completion: Completion, start: int, tag: str) -> int | None:
        """Read an array after another family's tag."""
        body = start + len(tag)
        if not _BEGINS.match(completion.text, body):
            return None
        first, end = len(completion.calls), read_array(completion, start, body, alone=False)
        if tag == XLAM_OPEN and end < len(completion.text):
            close = completion.next_mark(end)
            if close is None or close.tag != XLAM_CLOSE or completion.text[end : close.start].strip():
                completion.add_malformed(start, end, f"The calls have no closing {XLAM_CLOSE} tag.")
                del completion.calls[first:-1]
            else:
                end = close.stop
        completion.mark_loose(first, f"The calls follow {tag}, but the array must be the whole message.")
        return end

    def read_bare(self, completion: Completion, start: int) -> int | None:
        """Read the array, in a fenced block or alone, if it begins like one of calls."""
        fence = _FENCE.match(completion.text, start)
        body = start if fence is None else fence.end()
        if not _BEGINS.match(completion.text, body):
            return None
        if fence is None:
            read_array(completion, start, body, alone=True)
            return len(completion.text)
        first, end = len(completion.calls), read_array(completion, start, body, alone=False)
        closed = _END_FENCE.match(completion.text, end)
        whole = closed is not None and not completion.text[closed.end() :].strip()
        if not whole and any(call.status.runs for call in completion.calls[first:]):
            del completion.calls[first:]
            completion.add_unclosed(start, len(completion.text), "The block of calls does not end the message.")
        completion.mark_loose(first, "The calls are in a fenced block, but the array must be the whole message.")
        return len(completion.text)

    def grammar(self, markup: Markup, tools: Tools) -> g.TagFormat:
        """Return the grammar of an array of one call."""
        return forced_array(tools)


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
        self.pairs = {open: close}
        self.name, self.arguments, self.number = name, arguments, number

    def read(self, completion: Completion, start: int, tag: str) -> int:
        """Read the array and the tag after it."""
        body, close = start + len(tag), self.tags[1]
        # If the closing tag is not a token, a JSON string may spell it, so search for it after the array.
        search = array_end(completion.text, body) if completion.markup.token_of(close) is None else body
        frame = completion.frame(start, body, close, self.opening, search)
        if frame.closed:
            read_framed_array(completion, frame, self._call)
        else:
            completion.add_unclosed(start, frame.stop, f"The calls have no closing {close} tag.")
        return frame.stop

    def grammar(self, markup: Markup, tools: Tools) -> g.TagFormat:
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


class MistralCalls(CallFormat):
    """Both forms. A call has no closing tag: it ends at the next call or at the end of the completion."""

    tags = (CALL, CALL_ID, ARGUMENTS)
    opening = frozenset({CALL})

    def read(self, completion: Completion, start: int, tag: str) -> int:
        """Read one call, or the array."""
        body = start + len(CALL)
        first = after_blank(completion.text, body)
        if completion.text.startswith("[", first) and not _is_tag(completion, first):
            return read_array(completion, start, body, alone=True, call_id="id")
        search = body
        if completion.markup.token_of(CALL) is None:  # then a JSON string may spell the tag
            arguments = completion.next_mark(body, {ARGUMENTS})
            search = body if arguments is None else json_end(completion.text, arguments.stop)
        following = completion.next_mark(search, self.opening)
        stop = len(completion.text) if following is None else following.start
        frame = Frame(start, body, stop, stop, True)
        if completion.truncated and following is None and not _has_arguments(completion, frame):
            completion.add_unclosed(start, stop, "The call is cut off.")
            return stop
        try:
            call = self._call(Cursor(completion, body, stop))
        except Malformed as fault:
            completion.add_malformed(start, stop, fault.reason, fault.name)
            completion.uncertain = True  # the next call may be part of its arguments
        else:
            completion.add(start, stop, call)
        return stop

    def grammar(self, markup: Markup, tools: Tools) -> g.TagFormat:
        """Return the grammar of one call, in the form for the vocabulary."""
        if markup.token_of(ARGUMENTS) is None:
            return g.sequence(g.tag(markup, CALL), forced_array(tools))
        calls = (
            g.sequence(g.text(name), g.tag(markup, ARGUMENTS), g.arguments_json(schema))
            for name, schema in tools.items()
        )
        return g.sequence(g.tag(markup, CALL), g.either(calls))

    @staticmethod
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


def _is_tag(completion: Completion, char: int) -> bool:
    mark = completion.next_mark(char)
    return mark is not None and mark.start == char


def _has_arguments(completion: Completion, frame: Frame) -> bool:
    """Return whether the arguments of a call at the end of a completion are complete."""
    arguments = completion.next_mark(frame.body, {ARGUMENTS})
    return arguments is not None and json_end(completion.text, arguments.stop) > arguments.stop


def array_end(text: str, start: int) -> int:
    """Return the end of the JSON array at `start`, or `start` if there is none."""
    return json_end(text, start) if text.startswith("[", after_blank(text, start)) else start


def read_framed_array(
    completion: Completion, frame: Frame, read: Callable[[Any, str], ParsedCallText] | None = None
) -> None:
    """Read an array of calls that fills a closed frame; `read` as for `read_array`."""
    end = array_end(completion.text, frame.body)
    if end > frame.body_end or end == frame.body or completion.text[end : frame.body_end].strip():
        what = shortened(completion.text[frame.body : frame.body_end])
        completion.add_malformed(frame.start, frame.stop, f"The calls must be one JSON array, not {what}.")
    else:
        read_array(completion, frame.start, frame.body, alone=False, stop=frame.stop, read=read)


def read_array(
    completion: Completion,
    start: int,
    body: int,
    *,
    alone: bool,
    stop: int | None = None,
    call_id: str | None = None,
    read: Callable[[Any, str], ParsedCallText] | None = None,
) -> int:
    """Read an array of calls. A broken array is one malformed call, since its calls cannot be distinguished.

    Args:
        completion: The completion.
        start: First character of the calls, tags included.
        body: First character of the array, or a blank before it.
        alone: Whether only blanks may follow.
        stop: One past the last character of the calls, tags included; by default the end of the array.
        call_id: Key of a call's id, if the format has one.
        read: Returns one call from its value and its text; by default `call_of_object`.

    Returns:
        The character after the array; after the completion if the array is broken.
    """
    text, total = completion.text, len(completion.text)
    end = json_end(text, body)
    if end == body:
        _broken(completion, start, body)
        return total
    if alone and text[end:].strip():
        completion.add_malformed(start, total, f"Stray text follows the calls: {shortened(text[end:].strip())}.")
        return total
    last = end if stop is None else stop
    try:
        value = json_value(completion.content(body, end))
    except Malformed as fault:
        completion.add_malformed(start, last, fault.reason)
        return end
    if not isinstance(value, list) or not value:
        kind = "an empty array" if value == [] else type(value).__name__
        completion.add_malformed(start, last, f"The calls must be a JSON array of at least one call, not {kind}.")
        return end
    at, begin = after_blank(text, body) + 1, start
    for i, element in enumerate(value):
        after = json_end(text, at)
        until = last if i == len(value) - 1 else after
        if read is None:
            completion.add_parsed(begin, until, call_of_object, element, text[at:after], call_id=call_id)
        else:
            completion.add_parsed(begin, until, read, element, text[at:after])
        begin = at = after_blank(text, after) + 1  # past the comma
    return end


def _broken(completion: Completion, start: int, body: int) -> None:
    try:
        json_value(completion.text[body:])
    except Malformed as fault:
        completion.add_unclosed(start, len(completion.text), fault.reason)
    else:
        raise AssertionError("A JSON value has an end.")


def forced_array(tools: Tools) -> g.TagFormat:
    """Return the grammar of an array of one call."""
    return g.json_calls(tools, before="[", after="]")


register_format("granite", GraniteCalls(), reasoning=None, marks=Marks(("<|tool_call|>", "<|start_of_role|>")))
register_format("phi4_mini", Phi4Calls(), "phi4_mini_json", reasoning=None, marks=Marks(('functools[{"name":',)))
register_format("xlam", XlamCalls(), marks=Marks(('[{"name": "tool_call_name", "arguments":',), ("<tool_call>",)))
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
register_format("mistral", MistralCalls(), reasoning=BRACKET_THINK, marks=Marks(("[TOOL_CALLS]",)))
