"""Hermes calls (Qwen2.5, Qwen3, and the tool template of `smollm2`).

`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, after an optional `<think>...</think>` block.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from tito_core.parsing.markup import DecodedIds, Tag
from tito_core.parsing.parsed import CallStatus, ParsedCall, ParsedTurn
from tito_core.parsing.registry import register_tool_parser

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@register_tool_parser("hermes")
class HermesParser:
    """Strict Hermes parser: what a lenient one would repair is malformed."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.think, self.end_think = Tag(tokenizer, "<think>"), Tag(tokenizer, "</think>")
        self.call, self.end_call = Tag(tokenizer, "<tool_call>"), Tag(tokenizer, "</tool_call>")
        self.special = frozenset(tokenizer.all_special_ids)

    def start(self, prompt_tail: Sequence[int] = ()) -> HermesSession:
        """Begin a completion; a `<think>` left open in `prompt_tail` counts."""
        tail = DecodedIds(self.tokenizer, prompt_tail)
        opened = self.think.find(tail, 0)
        while opened is not None and (later := self.think.find(tail, opened + 1)) is not None:
            opened = later
        in_reasoning = opened is not None and self.end_think.find(tail, opened) is None
        return HermesSession(self, in_reasoning)


class HermesSession:
    """Parses one completion."""

    def __init__(self, parser: HermesParser, in_reasoning: bool) -> None:
        self._parser = parser
        self._in_reasoning = in_reasoning
        self._ids: list[int] = []

    def feed(self, ids: Sequence[int]) -> None:
        """Take the next sampled ids."""
        self._ids += ids

    def finish(self, *, truncated: bool) -> ParsedTurn:
        """Parse everything that was fed."""
        ids = self._ids
        while ids and ids[-1] in self._parser.special:  # the stop token is no text
            ids = ids[:-1]
        decoded = DecodedIds(self._parser.tokenizer, ids)
        reasoning, at, closed = self._reasoning(decoded)
        if not closed:
            return ParsedTurn(reasoning, "", (), reasoning_closed=False)
        text, calls = self._calls(decoded, at, truncated)
        return ParsedTurn(reasoning, text, tuple(calls))

    def _reasoning(self, decoded: DecodedIds) -> tuple[str, int, bool]:
        """Split off the reasoning block: its text, the character after it, and whether it is closed."""
        start = 0
        if not self._in_reasoning:
            opened = self._parser.think.find(decoded, 0)
            if opened is None or decoded.text[:opened].strip():
                return "", 0, True
            start = opened + len(self._parser.think.text)
        end = self._parser.end_think.find(decoded, start)
        if end is None:
            return decoded.text[start:].strip("\n"), len(decoded.text), False
        return decoded.text[start:end].strip("\n"), end + len(self._parser.end_think.text), True

    def _calls(self, decoded: DecodedIds, at: int, truncated: bool) -> tuple[str, list[ParsedCall]]:
        texts: list[str] = []
        calls: list[ParsedCall] = []
        while (opened := self._parser.call.find(decoded, at)) is not None:
            texts.append(decoded.text[at:opened])
            body = opened + len(self._parser.call.text)
            end, close = self._close(decoded, body)
            start_token, stop_token = decoded.span_of(opened, close if close is not None else end)
            raw = decoded.text[opened : end if close is None else close]
            if close is None:
                calls.append(_unclosed(raw, start_token, stop_token, truncated))
            else:
                calls.append(_parse_call(decoded.text[body:end], raw, start_token, stop_token))
            at = end if close is None else close
        texts.append(decoded.text[at:])
        return "".join(texts).strip(), calls

    def _close(self, decoded: DecodedIds, body: int) -> tuple[int, int | None]:
        """Find where a call's body ends, and where its closing tag ends (None when it has none)."""
        begin = body
        if self._parser.end_call.token is None:
            # Without control tokens a JSON string may hold the closing tag, so look for it after the JSON value.
            begin = _json_end(decoded.text, body)
        next_call = self._parser.call.find(decoded, begin)
        found = self._parser.end_call.find(decoded, begin, next_call)
        if found is None:
            return (len(decoded.text) if next_call is None else next_call), None
        return found, found + len(self._parser.end_call.text)


def _json_end(text: str, start: int) -> int:
    """Give the end of the JSON value at `start`, or `start` when there is none."""
    begin = len(text) - len(text[start:].lstrip())
    try:
        return json.JSONDecoder().raw_decode(text, begin)[1]
    except (ValueError, RecursionError):
        return start


def _unclosed(raw: str, start: int, stop: int, truncated: bool) -> ParsedCall:
    if truncated:
        return ParsedCall(CallStatus.TRUNCATED, None, None, raw, start, stop, "The token limit cut the call off.")
    reason = "The call has no closing </tool_call> tag."
    return ParsedCall(CallStatus.MALFORMED, None, None, raw, start, stop, reason)


def _parse_call(body: str, raw: str, start: int, stop: int) -> ParsedCall:
    def malformed(reason: str, name: str | None = None) -> ParsedCall:
        return ParsedCall(CallStatus.MALFORMED, name, None, raw, start, stop, reason)

    try:
        value = json.loads(body, parse_constant=_refuse_constant, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        return malformed(f"The call is not valid JSON: {error}.")
    if not isinstance(value, dict):
        return malformed(f"The call must be a JSON object, not {type(value).__name__}.")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return malformed('The call has no "name" string.')
    if not isinstance(value.get("arguments"), dict):
        return malformed('The call has no "arguments" object.', name)
    if extra := set(value) - {"name", "arguments"}:
        return malformed(f"The call has unexpected keys: {', '.join(sorted(extra))}.", name)
    return ParsedCall(CallStatus.OK, name, value["arguments"], raw, start, stop)


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} appears twice")
    return result
