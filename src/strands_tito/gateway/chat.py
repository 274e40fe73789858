"""OpenAI's chat completions: a request becomes the input of a turn, and a turn's events become the answer.

Every key of a request is served, without effect and on record, or refused by name: `SERVED`, `WITHOUT_EFFECT`,
`REFUSED`. A test walks the keys of the installed `openai` package.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
from strands.types.content import Messages
from strands.types.streaming import StreamEvent
from strands.types.tools import ToolChoice, ToolSpec

from strands_tito.gateway.reply import Refusal, in_order
from tito_core.backend.values import nearest
from tito_core.turn.history import as_stored

_SAMPLING = {
    **{name: name for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "stop")},
    **{name: name for name in ("top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos")},
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
}
"""Keys that are sampling parameters, OpenAI's and those that vLLM and SGLang add, and our names of them."""
_OTHERS = ("logit_bias", "logprobs", "messages", "model", "n", "response_format", "stream", "stream_options")
SERVED = frozenset([*_SAMPLING, *_OTHERS, "tool_choice", "tools", "top_logprobs", "parallel_tool_calls", "modalities"])
WITHOUT_EFFECT = frozenset(
    [
        *("metadata", "moderation", "prediction", "safety_identifier", "service_tier", "store", "user", "verbosity"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    ]
)
"""Keys that change nothing of what a policy samples. That they were sent is on record in the session's ledger."""
REFUSED = {
    "audio": "The policy makes text.",
    "function_call": "Use tool_choice, which took its place.",
    "functions": "Use tools, which took its place.",
    "reasoning_effort": "The chat template decides about reasoning: start the gateway with a template argument.",
    "web_search_options": "Give the harness's own search as a tool.",
}
"""Keys that are refused, and what to do."""
_MESSAGE_KEYS = ("content", "reasoning", "reasoning_content", "role", "tool_call_id", "tool_calls")
_FUNCTION_KEYS = ("description", "name", "parameters")
_FINISH = {"end_turn": "stop", "stop_sequence": "stop", "tool_use": "tool_calls", "max_tokens": "length"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTurn:
    """A request for a turn.

    Attributes:
        system: The system prompt, or None.
        messages: The messages, in Strands' form.
        tools: The tools, in Strands' form.
        choice: The forced tool call, or None.
        sampling: The sampling parameters that the request sets.
        runs_calls: Whether the policy's calls are calls; False for `tool_choice="none"`.
        stream: Whether the answer is streamed.
        usage: Whether the last chunk of a stream holds the usage.
        logprobs: Whether the answer holds the logprobs of the sampled tokens.
        model: The name that the request gives to the model.
        ignored: Keys that have no effect.
    """

    system: str | None
    messages: Messages
    tools: list[ToolSpec] | None = None
    choice: ToolChoice | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    runs_calls: bool = True
    stream: bool = False
    usage: bool = False
    logprobs: bool = False
    model: str = ""
    ignored: Sequence[str] = ()


def chat_turn(request: Mapping[str, Any], ignored: Collection[str] = ()) -> ChatTurn:
    """Return the turn that a request asks for.

    Args:
        request: The decoded request.
        ignored: Further keys that have no effect, though they would be refused.

    Raises:
        Refusal: A key is refused, or a value does not have OpenAI's form.
    """
    given, without_effect = split_keys(request, SERVED, WITHOUT_EFFECT, REFUSED, ignored)
    one_of(given, "n", (1,), "Send a request for each sample: an equal one is another sample of the turn.")
    one_of(given, "parallel_tool_calls", (True,), "How many calls an answer has is the policy's choice.")
    one_of(given, "modalities", (["text"],), "The policy makes text.")
    one_of(given, "top_logprobs", (0,), "Give optional_outputs to the gateway, which records them.")
    for flag in ("logprobs", "stream"):
        one_of(given, flag, (False, True))
    said, tools = objects(given, "messages"), objects(given, "tools")
    system, messages = _history(said)
    choice, runs_calls = tool_choice(given.get("tool_choice", "auto"))
    options = given.get("stream_options", {})
    without_effect += _unused("messages", said, _MESSAGE_KEYS) + _unused("stream_options", [options], ["include_usage"])
    return ChatTurn(
        system=system,
        messages=messages,
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)] or None,
        choice=choice,
        sampling=_sampling(given),
        runs_calls=runs_calls,
        stream=given.get("stream", False),
        usage=bool(options.get("include_usage")),
        logprobs=given.get("logprobs", False),
        model=str(given.get("model", "")),
        ignored=without_effect + _unused("tools.function", [tool["function"] for tool in tools], _FUNCTION_KEYS),
    )


def _unused(place: str, values: list[Any], known: Collection[str]) -> list[str]:
    return sorted({f"{place}.{key}" for each in values for key, value in each.items() if value and key not in known})


def split_keys(
    request: Mapping[str, Any],
    served: Collection[str],
    without_effect: Collection[str],
    refused: Mapping[str, str],
    ignored: Collection[str],
) -> tuple[dict[str, Any], list[str]]:
    """Return what a request sets of the served keys, and its keys that have no effect.

    Raises:
        Refusal: A key is refused.
    """
    given = {key: value for key, value in request.items() if value is not None}
    dropped = [key for key in given if key in without_effect or key in ignored]
    for key in dropped:
        del given[key]
    for key in given:
        if key not in served:
            like = nearest(key, served)
            what = refused.get(key) or (f"Did you mean {like}?" if like else "The key is unknown.")
            raise Refusal(f"{key} is not served. {what} To take it without effect, list it in ignored.", param=key)
    return given, dropped


def one_of(given: Mapping[str, Any], key: str, allowed: Sequence[Any], why: str = "") -> None:
    """Refuse a key whose value is not allowed; the first of `allowed` is its default."""
    if given.get(key, allowed[0]) not in allowed:
        shown = " or ".join(json.dumps(value) for value in allowed)
        raise Refusal(f"{key} must be {shown}, not {json.dumps(given[key])}. {why}", param=key)


def objects(given: Mapping[str, Any], key: str) -> list[Any]:
    """Return a list of objects of a request.

    Raises:
        Refusal: The value is something else.
    """
    value = given.get(key, [])
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise Refusal(f"{key} must be a list of objects.", param=key)
    return value


def _sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters of a request, by our names."""
    sampling = {name: given[key] for key, name in _SAMPLING.items() if key in given}
    if bias := given.get("logit_bias"):
        sampling["extra"] = {"logit_bias": bias}
    form = given.get("response_format", {"type": "text"})
    if form["type"] not in ("text", "json_object", "json_schema"):
        raise Refusal("response_format must be of type text, json_object or json_schema.", param="response_format")
    if form["type"] != "text":
        sampling["grammar"] = json_grammar(form.get("json_schema", {}).get("schema", {"type": "object"}))
    return sampling


def json_grammar(schema: Any) -> dict[str, str]:
    """Return the grammar of an answer that is JSON of a schema.

    Raises:
        Refusal: The schema is not an object.
    """
    if not isinstance(schema, dict):
        raise Refusal(f"A JSON Schema must be an object, not {json.dumps(schema)}.")
    return {"kind": "json_schema", "value": json.dumps(schema)}


def tool_choice(choice: Any) -> tuple[ToolChoice | None, bool]:
    """Return Strands' tool choice, and whether calls are calls."""
    if choice in ("auto", "none"):
        return None, choice == "auto"
    if choice == "required":
        return cast(ToolChoice, {"any": {}}), True
    function = choice.get("function", choice) if isinstance(choice, dict) and choice.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refusal("tool_choice must be auto, none, required or a function.", param="tool_choice")
    return cast(ToolChoice, {"tool": {"name": function["name"]}}), True


def _tool(tool: Mapping[str, Any], where: str) -> ToolSpec:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise Refusal(f"{where} must be of type function.", param=where)
    return function_spec(function)


def function_spec(function: Mapping[str, Any]) -> ToolSpec:
    """Return a function in Strands' form. What is wrong with it is refused by the turn."""
    return {
        "name": cast(str, function.get("name")),
        "description": function.get("description") or "",
        "inputSchema": {"json": function.get("parameters") or {"type": "object", "properties": {}}},
    }


def _history(given: list[Any]) -> tuple[str | None, Messages]:
    """Return the system prompt and Strands' messages. Results, and the user's text after them, are one message."""
    system: list[str] = []
    messages: list[Any] = []
    for i, message in enumerate(given):
        try:
            _append(message, system, messages)
        except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
            why = str(error) if type(error) is ValueError else repr(error)
            raise Refusal(f"messages[{i}] is not served: {why}", param=f"messages[{i}]") from None
    return "\n".join(system) or None, messages


def _append(message: Mapping[str, Any], system: list[str], messages: list[Any]) -> None:
    role, content = message["role"], message.get("content")
    if role in ("system", "developer"):
        if messages:
            raise ValueError(f"A {role} message must come before all others.")
        system += [block["text"] for block in _blocks(content)]
    elif role == "assistant":
        messages.append(as_stored({"role": "assistant", "content": _answer(message)}))
    elif role in ("user", "tool"):
        blocks = _blocks(content, images=True)
        if role == "tool":
            blocks = [{"toolResult": {"toolUseId": message["tool_call_id"], "status": "success", "content": blocks}}]
        last = messages[-1]["content"] if messages and messages[-1]["role"] == "user" else []
        if last and "toolResult" in last[-1]:
            last += blocks
        else:
            messages.append({"role": "user", "content": blocks})
    else:
        raise ValueError(f"Unknown role {role!r}.")


def _answer(message: Mapping[str, Any]) -> list[Any]:
    for key in ("audio", "function_call", "refusal"):
        if message.get(key):
            raise ValueError(f"Use content and tool_calls in place of {key}.")
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    blocks: list[Any] = [{"reasoningContent": {"reasoningText": {"text": reasoning}}}] if reasoning else []
    blocks += [block for block in _blocks(message.get("content") or []) if block["text"] != ""]
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = json.loads(function["arguments"] or "{}")
        blocks.append({"toolUse": {"toolUseId": call["id"], "name": function["name"], "input": arguments}})
    return blocks


def _blocks(content: Any, images: bool = False) -> list[Any]:
    if not isinstance(content, str | list):
        raise ValueError("content must be a string or a list of parts.")
    return [{"text": content}] if isinstance(content, str) else [_block(part, images) for part in content]


def _block(part: Any, images: bool) -> dict[str, Any]:
    kind = part["type"]
    if kind in ("text", "refusal") and isinstance(part[kind], str):
        return {"text": part[kind]}
    if kind != "image_url" or not images:
        raise ValueError(f"A part of type {kind!r} cannot stand here, or has no text.")
    return image_block(part["image_url"]["url"])


def image_block(url: str) -> dict[str, Any]:
    """Return an image in Strands' form.

    Raises:
        ValueError: The URL is not the image itself.
    """
    head, _, data = url.partition(";base64,")
    if not head.startswith("data:image/"):
        raise ValueError("Send the image itself, as data:image/png;base64,... .")
    return {"image": {"format": head[11:], "source": {"bytes": base64.b64decode(data, validate=True)}}}


class Answer:
    """A turn's events as a chat completion, whole or in chunks.

    Args:
        turn: The request.
        identity: The id of the completion.
        token_text: Returns the text of a token id, for logprobs.
    """

    def __init__(self, turn: ChatTurn, identity: str, token_text: Callable[[int], str]) -> None:
        self._turn, self._token_text = turn, token_text
        self._fields = {"id": identity, "created": int(time.time()), "model": turn.model}
        self._finish: str | None = None
        self._logprobs: dict[str, Any] | None = None
        self._usage: dict[str, Any] | None = None
        self._calls = 0

    async def whole(self, events: AsyncGenerator[StreamEvent | None]) -> bytes:
        """Return the answer in one piece, when the turn is committed."""
        texts: dict[str, str] = {}
        calls: list[dict[str, Any]] = []
        async for event in events:
            for delta in self._deltas(event or {}):
                calls += delta.pop("tool_calls", ())
                for key, text in delta.items():
                    texts[key] = texts.get(key, "") + text
        content = texts.pop("content", None)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None, **texts}
        if calls:
            message["tool_calls"] = [{key: call[key] for key in ("id", "type", "function")} for call in calls]
        choice = {"index": 0, "message": message, "logprobs": self._logprobs, "finish_reason": self._finish}
        return msgspec.json.encode(
            {**self._fields, "object": "chat.completion", "choices": [choice], "usage": self._usage}
        )

    async def chunks(self, events: AsyncGenerator[StreamEvent | None]) -> AsyncGenerator[bytes]:
        """Yield the answer in chunks; see `in_order`."""
        yield self._chunk({"role": "assistant", "content": ""})
        async for line in in_order(events, b": waiting\n\n", lambda event: map(self._chunk, self._deltas(event))):
            yield line
        yield self._chunk({}, self._finish)
        if self._turn.usage:
            yield self._line({"choices": [], "usage": self._usage})
        yield b"data: [DONE]\n\n"

    def _deltas(self, event: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield what an event adds to the message, and keep what it says about the answer."""
        if "contentBlockStart" in event:
            if use := event["contentBlockStart"]["start"].get("toolUse"):
                self._call = {"index": self._calls, "id": use["toolUseId"], "type": "function"}
                self._name = use["name"]
                self._calls += 1
        elif "contentBlockDelta" in event:
            delta = event["contentBlockDelta"]["delta"]
            if "toolUse" in delta:
                function = {"name": self._name, "arguments": delta["toolUse"]["input"]}
                yield {"tool_calls": [{**self._call, "function": function}]}
            elif "reasoningContent" in delta:
                yield {"reasoning_content": delta["reasoningContent"]["text"]}
            else:
                yield {"content": delta["text"]}
        elif "messageStop" in event:
            self._finish = _FINISH[event["messageStop"]["stopReason"]]
            if fields := event["messageStop"].get("additionalModelResponseFields"):
                self._logprobs = {"content": list(map(self._logprob, fields["token_ids"], fields["logprobs"]))}
        elif "metadata" in event:
            self._usage = _usage(event["metadata"]["usage"])

    def _logprob(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._token_text(token)
        written = None if "\ufffd" in text else list(text.encode())  # a part of a character has no text
        return {"token": text, "logprob": logprob, "bytes": written, "top_logprobs": []}

    def _chunk(self, delta: Mapping[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        if finish is not None and self._logprobs is not None:
            choice["logprobs"] = self._logprobs
        return self._line({"choices": [choice]})

    def _line(self, value: Mapping[str, Any]) -> bytes:
        chunk = {**self._fields, "object": "chat.completion.chunk", **value}
        return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def _usage(usage: Mapping[str, int]) -> dict[str, Any]:
    counts: dict[str, Any] = {
        "prompt_tokens": usage["inputTokens"],
        "completion_tokens": usage["outputTokens"],
        "total_tokens": usage["totalTokens"],
    }
    if "cacheReadInputTokens" in usage:  # not every server says it
        counts["prompt_tokens_details"] = {"cached_tokens": usage["cacheReadInputTokens"]}
    return counts
