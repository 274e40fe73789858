"""Harmony, the format of gpt-oss: messages in channels, and calls as messages to a recipient.

    <|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json
    <|message|>{"at": "x"}<|call|>

The analysis channel is reasoning; the final channel, and commentary without a recipient, are text. The recipient is in
the channel or, as the template renders it, in the role. A valid call is in the commentary or the analysis channel, goes
to `functions.NAME`, has JSON arguments with the content type json or code, and ends in `<|call|>`. Loose: a recipient
without `functions.`; `<|end|>`, or the end of the completion, after the arguments.
Sources: the gpt-oss template (in TRL 1.16); vLLM 0.32, `parser/harmony.py`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING

from tito_core.parsing.call_values import Malformed, ParsedCallText, call_of_arguments, is_valid_name, json_arguments
from tito_core.parsing.completion import Completion, Cursor, ParsedCall, ParsedTurn, Tools
from tito_core.parsing.grammar import CHOOSE_AUTO, CallGrammar, NoCallGrammarError
from tito_core.parsing.markup import DecodedIds, Mark, Markup
from tito_core.parsing.registry import Marks, register_tool_parser
from tito_core.parsing.schema import check_tools
from tito_core.parsing.turn import Piece, SuspectFinder, without_stop

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
_TO = r"(?: to=([^\s<]+))?"
_ROLE = re.compile(rf"\s*(?:assistant)?{_TO}\s*")
_ADDRESSED = re.compile(r"\s*(?:assistant)? to=")
_IN_CHANNEL = re.compile(rf"(analysis|commentary|final){_TO}\s*([a-z]+)?\s*")
_FUNCTIONS = "functions."
_TAGS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
_SUSPECT_FINDER = SuspectFinder(_TAGS)


@register_tool_parser("gpt_oss", "openai", "gpt-oss", marks=Marks(("<|channel|>commentary", "<|call|>")))
class HarmonyParser:
    """Harmony parser.

    Attributes:
        markup: The tags in the tokenizer's vocabulary.
        lenient: Whether loose calls run; otherwise they are malformed.
    """

    lenient = False

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.markup = Markup(tokenizer, _TAGS)

    def leniently(self) -> HarmonyParser:
        """Return this parser in lenient mode."""
        parser = copy(self)
        parser.lenient = True
        return parser

    def start(self, prompt_tail: Sequence[int] = (), tools: Tools | None = None) -> HarmonySession:
        """Start parsing a completion inside the message that the generation prompt has begun."""
        start = self.markup.token_of(START)
        header = max((i + 1 for i, token in enumerate(prompt_tail) if token == start), default=len(prompt_tail))
        return HarmonySession(self.markup, list(prompt_tail[header:]), tools, self.lenient)

    def preview(self, prompt_tail: Sequence[int] = ()) -> HarmonyPreview:
        """Start previewing a completion; `prompt_tail` as for `start`."""
        return HarmonyPreview(self, prompt_tail)

    def call_grammar(self, tools: Tools, name: str | None = None, prompt_tail: Sequence[int] = ()) -> CallGrammar:
        """Raise: a call ends in a stop token, which the engines' grammars cannot require."""
        raise NoCallGrammarError(
            f"A tool call cannot be forced with the parser 'gpt_oss': a call ends in {CALL}, a stop token, which no "
            f"grammar of the engines can require. {CHOOSE_AUTO}"
        )


class HarmonySession:
    """Parses one completion.

    Args:
        markup: The tags in the tokenizer's vocabulary.
        header: The prompt's ids of the message that the completion continues.
        tools: JSON Schemas by tool name.
        lenient: Whether loose calls run.
    """

    def __init__(self, markup: Markup, header: list[int], tools: Tools | None, lenient: bool) -> None:
        self._markup = markup
        self._header = header
        self._tools = check_tools(tools)
        self._lenient = lenient
        self._ids = list(header)

    def feed(self, ids: Sequence[int]) -> None:
        """Take the next sampled ids."""
        self._ids += ids

    def finish(self, *, truncated: bool) -> ParsedTurn:
        """Parse everything that was fed."""
        header = len(self._header)
        kept = [*self._header, *without_stop(self._ids[header:], self._markup.special)]
        decoded = DecodedIds(self._markup.decode, kept)
        sampled = decoded.starts[header] if header < len(kept) else len(decoded.text)
        completion = Completion(self._markup, decoded, truncated, self._tools, self._lenient)
        turn = _Messages(completion, sampled).read()
        calls, suspects = (
            tuple(replace(call, start=max(0, call.start - header), stop=max(1, call.stop - header)) for call in calls)
            for calls in (turn.calls, turn.suspects)
        )
        return replace(turn, calls=calls, suspects=suspects)


class HarmonyPreview:
    """Previews reasoning message by message: only the end of a message tells whether it was reasoning or a call.

    Text is not shown, since the policy may reason again after it.
    """

    def __init__(self, parser: HarmonyParser, prompt_tail: Sequence[int]) -> None:
        self._parser = parser
        self._prompt_tail = prompt_tail
        self._end = parser.markup.token_of(END)
        self._ids: list[int] = []
        self._shown = 0

    def feed(self, ids: Sequence[int]) -> list[Piece]:
        """Take the next sampled ids; return the pieces that are now certain."""
        self._ids += ids
        if self._end is None or self._end not in ids:
            return []
        session = self._parser.start(self._prompt_tail)
        session.feed(self._ids[: len(self._ids) - self._ids[::-1].index(self._end)])
        reasoning = session.finish(truncated=True).reasoning
        if not reasoning.strip():
            return []
        new, self._shown = reasoning[self._shown :], len(reasoning)
        return [Piece("reasoning", new)] if new else []


class _Messages:
    """Reads one completion message by message."""

    def __init__(self, completion: Completion, sampled: int) -> None:
        self._completion = completion
        self._sampled = sampled  # the first sampled character; the text before it is the prompt's
        self._reasoning: list[str] = []
        self._texts: list[str] = []
        self._suspects: list[ParsedCall] = []
        self._closed = True

    def read(self) -> ParsedTurn:
        """Split all messages into reasoning, text and calls."""
        at: int | None = 0
        while at is not None:
            at = self._message(at)
        reasoning = "\n".join(filter(None, (block.strip("\n") for block in self._reasoning)))
        text = "\n".join(filter(None, (text.strip() for text in self._texts)))
        return ParsedTurn(reasoning, text, tuple(self._completion.calls), self._closed, suspects=tuple(self._suspects))

    def _message(self, start: int) -> int | None:
        """Read the message whose header begins at a character; return where the next header begins."""
        completion, total = self._completion, len(self._completion.text)
        mark = completion.next_mark(start, {MESSAGE, START, END, CALL, RETURN})
        if mark is None or mark.tag != MESSAGE:
            stop = total if mark is None else mark.start if mark.tag == START else mark.stop
            self._headless(start, stop, None if mark is None or mark.tag == START else mark.tag)
            return self._next(stop)
        closing = completion.next_mark(mark.stop, {START, END, CALL, RETURN})
        self._body(start, mark, closing)
        if closing is None:
            return None
        return self._next(closing.start if closing.tag == START else closing.stop)

    def _next(self, at: int) -> int | None:
        """Take the text between messages; return where the next header begins."""
        mark = self._completion.next_mark(at, {START})
        self._take(self._texts, at, len(self._completion.text) if mark is None else mark.start)
        return None if mark is None else mark.stop

    def _headless(self, start: int, stop: int, closed_by: str | None) -> None:
        """Take a header without a message: text, unless it addresses or ends a call."""
        header = self._completion.text[start:stop]
        channel = self._completion.next_mark(start, {CHANNEL})
        in_channel = channel is not None and channel.start < stop
        if _ADDRESSED.match(header) or (in_channel and " to=" in header) or closed_by == CALL:
            self._completion.add_unclosed(max(start, self._sampled), stop, f"The call has no {MESSAGE}.")
        elif stop == len(self._completion.text) and self._completion.truncated:
            self._closed = not (in_channel and "analysis" in header)
            self._take(self._texts, start, start if in_channel else stop)
        else:
            last = closed_by is not None and stop == len(self._completion.text)
            ended = last and self._completion.markup.token_of(closed_by or "") is not None
            self._take(self._texts, start, stop - len(closed_by or "") if ended else stop)

    def _body(self, start: int, message: Mark, closing: Mark | None) -> None:
        completion = self._completion
        end = len(completion.text) if closing is None else closing.start
        header = _header(Cursor(completion, start, message.start))
        recipient, channel = (None, None) if header is None else (header[0], header[1])
        ended = None if closing is None or closing.tag == START else closing.tag
        stop = end if ended is None or closing is None else closing.stop
        if header is None and " to=" not in completion.text[start : message.start] and ended != CALL:
            self._take(self._texts, start, end)
        elif header is not None and recipient is None and ended != CALL:
            self._take(self._reasoning if channel == "analysis" else self._texts, message.stop, end)
            self._closed = channel != "analysis" or ended is not None
        else:
            self._call(max(start, self._sampled), message.stop, end, stop, header, ended)

    def _call(
        self, start: int, body: int, end: int, stop: int, header: tuple[str | None, str, str] | None, ended: str | None
    ) -> None:
        recipient = (header[0] if header is not None else None) or ""
        prefixed = recipient.startswith(_FUNCTIONS)
        bare = recipient.removeprefix(_FUNCTIONS) if prefixed or recipient in self._completion.tools else ""
        name = bare if is_valid_name(bare) else None
        text = self._completion.text[body:end]
        if ended is None and (self._completion.truncated or end < len(self._completion.text) or not _is_object(text)):
            self._completion.add_unclosed(start, stop, f"The call has no closing {CALL} tag.", name)
            return
        self._completion.add_parsed(start, stop, self._valid_call, header, name, ended, body, end)

    def _valid_call(
        self, header: tuple[str | None, str, str] | None, name: str | None, ended: str | None, body: int, end: int
    ) -> ParsedCallText:
        return _valid_call(header, name, ended, self._completion.content(body, end, name))

    def _take(self, into: list[str], start: int, stop: int) -> None:
        start = max(start, self._sampled)
        into.append(self._completion.text[start:stop])
        if into is self._texts:
            self._suspects += _SUSPECT_FINDER.records(self._completion, start, stop)


def _header(cursor: Cursor) -> tuple[str | None, str, str] | None:
    """Split a header into recipient, channel and content type; None if it is not valid."""
    if cursor.peek() != CHANNEL:
        return None
    try:
        left = _ROLE.fullmatch(cursor.until_tag(CHANNEL))
        channel = cursor.until_tag(CONSTRAIN) + " " if cursor.peek() == CONSTRAIN else ""
        right = _IN_CHANNEL.fullmatch(channel + cursor.take_rest())
    except Malformed:  # a control token is in it
        return None
    if left is None or right is None or (left[1] and right[2]):
        return None
    return left[1] or right[2], right[1], right[3] or ""


def _is_object(text: str) -> bool:
    try:
        json_arguments(text, "")
    except Malformed:
        return False
    return True


def _valid_call(
    header: tuple[str | None, str, str] | None, name: str | None, ended: str | None, text: str
) -> ParsedCallText:
    if header is None:
        raise Malformed("The call's header is not valid: it must be <|channel|>commentary to=functions.NAME.")
    recipient, channel, kind = header
    if recipient is None:
        raise Malformed("The call has no recipient: address it to=functions.NAME.")
    if not name:
        raise Malformed(f"The recipient {recipient[:60]!r} is not a function: address calls to=functions.NAME.")
    if channel == "final":
        raise Malformed(f"Calls belong in the commentary channel, not in {channel}.", name)
    if kind not in ("", "json", "code"):
        raise Malformed(f"The arguments must be json, not {kind}.", name)
    if ended not in (CALL, END, None):
        raise Malformed(f"The call ends in {ended} where {CALL} belongs.", name)
    call = call_of_arguments(name, text)
    if ended != CALL:
        reason = f"The call ends in {ended} where {CALL} belongs." if ended else f"The call has no closing {CALL} tag."
        return replace(call, loose=reason)
    if recipient.startswith(_FUNCTIONS):
        return call
    return replace(call, loose=f"The recipient must be functions.{name}, not {name}.")
