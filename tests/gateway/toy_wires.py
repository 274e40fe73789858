"""The toy's other wires: requests of messages and responses as chat completions, and its answers on them.

Every answer begins with reasoning that is signed: a request whose calls lack theirs is refused, as Anthropic does.
"""

from __future__ import annotations

import json
import re
from typing import Any

NAMES = {
    "chat": {},
    "messages": {"stop_sequences": "stop", "output_config": "response_format"},
    "responses": {"max_output_tokens": "max_tokens", "text": "response_format"},
}
"""Keys of the wires that chat completions name otherwise."""
SAME = ("model", "stream", "temperature", "top_p", "max_tokens")
WIRE_DEFECTS = {
    ("messages", "cached not counted"): "usage",
    ("messages", "cached counted twice"): "usage",
    ("messages", "start has no count"): "stream_equals_plain",
    ("messages", "result lost"): "order_of_tool_results",
    ("messages", "system lost"): "branches",
    ("messages", "input as text"): "parallel_calls",
    ("messages", "calls end the turn"): "parallel_calls",
    ("messages", "signature lost"): "parallel_calls",
    ("messages", "no message_stop"): "stream_equals_plain",
    ("messages", "block not stopped"): "stream_equals_plain",
    ("messages", "deltas before the block"): "stream_equals_plain",
    ("messages", "indexes are all 0"): "stream_equals_plain",
    ("messages", "input not streamed"): "stream_equals_plain",
    ("messages", "openai's overflow"): "context_overflow",
    ("responses", "cached not counted"): "usage",
    ("responses", "cached counted twice"): "usage",
    ("responses", "result lost"): "order_of_tool_results",
    ("responses", "system lost"): "branches",
    ("responses", "arguments as object"): "parallel_calls",
    ("responses", "cut is completed"): "truncated_turn",
    ("responses", "item not its deltas"): "stream_equals_plain",
    ("responses", "output not its items"): "stream_equals_plain",
    ("responses", "item not done"): "stream_equals_plain",
    ("responses", "text not done"): "stream_equals_plain",
    ("responses", "text done elsewhere"): "stream_equals_plain",
    ("responses", "item begins full"): "stream_equals_plain",
    ("responses", "no completed"): "stream_equals_plain",
    ("responses", "numbers repeat"): "stream_equals_plain",
}
"""Each defect of a wire's own, and the check that catches it."""


def signature(text: str) -> str:
    return f"signed-{len(text)}"


def to_chat(wire: str, body: dict[str, Any], defect: str) -> dict[str, Any]:
    """Return a request as a chat completion's; what is unknown keeps its key."""
    if wire == "chat":
        return body
    messages = from_messages(body) if wire == "messages" else from_items(body)
    if defect == "result lost":
        messages = [m for n, m in enumerate(messages) if m["role"] != "tool" or messages[n - 1]["role"] != "tool"]
    system = body.pop("system" if wire == "messages" else "instructions", "")
    if system and defect != "system lost":
        messages.insert(0, {"role": "system", "content": system})
    for key in ("messages", "input", "store"):
        body.pop(key, None)
    chat = {NAMES[wire].get(key, key): value for key, value in body.items()}
    if "tools" in body:
        chat["tools"] = [{k: v for k, v in tool.items() if k not in ("type", "strict")} for tool in body["tools"]]
    return {**chat, "messages": messages}


def from_messages(body: dict[str, Any]) -> list[Any]:
    messages: list[Any] = []
    for message in body["messages"]:
        made: dict[str, Any] = {"role": message["role"], "content": ""}
        signed = False
        for block in message["content"]:
            if block["type"] == "text":
                made["content"] += block["text"]
            elif block["type"] == "thinking":
                signed = block["signature"] == signature(block["thinking"])
            elif block["type"] == "tool_use":
                call = {"id": block["id"], "name": block["name"], "text": json.dumps(block["input"])}
                made.setdefault("tool_calls", []).append(chat_call(**call))
            else:
                messages.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": block["content"]})
        if "tool_calls" in made and not signed:
            raise ValueError("the calls of an answer come without its signed thinking")
        if made["content"] or "tool_calls" in made:
            messages.append(made)
    return messages


def from_items(body: dict[str, Any]) -> list[Any]:
    messages: list[Any] = []
    signed = False
    for item in body["input"]:
        kind, last = item["type"], messages[-1] if messages else {}
        if kind == "reasoning":
            signed = item["encrypted_content"] == signature(item["id"])
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
        elif kind == "message":
            messages.append({"role": item["role"], "content": "".join(part["text"] for part in item["content"])})
        else:
            if not signed:
                raise ValueError("the calls of an answer come without its encrypted reasoning")
            if last.get("role") != "assistant":
                messages.append(last := {"role": "assistant", "content": None})
            last.setdefault("tool_calls", []).append(chat_call(item["call_id"], item["name"], item["arguments"]))
    return messages


def chat_call(id: str, name: str, text: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": text}}


def error(wire: str, body: dict[str, Any], defect: str) -> dict[str, Any]:
    """Return an error of chat completions on its wire."""
    found = body["error"]
    if wire != "messages" or defect == "openai's overflow":
        return body
    overflow = found["code"] == "context_length_exceeded"
    text = f"prompt is too long: {found['message']}" if overflow else found["message"]
    kind = "api_error" if found["code"] in ("engine", "engine_error") else "invalid_request_error"
    return {"type": "error", "error": {"type": kind, "message": text}}


# Answers


def answer(wire: str, message: Any, finish: str, usage: Any, defect: str) -> tuple[Any, list[Any]]:
    """Return an answer of chat completions on its wire, and the events of its stream."""
    make = messages_answer if wire == "messages" else responses_answer
    return make(message, finish, usage, defect)


def messages_answer(message: Any, finish: str, usage: Any, defect: str) -> tuple[Any, list[Any]]:
    content: list[Any] = [{"type": "thinking", "thinking": "Hm.", "signature": signature("Hm.")}]
    if defect == "signature lost":
        del content[0]["signature"]
    if message.get("content"):
        content.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls") or ():
        given = json.loads(call["function"]["arguments"])
        given = json.dumps(given) if defect == "input as text" else given
        content.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": given})
    stops = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    stop = "end_turn" if defect == "calls end the turn" else stops[finish]
    counts = None
    if usage is not None:
        prompt, cached = usage["prompt_tokens"], usage["prompt_tokens"] // 2
        counts = {"input_tokens": prompt - cached, "cache_read_input_tokens": cached}
        if defect == "cached not counted":
            counts["cache_read_input_tokens"] = 0
        if defect == "cached counted twice":
            counts["input_tokens"] = prompt
        counts["output_tokens"] = usage["completion_tokens"]
    about = {"id": "msg_1", "type": "message", "role": "assistant", "model": "scripted", "stop_sequence": None}
    whole = {**about, "content": content, "stop_reason": stop, "usage": counts}
    start = {**(counts or {}), "output_tokens": 1} if counts else None
    if start and defect == "start has no count":
        start |= {"input_tokens": 0, "cache_read_input_tokens": 0}
    events: list[Any] = [
        {"type": "message_start", "message": {**whole, "content": [], "stop_reason": None, "usage": start}},
        {"type": "ping"},
    ]
    for index, block in enumerate(content):
        events += block_events(0 if defect == "indexes are all 0" else index, block, defect)
    final = counts if defect == "start has no count" or not counts else {"output_tokens": counts["output_tokens"]}
    events.append({"type": "message_delta", "delta": {"stop_reason": stop, "stop_sequence": None}, "usage": final})
    return whole, events if defect == "no message_stop" else [*events, {"type": "message_stop"}]


def block_events(index: int, block: Any, defect: str) -> list[Any]:
    empty: dict[str, Any] = {"thinking": {"thinking": "", "signature": ""}, "text": {"text": ""}}
    empty["tool_use"] = {"input": block.get("input") if defect == "input not streamed" else {}}
    begun = {"type": "content_block_start", "index": index, "content_block": {**block, **empty[block["type"]]}}
    deltas: list[Any] = []
    if block["type"] == "thinking":
        deltas.append({"type": "thinking_delta", "thinking": block["thinking"]})
        deltas.append({"type": "signature_delta", "signature": block.get("signature", "")})
    elif block["type"] == "text":
        deltas += [{"type": "text_delta", "text": piece} for piece in re.findall(r"\S+\s*", block["text"])]
    elif defect != "input not streamed":
        text = json.dumps(block["input"])
        deltas += [{"type": "input_json_delta", "partial_json": part} for part in (text[:5], text[5:])]
    made = [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
    made = [*made, begun] if defect == "deltas before the block" else [begun, *made]
    return made if defect == "block not stopped" else [*made, {"type": "content_block_stop", "index": index}]


def responses_answer(message: Any, finish: str, usage: Any, defect: str) -> tuple[Any, list[Any]]:
    items: list[Any] = [{"type": "reasoning", "summary": [], "encrypted_content": signature("item_0")}]
    if message.get("content"):
        part = {"type": "output_text", "text": message["content"], "annotations": []}
        items.append({"type": "message", "role": "assistant", "content": [part]})
    for call in message.get("tool_calls") or ():
        items.append({"type": "function_call", "call_id": call["id"], **call["function"]})
        if defect == "arguments as object":
            items[-1]["arguments"] = json.loads(items[-1]["arguments"])
    for number, item in enumerate(items):
        item["id"] = f"item_{number}"
    is_cut = finish == "length" and defect != "cut is completed"
    response = {"id": "resp_1", "object": "response", "status": "incomplete" if is_cut else "completed"}
    response["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
    counts = None
    if usage is not None:
        cached = usage["prompt_tokens"] // 2
        counts = {"input_tokens": usage["prompt_tokens"], "input_tokens_details": {"cached_tokens": cached}}
        counts["input_tokens"] += {"cached not counted": -cached, "cached counted twice": cached}.get(defect, 0)
        counts |= {"output_tokens": usage["completion_tokens"], "total_tokens": usage["total_tokens"]}
    whole = {**response, "output": items, "usage": counts}
    begun = {**response, "status": "in_progress", "output": [], "usage": None}
    events: list[Any] = [{"type": f"response.{kind}", "response": begun} for kind in ("created", "in_progress")]
    for index, item in enumerate(items):
        events += item_events(index, item, defect)
    last = {**whole, "output": items[:-1] if defect == "output not its items" else items}
    if defect != "no completed":
        events.append({"type": f"response.{response['status']}", "response": last})
    numbered = [
        {**event, "sequence_number": 0 if defect == "numbers repeat" else number} for number, event in enumerate(events)
    ]
    return whole, numbered


def item_events(index: int, item: Any, defect: str) -> list[Any]:
    place = {"output_index": index, "item_id": item["id"]}
    empty: dict[str, Any] = {"message": {"content": []}, "function_call": {"arguments": ""}}
    begun = item if defect == "item begins full" else {**item, **empty.get(item["type"], {})}
    events: list[Any] = [{"type": "response.output_item.added", "output_index": index, "item": begun}]
    if item["type"] == "message":
        [part], place = item["content"], {**place, "content_index": 0}
        events.append({"type": "response.content_part.added", **place, "part": {**part, "text": ""}})
        events += texts("output_text", "text", part["text"], place, defect)
        events.append({"type": "response.content_part.done", **place, "part": part})
    elif item["type"] == "function_call":
        text = item["arguments"] if isinstance(item["arguments"], str) else json.dumps(item["arguments"])
        events += texts("function_call_arguments", "arguments", text, place, defect)
    if defect == "item not done":
        return events
    return [*events, {"type": "response.output_item.done", "output_index": index, "item": item}]


def texts(kind: str, name: str, text: str, place: Any, defect: str) -> list[Any]:
    pieces = [text[:4], text[4:-1] if defect == "item not its deltas" else text[4:]]
    events = [{"type": f"response.{kind}.delta", **place, "delta": piece} for piece in pieces]
    kind = "reasoning_text" if defect == "text done elsewhere" else kind
    if defect != "text not done":
        events.append({"type": f"response.{kind}.done", **place, name: "".join(pieces)})
    return events
