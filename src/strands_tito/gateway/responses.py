"""OpenAI's responses, which Codex speaks: a request becomes the input of a turn, and its events become the answer.

The whole conversation must come with each request: what a server would have to remember is refused by name.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Collection, Iterator, Mapping
from itertools import starmap
from typing import Any

import msgspec
from strands.types.content import Messages
from strands.types.streaming import StreamEvent

from strands_tito.gateway.chat import (
    ChatTurn,
    function_spec,
    image_block,
    json_grammar,
    objects,
    one_of,
    split_keys,
    tool_choice,
)
from strands_tito.gateway.reply import Refusal, error_json, in_order
from tito_core.turn.history import as_stored

_SAMPLING = {"temperature": "temperature", "top_p": "top_p", "max_output_tokens": "max_new_tokens"}
_OTHERS = ("input", "instructions", "model", "parallel_tool_calls", "stream", "text", "tool_choice", "tools")
SERVED = frozenset([*_SAMPLING, *_OTHERS, "background", "top_logprobs", "truncation"])
WITHOUT_EFFECT = frozenset(
    [
        *("access_programs", "client_metadata", "context_management", "include", "metadata", "moderation"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "reasoning", "safety_identifier"),
        *("service_tier", "store", "stream_options", "user"),
    ]
)
"""Keys that change nothing of what a policy samples. The chat template decides about reasoning."""
REFUSED = {
    "background_options": "The answer comes with the request.",
    "conversation": "The gateway keeps no messages: send the whole conversation as input.",
    "image": "The policy makes text.",
    "max_tool_calls": "The harness runs the tools: count there.",
    "previous_response_id": "The gateway keeps no messages: send the whole conversation as input.",
    "prompt": "Send the prompt itself as input.",
}
"""Keys that are refused, and what to do."""
_TEXT = ("text", "logprobs")
"""Keys of a part that the end of its text says too."""


def responses_turn(request: Mapping[str, Any], ignored: Collection[str] = ()) -> ChatTurn:
    """Return the turn that a request asks for. Tools that are no functions are left out, on record.

    Args:
        request: The decoded request.
        ignored: Further keys that have no effect, though they would be refused.

    Raises:
        Refusal: A key is refused, or a value does not have OpenAI's form.
    """
    given, without_effect = split_keys(request, SERVED, WITHOUT_EFFECT, REFUSED, ignored)
    one_of(given, "background", (False,), "The answer comes with the request.")
    one_of(given, "parallel_tool_calls", (True,), "How many calls an answer has is the policy's choice.")
    one_of(given, "top_logprobs", (0,), "Give optional_outputs to the gateway, which records them.")
    one_of(given, "truncation", ("disabled",), "Shorten the input in the harness.")
    items = given.get("input", [])
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    system, messages = _history(objects({"input": items}, "input"))
    if given.get("instructions"):
        system = [str(given["instructions"]), *system]
    sampling = {_SAMPLING[key]: value for key, value in given.items() if key in _SAMPLING}
    form = (given.get("text") or {}).get("format") or {"type": "text"}
    if form.get("type") != "text":
        sampling["grammar"] = json_grammar(form.get("schema", {"type": "object"}))
    tools = objects(given, "tools")
    functions = [tool for tool in tools if tool.get("type") == "function"]
    without_effect += sorted({f"tools of type {tool.get('type')}" for tool in tools if tool not in functions})
    choice, runs_calls = tool_choice(given.get("tool_choice", "auto"))
    return ChatTurn(
        system="\n".join(system) or None,
        messages=messages,
        tools=[*map(function_spec, functions)] or None,
        choice=choice,
        sampling=sampling,
        runs_calls=runs_calls,
        stream=bool(given.get("stream", False)),
        model=str(given.get("model", "")),
        ignored=without_effect,
    )


def _history(items: list[Any]) -> tuple[list[str], Messages]:
    """Return the system prompts and Strands' messages. Items between two of the user's are one answer."""
    system: list[str] = []
    messages: list[Any] = []
    for i, item in enumerate(items):
        role, blocks = _item(item, f"input[{i}]")
        if role == "system" and not messages:
            if any("text" not in block for block in blocks):
                raise Refusal(f"input[{i}]: a system message is text.", param=f"input[{i}]")
            system += [block["text"] for block in blocks]
            continue
        role = "user" if role == "system" else role  # no template shows one later
        last = messages[-1] if messages else {"role": None, "content": []}
        joins = role == "assistant" or (bool(last["content"]) and "toolResult" in last["content"][-1])
        if last["role"] == role and joins:
            last["content"] += blocks
        else:
            messages.append({"role": role, "content": blocks})
    return system, [as_stored(each) if each["role"] == "assistant" else each for each in messages]


def _item(item: Mapping[str, Any], where: str) -> tuple[str, list[Any]]:
    """Return the role and the blocks of an item."""
    try:
        match item.get("type", "message"):
            case "message":
                role = {"developer": "system"}.get(item["role"], item["role"])
                if role not in ("system", "user", "assistant"):
                    raise Refusal(f"{where}: unknown role {role!r}.", param=where)
                return role, [each for each in _blocks(item["content"], where) if each.get("text") != ""]
            case "reasoning":
                text = "".join(part["text"] for part in item.get("content") or ())
                return "assistant", [{"reasoningContent": {"reasoningText": {"text": text}}}] if text else []
            case "function_call":
                call = {"toolUseId": item["call_id"], "name": item["name"], "input": json.loads(item["arguments"])}
                return "assistant", [{"toolUse": call}]
            case "function_call_output":
                content = _blocks(item["output"], where)
                return "user", [{"toolResult": {"toolUseId": item["call_id"], "status": "success", "content": content}}]
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise Refusal(f"{where}: the item is not readable ({error!r}).", param=where) from None
    raise Refusal(f"{where}: an item of type {item['type']!r} is not served.", param=where)


def _blocks(content: Any, where: str) -> list[Any]:
    return [{"text": content}] if isinstance(content, str) else [_block(part, where) for part in content]


def _block(part: Mapping[str, Any], where: str) -> dict[str, Any]:
    if part["type"] in ("input_text", "output_text", "text"):
        return {"text": part["text"]}
    if part["type"] == "input_image":
        return image_block(part["image_url"])
    raise Refusal(f"{where}: a part of type {part['type']!r} is not served.", param=where)


class ResponsesAnswer:
    """A turn's events as a response, whole or as a stream of events.

    Args:
        turn: The request.
        identity: A unique text.
    """

    def __init__(self, turn: ChatTurn, identity: str) -> None:
        self._identity = identity
        self._response: dict[str, Any] = {
            "id": f"resp_{identity}",
            "object": "response",
            "created_at": int(time.time()),
        }
        self._response |= {"model": turn.model, "status": "in_progress", "output": [], "usage": None, "error": None}
        self._response |= {"incomplete_details": None, "tools": [], "tool_choice": "auto", "parallel_tool_calls": True}
        self._item: dict[str, Any] | None = None
        self._number = 0

    async def whole(self, events: AsyncGenerator[StreamEvent | None]) -> bytes:
        """Return the answer in one piece, when the turn is committed."""
        async for event in events:
            for _ in self._events(event or {}):
                pass
        return msgspec.json.encode(self._response)

    async def chunks(self, events: AsyncGenerator[StreamEvent | None]) -> AsyncGenerator[bytes]:
        """Yield the answer's events; see `in_order`."""
        yield self._line("response.created", {"response": self._response})
        async for line in in_order(events, b": waiting\n\n", lambda event: starmap(self._line, self._events(event))):
            yield line
        yield self._line(f"response.{self._response['status']}", {"response": self._response})

    def _events(self, event: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield an event in OpenAI's form, and keep what it says about the answer."""
        if "contentBlockStart" in event:
            self._item = None
            if use := event["contentBlockStart"]["start"].get("toolUse"):
                yield self._begin("function_call", call_id=use["toolUseId"], name=use["name"], arguments="")
        elif "contentBlockDelta" in event:
            delta = event["contentBlockDelta"]["delta"]
            if "toolUse" in delta:
                yield self._more("function_call_arguments", "arguments", delta["toolUse"]["input"])
            elif "reasoningContent" in delta:
                if self._item is None:
                    yield self._begin("reasoning", summary=[], content=[])
                    yield self._begin_part({"type": "reasoning_text", "text": ""})
                yield self._more("reasoning_text", "content", delta["reasoningContent"]["text"])
            else:
                if self._item is None:
                    yield self._begin("message", role="assistant", content=[])
                    yield self._begin_part({"type": "output_text", "text": "", "annotations": [], "logprobs": []})
                yield self._more("output_text", "content", delta["text"])
        elif "contentBlockStop" in event and self._item is not None:
            yield from self._end(self._item)
        elif "messageStop" in event:
            is_cut = event["messageStop"]["stopReason"] == "max_tokens"
            self._response["status"] = "incomplete" if is_cut else "completed"
            self._response["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
        elif "metadata" in event:
            usage = event["metadata"]["usage"]
            self._response["usage"] = {
                "input_tokens": usage["inputTokens"],
                "output_tokens": usage["outputTokens"],
                "total_tokens": usage["totalTokens"],
            }
            if "cacheReadInputTokens" in usage:
                cached = {"cached_tokens": usage["cacheReadInputTokens"]}
                self._response["usage"]["input_tokens_details"] = cached

    def _place(self) -> dict[str, Any]:
        index = len(self._response["output"]) - 1
        return {"output_index": index, "item_id": self._response["output"][index]["id"]}

    def _begin(self, kind: str, **fields: Any) -> tuple[str, dict[str, Any]]:
        index = len(self._response["output"])
        self._item = {"type": kind, "id": f"{kind}_{self._identity}_{index}", "status": "in_progress", **fields}
        self._response["output"].append(self._item)
        return "response.output_item.added", {"output_index": index, "item": json.loads(json.dumps(self._item))}

    def _begin_part(self, part: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        assert self._item is not None  # it begins with the item
        self._item["content"].append(part)
        return "response.content_part.added", {**self._place(), "content_index": 0, "part": {**part}}

    def _end(self, item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield that the item's text, its part and the item are finished: some clients read nothing else."""
        place = self._place()
        if item["type"] == "function_call":
            yield "response.function_call_arguments.done", {**place, "arguments": item["arguments"]}
        else:
            [part], place = item["content"], {**place, "content_index": 0}
            yield f"response.{part['type']}.done", {**place, **{k: v for k, v in part.items() if k in _TEXT}}
            yield "response.content_part.done", {**place, "part": part}
        item["status"] = "completed"
        yield "response.output_item.done", {"output_index": place["output_index"], "item": item}

    def _more(self, kind: str, key: str, text: str) -> tuple[str, dict[str, Any]]:
        assert self._item is not None  # a delta comes after the start of its block
        if key == "content":
            self._item["content"][0]["text"] += text
        else:
            self._item[key] += text
        place = {**self._place(), **({"content_index": 0} if key == "content" else {})}
        place |= {"logprobs": []} if kind == "output_text" else {}
        return f"response.{kind}.delta", {**place, "delta": text}

    def _line(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        self._number += 1
        event = {"type": kind, "sequence_number": self._number - 1, **fields}
        return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"


def error_line(refusal: Refusal) -> bytes:
    """Return an error in the middle of a stream."""
    failed = {"status": "failed", "error": error_json(refusal)["error"]}
    return (
        b"event: response.failed\ndata: "
        + msgspec.json.encode({"type": "response.failed", "response": failed})
        + b"\n\n"
    )
