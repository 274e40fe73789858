"""Strands' stream events of a turn: certain text while it is sampled, and the rest once the answer is parsed."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

from strands.types.content import ContentBlock, Message
from strands.types.event_loop import Metrics, StopReason, Usage
from strands.types.streaming import ContentBlockDelta, StreamEvent

from tito_core.backend.protocol import TokenChunk, TokenResponse
from tito_core.ledger.columns import TokenIds
from tito_core.parsing.preview import Piece, PreviewError
from tito_core.parsing.registry import ToolParser


class Previewing(Protocol):
    """Shows a completion while it is sampled; see `Preview`."""

    def feed(self, ids: Sequence[int]) -> list[Piece]:
        """Take the next sampled ids; return the pieces that they make certain."""


class StreamedEvents:
    """The events of one answer while it is sampled: its reasoning and text. Calls follow once it is complete.

    Args:
        parser: The policy's parser. One without `preview(prompt_tail)` shows nothing before the end.
        prompt_tail: The last ids of the prompt.

    Attributes:
        blocks: The blocks streamed so far; the last one is still open.
    """

    def __init__(self, parser: ToolParser, prompt_tail: Sequence[int]) -> None:
        self._parser, self._prompt_tail = parser, prompt_tail
        self.blocks: list[Piece] = []

    @functools.cached_property
    def _preview(self) -> Previewing | None:
        begin = getattr(self._parser, "preview", None)
        return None if begin is None else cast(Previewing, begin(self._prompt_tail))

    def of(self, chunk: TokenChunk) -> Iterator[StreamEvent]:
        """Yield the events of the pieces that a chunk makes certain."""
        for piece in [] if self._preview is None else self._preview.feed(chunk.output_ids.tolist()):
            if not self.blocks:
                yield {"messageStart": {"role": "assistant"}}
            if not self.blocks or self.blocks[-1].kind != piece.kind:
                if self.blocks:
                    yield {"contentBlockStop": {}}
                yield {"contentBlockStart": {"start": {}}}
                self.blocks.append(Piece(piece.kind, ""))
            self.blocks[-1] = Piece(piece.kind, self.blocks[-1].text + piece.text)
            yield {"contentBlockDelta": {"delta": delta_of(piece)}}


def stop_reason(message: Message, response: TokenResponse) -> StopReason:
    """Return Strands' stop reason; with a call it is `tool_use` even after a stop string, so that the call runs."""
    if response.finish.cut_off:
        return "max_tokens"
    if any("toolUse" in block for block in message["content"]):
        return "tool_use"
    return "stop_sequence" if isinstance(response.stop, str) else "end_turn"


def events(
    message: Message,
    reason: StopReason,
    response: TokenResponse,
    arguments: Mapping[str, str],
    streamed_blocks: Sequence[Piece] = (),
) -> Iterator[StreamEvent]:
    """Yield the events of one answer, the last one with usage and latency.

    Args:
        message: The answer.
        reason: Why it stopped.
        response: The engine's response.
        arguments: The calls' arguments by `toolUseId`, from `sampled_arguments`.
        streamed_blocks: The blocks that were streamed before, the last one still open; see `StreamedEvents.blocks`.

    Raises:
        PreviewError: The answer does not start with `streamed_blocks`.
    """
    content = message["content"]
    _check_preview(content, streamed_blocks)
    if not streamed_blocks:
        yield {"messageStart": {"role": "assistant"}}
    for number, block in enumerate(content[max(0, len(streamed_blocks) - 1) :], max(0, len(streamed_blocks) - 1)):
        if number < len(streamed_blocks):
            rest = _text_of(block)[len(streamed_blocks[number].text) :]
            if rest:
                yield {"contentBlockDelta": {"delta": delta_of(Piece(streamed_blocks[number].kind, rest))}}
        else:
            start, delta = _block_events(block, arguments)
            yield {"contentBlockStart": {"start": start}}
            yield {"contentBlockDelta": {"delta": delta}}
        yield {"contentBlockStop": {}}
    yield {"messageStop": {"stopReason": reason}}
    sampled = len(response.output_ids)
    usage: Usage = {
        "inputTokens": response.prompt_length,
        "outputTokens": sampled,
        "totalTokens": response.prompt_length + sampled,
    }
    if response.cached_tokens is not None:
        usage["cacheReadInputTokens"] = response.cached_tokens
    metrics: Metrics = {"latencyMs": round(response.latency_s * 1000)}
    yield {"metadata": {"usage": usage, "metrics": metrics}}


def with_ids(event: StreamEvent, prompt_ids: TokenIds, response: TokenResponse) -> StreamEvent:
    """Return an event; the one that ends the message gets the turn's ids and logprobs as lists, for callbacks."""
    if "messageStop" not in event:
        return event
    fields: dict[str, Any] = {
        "prompt_token_ids": prompt_ids.tolist(),
        "token_ids": response.output_ids.tolist(),
        "logprobs": response.logprobs.tolist(),
    }
    return {"messageStop": {**event["messageStop"], "additionalModelResponseFields": fields}}


def delta_of(piece: Piece) -> ContentBlockDelta:
    """Return the delta that appends to a block of text or reasoning."""
    return {"text": piece.text} if piece.kind == "text" else {"reasoningContent": {"text": piece.text}}


def _check_preview(content: Sequence[ContentBlock], streamed_blocks: Sequence[Piece]) -> None:
    for number, piece in enumerate(streamed_blocks):
        whole = _text_of(content[number]) if number < len(content) else ""
        kind = "text" if number < len(content) and "text" in content[number] else "reasoning"
        ended = number < len(streamed_blocks) - 1
        if piece.kind != kind or not whole.startswith(piece.text) or (ended and whole != piece.text):
            raise PreviewError(
                f"The parser's preview streamed the {piece.kind} {piece.text[-80:]!r}, but the complete answer has "
                f"{whole[:80]!r} there. The turn was not committed. Set stream=False, and fix the parser's preview."
            )


def _text_of(block: ContentBlock) -> str:
    if "reasoningContent" in block:
        return block["reasoningContent"]["reasoningText"]["text"]
    return block.get("text", "")


def _block_events(block: ContentBlock, arguments: Mapping[str, str]) -> tuple[Any, Any]:
    if "toolUse" in block:
        use = block["toolUse"]
        start = {"toolUse": {"toolUseId": use["toolUseId"], "name": use["name"]}}
        written = arguments.get(use["toolUseId"]) or json.dumps(use["input"], ensure_ascii=False)
        return start, {"toolUse": {"input": written}}
    return {}, delta_of(Piece("reasoning" if "reasoningContent" in block else "text", _text_of(block)))
