"""Hermes calls (Qwen2.5, Qwen3, and the tool template of `smollm2`).

`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, with any number of `<think>...</think>` blocks between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tito_core.parsing.decoding import decoding
from tito_core.parsing.json_call import json_end, parse_json_call
from tito_core.parsing.markup import DecodedIds, Tag
from tito_core.parsing.parsed import CallStatus, ParsedCall, ParsedTurn
from tito_core.parsing.registry import register_tool_parser

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@register_tool_parser("hermes")
class HermesParser:
    """Strict Hermes parser: what a lenient one would repair is malformed."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.decode = decoding(tokenizer)
        self.think, self.end_think = Tag(tokenizer, "<think>"), Tag(tokenizer, "</think>")
        self.call, self.end_call = Tag(tokenizer, "<tool_call>"), Tag(tokenizer, "</tool_call>")
        flagged = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        markup = {tag.token for tag in (self.think, self.end_think, self.call, self.end_call)}
        self.special = frozenset(flagged.union(tokenizer.all_special_ids) - markup)

    def start(self, prompt_tail: Sequence[int] = ()) -> HermesSession:
        """Begin a completion; a `<think>` that the generation prompt left open in `prompt_tail` counts.

        The generation prompt follows the last special token. What comes before it is other messages, which say
        nothing of this one, whatever they spell.
        """
        header = max((i + 1 for i, token in enumerate(prompt_tail) if token in self.special), default=0)
        tail = DecodedIds(self.decode, prompt_tail[header:])
        in_reasoning, at = False, 0
        while (found := (self.end_think if in_reasoning else self.think).find(tail, at)) is not None:
            in_reasoning, at = not in_reasoning, found + 1
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
        end = len(self._ids)
        while end and self._ids[end - 1] in self._parser.special:  # the stop token is no text
            end -= 1
        reader = _Reader(self._parser, DecodedIds(self._parser.decode, self._ids[:end]), truncated)
        reader.read(self._in_reasoning)
        reasoning = "\n".join(filter(None, (block.strip("\n") for block in reader.reasoning)))
        return ParsedTurn(reasoning, "".join(reader.texts).strip(), tuple(reader.calls), reader.closed)


class _Reader:
    """Walks once through a completion, from tag to tag."""

    def __init__(self, parser: HermesParser, decoded: DecodedIds, truncated: bool) -> None:
        self._parser = parser
        self._decoded = decoded
        self._truncated = truncated
        self.reasoning: list[str] = []
        self.texts: list[str] = []
        self.calls: list[ParsedCall] = []
        self.closed = True

    def read(self, in_reasoning: bool) -> None:
        """Sort the whole completion into reasoning, texts and calls."""
        text, think, call = self._decoded.text, self._parser.think, self._parser.call
        at = self._read_reasoning(0) if in_reasoning else 0
        thought = think.find(self._decoded, at)
        while self.closed:
            called = call.find(self._decoded, at, thought)
            if called is not None:
                self.texts.append(text[at:called])
                at = self._read_call(called)
                if thought is not None and thought < at:
                    thought = think.find(self._decoded, at)
            elif thought is not None:
                self.texts.append(text[at:thought])
                at = self._read_reasoning(thought + len(think.text))
                thought = think.find(self._decoded, at)
            else:
                break
        self.texts.append(text[at:])

    def _read_reasoning(self, start: int) -> int:
        """Read reasoning from character `start`; give the character after its closing tag."""
        decoded, tag = self._decoded, self._parser.end_think
        end = tag.find(decoded, start)
        self.closed = end is not None
        stop = len(decoded.text) if end is None else end
        self.reasoning.append(decoded.text[start:stop])
        return stop if end is None else stop + len(tag.text)

    def _read_call(self, opened: int) -> int:
        """Read the call whose tag is at character `opened`; give the character after it."""
        decoded = self._decoded
        body = opened + len(self._parser.call.text)
        end, close = self._close(body)
        stop = end if close is None else close
        raw, (first, last) = decoded.text[opened:stop], decoded.span_of(opened, stop)
        if close is not None:
            self.calls.append(parse_json_call(decoded.text[body:end], raw, first, last))
        elif self._truncated and stop == len(decoded.text):
            reason = "The token limit cut the call off."
            self.calls.append(ParsedCall(CallStatus.TRUNCATED, None, None, raw, first, last, reason))
        else:
            reason = f"The call has no closing {self._parser.end_call.text} tag."
            self.calls.append(ParsedCall(CallStatus.MALFORMED, None, None, raw, first, last, reason))
        return stop

    def _close(self, body: int) -> tuple[int, int | None]:
        """Find where a call's body ends, and where its closing tag ends (None when it has none)."""
        begin, decoded, tag = body, self._decoded, self._parser.end_call
        if tag.token is None:
            # Without control tokens a JSON string may hold the closing tag, so look for it after the JSON value.
            begin = json_end(decoded.text, body)
        next_call = self._parser.call.find(decoded, begin)
        found = tag.find(decoded, begin, next_call)
        if found is None:
            return (len(decoded.text) if next_call is None else next_call), None
        return found, found + len(tag.text)
