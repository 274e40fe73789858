"""What a harness may speak: a request in the form of chat completions as each wire's body, and each answer back.

The scenarios of the checks are in chat form. An answer that does not have its wire's form, a stream's order of events
included, raises one of `MISSHAPEN`. Sources: OpenAI's and Anthropic's references of their APIs, November 2026.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

MISSHAPEN = (ValueError, KeyError, IndexError, TypeError, AttributeError)
"""What reading an answer raises that is not in its wire's form."""
RAW = "raw"
"""Key of an assistant's message: the parts that came, which a harness sends back as they are."""
Json = dict[str, Any]


class Answer(NamedTuple):
    """An answer in chat form.

    Attributes:
        message: The assistant's message.
        finish: The finish reason of chat completions, or the wire's own where these have none.
        usage: `prompt_tokens` with those from a cache, `completion_tokens`, `total_tokens`; `prompt_tokens_at_start`
            where a stream begins with them. None if it is not reported.
        choices: Number of choices.
    """

    message: Json
    finish: str | None
    usage: Mapping[str, Any] | None
    choices: int = 1


@dataclass(frozen=True, slots=True)
class Dialect:
    """One wire between a harness and a gateway.

    Attributes:
        name: Its name.
        path: What comes after the base URL, which ends in `/v1`; harnesses of messages are given it without that.
        parameters: The names of chat's parameters on this wire; those that it does not have are not asked.
        body: Returns the body of a request in chat form.
        whole: Reads an answer in one piece.
        streamed: Reads a streamed answer.
        overflows: Returns whether an error is what harnesses take for a conversation that is too long.
        text_arguments: Whether the arguments of a call are JSON text, with blanks of its own.
        key: Returns the headers that hold a key.
    """

    name: str
    path: str
    parameters: Mapping[str, str]
    body: Callable[[Mapping[str, Any]], Json]
    whole: Callable[[Any], Answer]
    streamed: Callable[[str], Answer]
    overflows: Callable[[Mapping[str, Any]], bool]
    text_arguments: bool = True
    key: Callable[[str], Json] = lambda key: {"Authorization": f"Bearer {key}"}


def _events(raw: str) -> list[Any]:
    """Return the events of a stream, each named by its line as by its data; comments are left out."""
    found = []
    for block in raw.replace("\r\n", "\n").split("\n\n"):
        lines = dict(line.split(":", 1) for line in block.split("\n") if line and not line.startswith(":"))
        if lines:
            found.append(json.loads(lines["data"]))
            if found[-1]["type"] != lines["event"].strip():
                raise ValueError(f"the event {lines['event'].strip()!r} has data of type {found[-1]['type']!r}")
    return found


def _call(own: str, name: str, arguments: str) -> Json:
    return {"id": own, "type": "function", "function": {"name": name, "arguments": arguments}}


def _message(texts: Sequence[str], calls: Sequence[Json], raw: Sequence[Any]) -> Json:
    message: Json = {"role": "assistant", "content": "".join(texts) or None, RAW: list(raw)}
    return {**message, "tool_calls": list(calls)} if calls else message


def _parts(message: Mapping[str, Any], text: Callable[[str], Json], call: Callable[[Any], Json]) -> list[Json]:
    """Return the parts of an assistant's message: those that came, with the calls that the message has now."""
    calls = [call(each) for each in message.get("tool_calls") or ()]
    if RAW not in message:
        return [*([text(message["content"])] if message.get("content") else []), *calls]
    own = iter(calls)
    kinds = {each["type"] for each in calls}
    return [{**part, **next(own)} if part["type"] in kinds else part for part in message[RAW]]


def _system(chat: Mapping[str, Any]) -> str:
    return "\n".join(message["content"] for message in chat["messages"] if message["role"] == "system")


def _has_code(error: Mapping[str, Any]) -> bool:
    return error.get("code") == "context_length_exceeded"


# OpenAI's chat completions


def _chat(body: Any) -> Answer:
    [choice, *more] = body["choices"]
    kept = ("role", "content", "tool_calls", "reasoning_content")
    message = {name: value for name, value in choice["message"].items() if name in kept and value not in (None, [])}
    message.setdefault("content", None)
    return Answer(message, choice.get("finish_reason"), body.get("usage"), 1 + len(more))


def _chat_stream(raw: str) -> Answer:
    """Put the deltas of a stream together, as the `openai` client does."""
    content, calls, finish, usage = "", {}, None, None  # type: str, dict[int, Json], str | None, Any
    lines = [line.removeprefix("data:").strip() for line in raw.splitlines() if line.startswith("data:")]
    if not lines or lines[-1] != "[DONE]":
        raise ValueError("no [DONE]")
    for line in lines[:-1]:
        event = json.loads(line)
        usage = event.get("usage") or usage
        for choice in event.get("choices") or ():
            finish = choice.get("finish_reason") or finish
            delta = choice.get("delta") or {}
            content += delta.get("content") or ""
            for part in delta.get("tool_calls") or ():
                function = part.get("function") or {}
                call = calls.setdefault(part["index"], _call("", "", ""))
                call["id"] += part.get("id") or ""
                for name in ("name", "arguments"):
                    call["function"][name] += function.get(name) or ""
    message: Json = {"role": "assistant", "content": content or None}
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return Answer(message, finish, usage)


# Anthropic's messages

_SAMPLING = {"temperature": "temperature", "top_p": "top_p"}
_MESSAGES = {**_SAMPLING, "max_tokens": "max_tokens", "stop": "stop_sequences", "response_format": "output_config"}
_STOPS = {"end_turn": "stop", "stop_sequence": "stop", "tool_use": "tool_calls", "max_tokens": "length"}


def _messages_body(chat: Mapping[str, Any]) -> Json:
    messages: list[Json] = []
    for message in chat["messages"]:
        role, content = message["role"], message.get("content")
        if role == "assistant":
            messages.append({"role": role, "content": _parts(message, _text_block, _use_block)})
        elif role != "system":
            block = {"type": "text", "text": content}
            if role == "tool":
                block = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": content}
            if not messages or messages[-1]["role"] == "assistant":  # all results of an answer are in one message
                messages.append({"role": "user", "content": []})
            messages[-1]["content"].append(block)
    body = {"model": chat["model"], "messages": messages, "system": _system(chat), "stream": chat.get("stream")}
    functions = [tool["function"] for tool in chat.get("tools") or ()]
    body["tools"] = [
        {"name": each["name"], "description": each["description"], "input_schema": each["parameters"]}
        for each in functions
    ]
    body |= {own: chat[name] for name, own in _MESSAGES.items() if name in chat}
    if "response_format" in chat:  # this wire has no JSON without a schema
        body["output_config"] = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    return {name: value for name, value in body.items() if value not in (None, [], "")}


def _text_block(text: str) -> Json:
    return {"type": "text", "text": text}


def _use_block(call: Any) -> Json:
    function = call["function"]
    given = json.loads(function["arguments"])
    return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": given}


def _messages(body: Any) -> Answer:
    if (body["type"], body["role"]) != ("message", "assistant"):
        raise ValueError(f"type {body['type']!r}, role {body['role']!r}")
    texts, calls = [], []
    for block in body["content"]:
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "tool_use", "id": str(own), "name": str(name), "input": dict(given)}:
                calls.append(_call(own, name, json.dumps(given)))
            case {"type": "thinking", "thinking": str(), "signature": str()} | {"type": "redacted_thinking"}:
                pass
            case _:
                raise ValueError(f"the block {block} is not in the wire's form")
    stop, usage = body["stop_reason"], body["usage"]
    if usage is not None:
        counts = _prompt_tokens(usage), usage["output_tokens"]
        usage = {"prompt_tokens": counts[0], "completion_tokens": counts[1], "total_tokens": sum(counts)}
    return Answer(_message(texts, calls, body["content"]), _STOPS.get(stop, stop), usage)


def _prompt_tokens(usage: Mapping[str, Any]) -> int:
    """Return the tokens of the prompt, of which Anthropic counts those from a cache and to it apart."""
    cached = (usage.get(f"cache_{done}_input_tokens") or 0 for done in ("read", "creation"))
    return int(usage["input_tokens"]) + sum(cached)


def _messages_stream(raw: str) -> Answer:
    """Put a stream together, as the `anthropic` client does, and check the order of its events."""
    first, *events, last = [event for event in _events(raw) if event["type"] != "ping"]
    if (first["type"], last["type"]) != ("message_start", "message_stop"):
        raise ValueError(f"the stream begins with {first['type']} and ends with {last['type']}: {last}")
    body = first["message"]
    start, content, is_open = body["usage"], body["content"], False
    if content or body["stop_reason"] is not None:
        raise ValueError(f"message_start has content {content} and stop_reason {body['stop_reason']!r}")
    for event in events:
        kind = event["type"]
        if body["stop_reason"] is not None or is_open != (kind in ("content_block_delta", "content_block_stop")):
            raise ValueError(f"{kind} of block {event.get('index')} is out of place")
        if kind == "content_block_start":
            content.append({**event["content_block"]})
            is_open, text = True, ""
        elif kind == "content_block_delta":
            text += _delta(content[-1], event["delta"])
        elif kind == "content_block_stop":
            is_open = False
            if content[-1]["type"] == "tool_use":
                content[-1]["input"] = json.loads(text or "{}")
        elif kind == "message_delta":
            known = {name: count for name, count in event["usage"].items() if count is not None}
            body = {**body, **event["delta"], "usage": {**start, **known}}
        if event.get("index", len(content) - 1) != len(content) - 1:
            raise ValueError(f"{kind} of block {event['index']} comes in block {len(content) - 1}")
    answer = _messages(body)
    if answer.finish is None:
        raise ValueError("no message_delta with a stop_reason")
    return answer._replace(usage={**(answer.usage or {}), "prompt_tokens_at_start": _prompt_tokens(start)})


def _delta(block: Json, delta: Mapping[str, Any]) -> str:
    """Add a delta to its block, and return its JSON text."""
    kind = delta["type"]
    name = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}.get(kind)
    if name is not None:
        block[name] += delta[name]
        return ""
    if kind != "input_json_delta" or block["type"] != "tool_use":
        raise ValueError(f"a {kind} in a block of type {block['type']}")
    return str(delta["partial_json"])


def _is_too_long(error: Mapping[str, Any]) -> bool:
    return error.get("type") == "invalid_request_error" and "prompt is too long" in str(error.get("message"))


# OpenAI's responses

_RESPONSES = {**_SAMPLING, "max_tokens": "max_output_tokens", "response_format": "text"}


def _responses_body(chat: Mapping[str, Any]) -> Json:
    items: list[Json] = []
    for message in chat["messages"]:
        role, content = message["role"], message.get("content")
        if role == "assistant":
            items += _parts(message, _text_item, _call_item)
        elif role == "tool":
            items.append({"type": "function_call_output", "call_id": message["tool_call_id"], "output": content})
        elif role == "user":
            items.append({"type": "message", "role": role, "content": [{"type": "input_text", "text": content}]})
    body = {"model": chat["model"], "input": items, "instructions": _system(chat), "store": False}
    body["stream"] = chat.get("stream")
    body["tools"] = [{"type": "function", "strict": False, **tool["function"]} for tool in chat.get("tools") or ()]
    body |= {own: chat[name] for name, own in _RESPONSES.items() if name in chat}
    if "response_format" in chat:
        body["text"] = {"format": chat["response_format"]}
    return {name: value for name, value in body.items() if value not in (None, [], "")}


def _text_item(text: str) -> Json:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "role": "assistant", "content": [part]}


def _call_item(call: Any) -> Json:
    return {"type": "function_call", "call_id": call["id"], **call["function"]}


def _responses(body: Any) -> Answer:
    texts, calls = [], []
    for item in body["output"]:
        match item:
            case {"type": "message", "role": "assistant", "content": list(parts)}:
                texts += [part[{"output_text": "text", "refusal": "refusal"}[part["type"]]] for part in parts]
            case {"type": "function_call", "call_id": str(own), "name": str(name), "arguments": str(arguments)}:
                calls.append(_call(own, name, arguments))
            case {"type": "reasoning", "summary": list()}:
                pass
            case _:
                raise ValueError(f"the item {item} is not in the wire's form")
    finish = body["status"]
    if finish == "incomplete":
        finish = {"max_output_tokens": "length"}.get(reason := body["incomplete_details"]["reason"], reason)
    elif finish == "completed":
        finish = "tool_calls" if calls else "stop"
    usage = body["usage"] and {
        "prompt_tokens": body["usage"]["input_tokens"],
        "completion_tokens": body["usage"]["output_tokens"],
        "total_tokens": body["usage"]["total_tokens"],
    }
    return Answer(_message(texts, calls, body["output"]), finish, usage)


def _responses_stream(raw: str) -> Answer:
    """Return the response that a stream ends with, and check that its events made the same."""
    first, *events, last = _events(raw)
    numbers = [event["sequence_number"] for event in (first, *events, last)]
    if numbers != list(range(len(numbers))):
        raise ValueError(f"the events are numbered {numbers}")
    if first["type"] != "response.created" or last["type"] not in ("response.completed", "response.incomplete"):
        raise ValueError(f"the stream begins with {first['type']} and ends with {last['type']}: {last}")
    items: list[Any] = []
    item: _Item | None = None
    for event in events:
        kind, number = event["type"].removeprefix("response."), event.get("output_index", len(items))
        if number != len(items) or (item is None) != (kind in ("in_progress", "output_item.added")):
            raise ValueError(f"{kind} of item {number} is out of place")
        if kind == "output_item.added":
            item = _Item(event["item"])
        elif kind == "output_item.done" and item is not None:
            items.append(item.done(event["item"]))
            item = None
        elif item is not None:
            item.take(kind, event)
    body = last["response"]
    if items != body["output"] or item is not None or last["type"] != f"response.{body['status']}":
        raise ValueError(f"the stream has the items {items}; its response, {body['status']}, has {body['output']}")
    return _responses(body)


class _Item:
    """An item of a stream, while it is written: the text of each part, and which of them are not finished."""

    def __init__(self, item: Json) -> None:
        if any(item.get(name) for name in ("content", "summary", "arguments")):
            raise ValueError(f"an item begins with content: {item}")
        self._id = item["id"]
        self._texts: dict[Any, str] = {_ARGUMENTS: ""} if item["type"] == "function_call" else {}
        self._left = {*self._texts}

    def take(self, kind: str, event: Json) -> None:
        """Add a delta to its part, or hold a finished part against its deltas."""
        index = event.get("content_index", event.get("summary_index"))
        place = (kind.rpartition(".")[0], index)
        if event["item_id"] != self._id:
            raise ValueError(f"{kind} of {event['item_id']} comes in {self._id}")
        if kind.endswith("part.added"):
            place = _place(event["part"], index)
            self._texts[place] = ""
            self._left.add(place)
        elif kind.endswith(".delta"):
            self._texts[place] += event["delta"]
        elif kind.endswith(".done") and "part" not in event:
            self._left.remove(place)
            if (text := _first(event, "text", "arguments", "refusal")) != self._texts[place]:
                raise ValueError(f"{kind} has {text!r}, its deltas {self._texts[place]!r}")

    def done(self, item: Json) -> Json:
        """Return the finished item, which must have the id and the texts of its parts."""
        names = ("content", "summary")
        made: dict[Any, str] = {
            _place(part, n): _first(part, "text", "refusal")
            for name in names
            for n, part in enumerate(item.get(name) or ())
        }
        if item["type"] == "function_call":
            made[_ARGUMENTS] = item["arguments"]
        if item["id"] != self._id or made != self._texts or self._left:
            raise ValueError(
                f"the item {item['id']} has {made}, its deltas {self._texts}; without an end: {self._left}"
            )
        return item


_ARGUMENTS = ("function_call_arguments", None)


def _place(part: Mapping[str, Any], index: int | None) -> tuple[str, int | None]:
    """Return a part's place in its item: the name of its events, and its index."""
    return {"summary_text": "reasoning_summary_text"}.get(part["type"], part["type"]), index


def _first(value: Mapping[str, Any], *names: str) -> str:
    return next(str(value[name]) for name in names if name in value)


_EVERY = {name: name for name in ("n", "seed", "presence_penalty", "frequency_penalty", "logit_bias", *_MESSAGES)}
DIALECTS = {
    each.name: each
    for each in (
        Dialect("chat", "/chat/completions", _EVERY, dict, _chat, _chat_stream, _has_code),
        Dialect(
            "messages",
            "/messages",
            _MESSAGES,
            _messages_body,
            _messages,
            _messages_stream,
            _is_too_long,
            text_arguments=False,
            key=lambda key: {"x-api-key": key, "anthropic-version": "2023-06-01"},
        ),
        Dialect("responses", "/responses", _RESPONSES, _responses_body, _responses, _responses_stream, _has_code),
    )
}
"""The wires by their names, the default first."""
