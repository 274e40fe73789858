"""Anthropic's messages: a request becomes the input of a turn, and a turn's events become the answer.

Every key of a request is served, without effect and on record, or refused by name, as in `chat`.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import AsyncGenerator, Collection, Iterator, Mapping
from itertools import starmap
from typing import Any, cast

import msgspec
from strands.types.content import Messages
from strands.types.streaming import StreamEvent
from strands.types.tools import ToolChoice, ToolSpec

from strands_tito.gateway.chat import ChatTurn, json_grammar, objects, split_keys
from strands_tito.gateway.reply import CONTEXT_CODE, Refusal, in_order
from tito_core.turn.history import as_stored

_SAMPLING = {
    **{name: name for name in ("temperature", "top_p", "top_k")},
    "max_tokens": "max_new_tokens",
    "stop_sequences": "stop",
}
SERVED = frozenset([*_SAMPLING, "messages", "model", "output_config", "stream", "system", "tool_choice", "tools"])
WITHOUT_EFFECT = frozenset(
    [
        *("betas", "cache_control", "context_management", "diagnostics", "inference_geo", "metadata", "service_tier"),
        *("speed", "thinking", "user_profile_id", "workspace_id"),
    ]
)
"""Keys that change nothing of what a policy samples. The chat template decides about reasoning."""
REFUSED = {
    "container": "The policy runs nothing itself.",
    "mcp_servers": "Give the harness's own tools.",
}
"""Keys that are refused, and what to do."""
STOP_STRING = "stopString"
"""Key of the event, after a turn's own, that says which stop string ended it."""
_SIGNATURE = "strands-tito"
"""The signature of reasoning, which clients want to be there. It is found again by its text."""
_ERRORS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}


def messages_turn(request: Mapping[str, Any], ignored: Collection[str] = ()) -> ChatTurn:
    """Return the turn that a request asks for.

    Args:
        request: The decoded request.
        ignored: Further keys that have no effect, though they would be refused.

    Raises:
        Refusal: A key is refused, or a value does not have Anthropic's form.
    """
    given, without_effect = split_keys(request, SERVED, WITHOUT_EFFECT, REFUSED, ignored)
    sampling = {_SAMPLING[key]: value for key, value in given.items() if key in _SAMPLING}
    wanted = given.get("output_config") or {}
    if isinstance(wanted, dict) and (form := wanted.get("format")):
        sampling["grammar"] = json_grammar(form.get("schema", {"type": "object"}))
    without_effect += [f"output_config.{key}" for key in wanted if key != "format"]
    choice, runs_calls = _choice(given.get("tool_choice") or {"type": "auto"})
    system = "\n".join(block["text"] for block in _blocks(given.get("system") or [], "system"))
    return ChatTurn(
        system=system or None,
        messages=_history(objects(given, "messages")),
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(objects(given, "tools"))] or None,
        choice=choice,
        sampling=sampling,
        runs_calls=runs_calls,
        stream=bool(given.get("stream", False)),
        model=str(given.get("model", "")),
        ignored=without_effect,
    )


def _choice(choice: Any) -> tuple[ToolChoice | None, bool]:
    """Return Strands' tool choice, and whether calls are calls."""
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind in ("auto", "none"):
        return None, kind == "auto"
    if kind == "any":
        return cast(ToolChoice, {"any": {}}), True
    if kind != "tool" or not isinstance(choice.get("name"), str):
        raise Refusal("tool_choice must be of type auto, any, none or tool.", param="tool_choice")
    return cast(ToolChoice, {"tool": {"name": choice["name"]}}), True


def _tool(tool: Mapping[str, Any], where: str) -> ToolSpec:
    if tool.get("type") not in (None, "custom"):
        raise Refusal(f"{where}: {tool['type']} runs on Anthropic's servers. Give the harness's own tool.", param=where)
    return {
        "name": cast(str, tool.get("name")),  # what has no name is refused by the turn
        "description": tool.get("description") or "",
        "inputSchema": {"json": tool.get("input_schema") or {"type": "object", "properties": {}}},
    }


def _history(given: list[Any]) -> Messages:
    """Return Strands' messages. A system message among them is text of the user, as no template shows it there."""
    messages: list[Any] = []
    for i, message in enumerate(given):
        role, blocks = message.get("role"), _blocks(message.get("content"), f"messages[{i}]")
        if role == "assistant":
            messages.append(as_stored({"role": "assistant", "content": [b for b in blocks if b.get("text") != ""]}))
        elif role not in ("user", "system"):
            raise Refusal(f"messages[{i}]: unknown role {role!r}.", param=f"messages[{i}]")
        elif messages and messages[-1]["role"] == "user":  # as Anthropic joins them
            messages[-1]["content"] += blocks
        else:
            messages.append({"role": "user", "content": blocks})
    return messages


def _blocks(content: Any, where: str) -> list[Any]:
    if isinstance(content, str):
        return [{"text": content}]
    if not isinstance(content, list):
        raise Refusal(f"{where}: content must be a string or a list of blocks.", param=where)
    return [_block(block, f"{where}.content[{i}]") for i, block in enumerate(content)]


def _block(block: Any, where: str) -> dict[str, Any]:
    try:
        match block["type"]:
            case "text":
                return {"text": block["text"]}
            case "thinking":
                return {"reasoningContent": {"reasoningText": {"text": block["thinking"]}}}
            case "tool_use":
                return {"toolUse": {"toolUseId": block["id"], "name": block["name"], "input": block["input"]}}
            case "tool_result":
                status = "error" if block.get("is_error") else "success"
                content = _blocks(block.get("content") or [], where)
                return {"toolResult": {"toolUseId": block["tool_use_id"], "status": status, "content": content}}
            case "image" if block["source"]["type"] == "base64":
                source = block["source"]
                data = base64.b64decode(source["data"], validate=True)
                return {"image": {"format": source["media_type"].removeprefix("image/"), "source": {"bytes": data}}}
    except (KeyError, TypeError, AttributeError, binascii.Error) as error:
        raise Refusal(f"{where}: the block is not readable ({error!r}).", param=where) from None
    raise Refusal(f"{where}: a block of type {block['type']!r} is not served.", param=where)


class MessagesAnswer:
    """A turn's events as a message, whole or as a stream of events.

    Args:
        turn: The request.
        identity: A unique text.
        prompt_tokens: The tokens of the prompt; the stream's first event says them.
    """

    def __init__(self, turn: ChatTurn, identity: str, prompt_tokens: int = 0) -> None:
        self._stop: dict[str, str | None] = {"stop_reason": None, "stop_sequence": None}
        self._usage: dict[str, int] = {"input_tokens": prompt_tokens, "output_tokens": 0}
        self._message = {"id": f"msg_{identity}", "type": "message", "role": "assistant", "model": turn.model}

    async def whole(self, events: AsyncGenerator[StreamEvent | None]) -> bytes:
        """Return the answer in one piece, when the turn is committed."""
        content: list[dict[str, Any]] = []
        async for event in events:
            for kind, fields in self._events(event or {}):
                if kind == "content_block_start":
                    content.append({**fields["content_block"]})
                elif kind == "content_block_delta":
                    for key, text in fields["delta"].items():
                        if key == "partial_json":
                            content[-1]["input"] = json.loads(text)
                        elif key != "type":
                            content[-1][key] += text
        end = {**self._stop, "usage": self._usage}
        return msgspec.json.encode({**self._message, "content": content, **end})

    async def chunks(self, events: AsyncGenerator[StreamEvent | None]) -> AsyncGenerator[bytes]:
        """Yield the answer's events; see `in_order`."""
        begun: dict[str, Any] = {
            **self._message,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage,
        }
        yield _line("message_start", {"message": begun})
        async for line in in_order(events, _line("ping", {}), lambda event: starmap(_line, self._events(event))):
            yield line
        yield _line("message_delta", {"delta": self._stop, "usage": self._usage})
        yield _line("message_stop", {})

    def _events(self, event: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield an event in Anthropic's form, and keep what it says about the answer."""
        if "contentBlockStart" in event:
            self._block: dict[str, Any] | None = None
            if use := event["contentBlockStart"]["start"].get("toolUse"):
                yield self._begin({"type": "tool_use", "id": use["toolUseId"], "name": use["name"], "input": {}})
        elif "contentBlockDelta" in event:
            delta = event["contentBlockDelta"]["delta"]
            if "toolUse" in delta:
                made = {"type": "input_json_delta", "partial_json": delta["toolUse"]["input"]}
            elif "reasoningContent" in delta:
                if self._block is None:
                    yield self._begin({"type": "thinking", "thinking": "", "signature": ""})
                made = {"type": "thinking_delta", "thinking": delta["reasoningContent"]["text"]}
            else:
                if self._block is None:
                    yield self._begin({"type": "text", "text": ""})
                made = {"type": "text_delta", "text": delta["text"]}
            yield "content_block_delta", {"index": self._index, "delta": made}
        elif "contentBlockStop" in event and self._block is not None:
            if self._block["type"] == "thinking":
                signed = {"type": "signature_delta", "signature": _SIGNATURE}
                yield "content_block_delta", {"index": self._index, "delta": signed}
            yield "content_block_stop", {"index": self._index}
        elif "messageStop" in event:
            self._stop["stop_reason"] = event["messageStop"]["stopReason"]
        elif STOP_STRING in event:
            self._stop["stop_sequence"] = event[STOP_STRING]
        elif "metadata" in event:
            self._usage = _usage(event["metadata"]["usage"])

    _index = -1

    def _begin(self, block: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        self._block, self._index = block, self._index + 1
        return "content_block_start", {"index": self._index, "content_block": block}


def _line(kind: str, fields: Mapping[str, Any]) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode({"type": kind, **fields}) + b"\n\n"


def _usage(usage: Mapping[str, int]) -> dict[str, int]:
    """Return Anthropic's usage, whose input tokens leave out what was read from the cache."""
    cached = usage.get("cacheReadInputTokens")
    counts = {"input_tokens": usage["inputTokens"] - (cached or 0), "output_tokens": usage["outputTokens"]}
    return counts if cached is None else {**counts, "cache_read_input_tokens": cached}


def error_json(refusal: Refusal) -> dict[str, Any]:
    """Return Anthropic's JSON of an error."""
    kind = _ERRORS.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "api_error")
    # Harnesses look for these words, and compact.
    text = f"prompt is too long: {refusal}" if refusal.code == CONTEXT_CODE else str(refusal)
    return {"type": "error", "error": {"type": kind, "message": text}}


def error_line(refusal: Refusal) -> bytes:
    """Return an error in the middle of a stream."""
    return _line("error", error_json(refusal))
