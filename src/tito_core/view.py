"""What Strands sees of a turn: its message, stop reason and events. The view never changes the ledger."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from strands.types.content import ContentBlock, Message
from strands.types.event_loop import Metrics, StopReason, Usage
from strands.types.streaming import ContentBlockDelta, StreamEvent

from tito_core.backend.protocol import TokenResponse
from tito_core.chat.messages import MALFORMED_CALL
from tito_core.chat.sampled_ids import with_sampled_id
from tito_core.ledger.columns import TokenIds
from tito_core.ledger.turn import Finish
from tito_core.malformed import MalformedCalls, malformed_of
from tito_core.parsing.parsed import CallStatus, ParsedCall, ParsedTurn
from tito_core.parsing.preview import Piece, PreviewError


def assistant_message(
    parsed: ParsedTurn,
    finish: Finish,
    next_call_id: Callable[[], str],
    malformed: MalformedCalls = "feedback",
    runs_calls: bool = True,
) -> Message:
    """Build the message that Strands will store. No raw text of a call is lost in it.

    Blank text is left out: Strands drops or rewrites it. Of an answer that was cut off all calls stay text, since
    Strands would rewrite them, and none of them may run; and so they do beside a malformed one unless the policy gets
    feedback, and where none is to run at all.
    """
    content: list[ContentBlock] = []
    if parsed.early_reasoning.strip():
        content.append(_reasoning(parsed.early_reasoning))
    text = parsed.text
    as_text = finish.cut_off or not runs_calls or (malformed != "feedback" and bool(malformed_of(parsed)))
    if as_text:
        text = "\n".join([text, *(call.raw for call in parsed.calls)]).strip()
    if text.strip():
        content.append({"text": text})
    if parsed.late_reasoning.strip():
        content.append(_reasoning(parsed.late_reasoning))
    if not as_text:
        content += [_tool_use(call, next_call_id()) for call in parsed.calls]
    return {"role": "assistant", "content": content}


def _reasoning(text: str) -> ContentBlock:
    return {"reasoningContent": {"reasoningText": {"text": text}}}


def stop_reason(message: Message, response: TokenResponse) -> StopReason:
    """Give Strands' stop reason; a stop string beside a call is still `tool_use`, or the call would dangle."""
    if response.finish.cut_off:
        return "max_tokens"
    if any("toolUse" in block for block in message["content"]):
        return "tool_use"
    return "stop_sequence" if isinstance(response.stop, str) else "end_turn"


def sampled_arguments(message: Message, parsed: ParsedTurn) -> dict[str, str]:
    """Give the arguments of each call in a message as the policy wrote them, where that is JSON, by `toolUseId`."""
    uses = (block["toolUse"]["toolUseId"] for block in message["content"] if "toolUse" in block)
    written = zip(uses, parsed.calls, strict=False)  # a message whose calls stay text has none
    return {use: call.arguments_text for use, call in written if call.arguments_text is not None}


def events(
    message: Message,
    reason: StopReason,
    response: TokenResponse,
    arguments: Mapping[str, str],
    shown: Sequence[Piece] = (),
) -> Iterator[StreamEvent]:
    """Yield the well-formed events of one answer, ending in usage and latency.

    Args:
        message: The answer.
        reason: Why it stopped.
        response: What the engine said.
        arguments: What `sampled_arguments` gives.
        shown: The beginning of its blocks that has been shown, the last of which is still open; see `Showing`.

    Raises:
        PreviewError: That is not how the answer begins.
    """
    content = message["content"]
    _expect_begun(content, shown)
    if not shown:
        yield {"messageStart": {"role": "assistant"}}
    for number, block in enumerate(content[max(0, len(shown) - 1) :], max(0, len(shown) - 1)):
        if number < len(shown):
            rest = _text_of(block)[len(shown[number].text) :]
            if rest:
                yield {"contentBlockDelta": {"delta": delta_of(Piece(shown[number].kind, rest))}}
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
    """Give an event, and where it ends the message, with the turn's ids and logprobs as lists for callbacks."""
    if "messageStop" not in event:
        return event
    fields: dict[str, Any] = {
        "prompt_token_ids": prompt_ids.tolist(),
        "token_ids": response.output_ids.tolist(),
        "logprobs": response.logprobs.tolist(),
    }
    return {"messageStop": {**event["messageStop"], "additionalModelResponseFields": fields}}


def delta_of(piece: Piece) -> ContentBlockDelta:
    """Give the delta that goes on with a block of text or reasoning."""
    return {"text": piece.text} if piece.kind == "text" else {"reasoningContent": {"text": piece.text}}


def _expect_begun(content: Sequence[ContentBlock], shown: Sequence[Piece]) -> None:
    for number, piece in enumerate(shown):
        whole = _text_of(content[number]) if number < len(content) else ""
        kind = "text" if number < len(content) and "text" in content[number] else "reasoning"
        ended = number < len(shown) - 1
        if piece.kind != kind or not whole.startswith(piece.text) or (ended and whole != piece.text):
            raise PreviewError(
                f"The parser's preview showed the {piece.kind} {piece.text[-80:]!r}, and the whole answer says "
                f"{whole[:80]!r} there. Nothing of the turn is kept: set stream=False, and mend the parser's preview."
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


def _tool_use(call: ParsedCall, call_id: str) -> ContentBlock:
    if call.status == CallStatus.OK and call.name is not None:
        arguments = dict(call.arguments or {})
        return {"toolUse": {"toolUseId": with_sampled_id(call_id, call.id), "name": call.name, "input": arguments}}
    # Strands would run a tool with {} for broken arguments. Under a name that no tool has, nothing runs. The input must
    # be a mapping: module tools run on lists and strings.
    said = {"reason": call.reason, "raw": call.raw}
    if call.name is not None:
        said["name"] = call.name
    return {"toolUse": {"toolUseId": call_id, "name": MALFORMED_CALL, "input": said}}
