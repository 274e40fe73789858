"""The chat route of a scripted engine that has a tokenizer, modelled on recordings of vLLM 0.32.0.

    engine = scripted_engine("vllm", script, ...)
    engine.wire = ChatWire(engine.wire, tokenizer)

Messages are rendered by the tokenizer's chat template, and calls are read in Hermes' form, as with
`--tool-call-parser hermes`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tito_conformance.testing.engine import completion_text, deltas
from tito_conformance.testing.script import Settled
from tito_conformance.testing.vllm_answers import FINGERPRINT, stop_reason, usage_of
from tito_conformance.testing.vllm_requests import bad_value
from tito_conformance.testing.wire import (
    Answer,
    EngineState,
    Generation,
    Wire,
    WireResponse,
    json_response,
    now,
    random_id,
    scripted_request,
    sse_response,
)

UNUSED = (
    *("service_tier", "prompt_logprobs", "prompt_text"),
    *("kv_transfer_params", "ec_transfer_params", "metrics"),
)
UNUSED_OF_MESSAGE = ("refusal", "annotations", "audio", "function_call", "reasoning")
CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


class ChatWire:
    """A scripted engine's wire with the route `/v1/chat/completions` of vLLM, which renders and encodes messages."""

    def __init__(self, wire: Wire, tokenizer: Any) -> None:
        self.name = wire.name
        self.state: EngineState = wire.state
        self._wire = wire
        self._tokenizer = tokenizer
        self.script_error = wire.script_error
        self.queue_full = wire.queue_full

    def route(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """See `tito_conformance.testing.Wire.route`."""
        if path == "/v1/chat/completions" and method == "POST":
            return self._chat(json.loads(body), headers)
        if path == "/v1/completions" and isinstance(text := (json.loads(body) if body else {}).get("prompt"), str):
            return self._text(json.loads(body), self._tokenizer.encode(text), headers)
        answer = self._wire.route(method, path, headers, body)
        if isinstance(answer, Generation) and path.startswith("/inference/") and self.state.release < "0.32":
            return replace(answer, render=lambda answers, seconds: _named(answer.render(answers, seconds)))
        return answer

    def _text(self, body: dict[str, Any], prompt: Sequence[int], headers: Mapping[str, str]) -> Answer:
        """Complete a text, with text alone, as clients do that look whether an engine is alive."""
        one = scripted_request(
            self.state, body, body, prompt, wire="chat", max_new_tokens=body.get("max_tokens") or 16,
            server_id=random_id(16), path="/v1/completions", headers=headers,
        )  # fmt: skip

        def render(answers: Sequence[Settled], seconds: float) -> WireResponse:
            made = {
                "index": 0,
                "text": completion_text(self.state, answers[0], body),
                "finish_reason": answers[0].finish,
            }
            usage = usage_of(self.state, body, answers[0], False)
            head = {"id": f"cmpl-{random_id(16)}", "object": "text_completion", "created": now()}
            return json_response({**head, "model": self.state.model, "choices": [made], "usage": usage})

        return Generation([one], render)

    def _chat(self, body: dict[str, Any], headers: Mapping[str, str]) -> Answer:
        state = self.state
        prompt = self._tokenizer.apply_chat_template(
            [_plain(message) for message in body["messages"]],
            tools=body.get("tools"),
            add_generation_prompt=True,
            return_dict=False,
        )
        room = state.max_model_len - len(prompt)
        if room < 1:
            beyond = state.max_model_len + 1  # the server stops to count there
            message = (
                f"This model's maximum context length is {beyond - 1} tokens. However, your prompt contains at least "
                f"{beyond} input tokens, which exceeds this limit even without any output tokens. Please reduce the "
                "length of the input prompt."
            )
            return bad_value(message, "input_tokens", beyond)
        asked = body.get("max_completion_tokens") or body.get("max_tokens") or room
        one = scripted_request(
            state, body, body, prompt, wire="chat", max_new_tokens=min(asked, room), server_id=random_id(16),
            path="/v1/chat/completions", headers=headers, seed=body.get("seed"),
        )  # fmt: skip
        count = body.get("n") or 1
        return Generation([one] * count, ChatAnswer(state, body), bool(body.get("stream")))


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as vLLM hands it to a template: content as text, arguments as values."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "\n".join(part.get("text", "") for part in content)
    made = {**message, "content": content}
    if calls := message.get("tool_calls"):
        made["tool_calls"] = [{**each, "function": _decoded(each["function"])} for each in calls]
    return made


def _decoded(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    return {**function, "arguments": json.loads(arguments) if isinstance(arguments, str) else arguments}


def _named(response: WireResponse) -> WireResponse:
    """Return an answer as vLLM up to 0.31 gives it: each logprob names its token as `token_id:N`."""
    if response.status != 200 or not isinstance(response.body, bytes):
        return response
    answer = json.loads(response.body)
    for choice in answer["choices"]:
        for entry in (choice.get("logprobs") or {}).get("content") or ():
            entry["token"] = f"token_id:{entry['token_id']}"
    return json_response(answer)


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """Renders `/v1/chat/completions` of vLLM 0.32 with the tool parser `hermes`, whole and streamed."""

    state: EngineState
    body: Mapping[str, Any]

    def __call__(self, answers: Sequence[Settled], seconds: float) -> WireResponse:
        """Return the response: a choice for each answer."""
        head = {"id": f"chatcmpl-{random_id(16)}", "created": now(), "model": self.body.get("model")}
        usage = usage_of(self.state, self.body, answers[0], False)
        usage["completion_tokens"] = sum(len(answer.output_ids) for answer in answers)
        usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
        prompt = list(answers[0].request.prompt_ids) if self.body.get("return_token_ids") else None
        if not self.body.get("stream"):
            choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
            whole = {"object": "chat.completion", "choices": choices, "usage": usage, "prompt_token_ids": prompt}
            return json_response({**head, **whole, "system_fingerprint": FINGERPRINT, **dict.fromkeys(UNUSED)})
        head["object"] = "chat.completion.chunk"
        start: dict[str, Any] = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        events = [{**head, "choices": [{"index": 0, **start}], "prompt_token_ids": prompt, "prompt_text": None}]
        events += [{**head, "choices": [each]} for each in self._deltas(answers[0])]
        if (self.body.get("stream_options") or {}).get("include_usage"):
            events.append({**head, "choices": [], "usage": usage})
        return sse_response(events)

    def _parsed(self, answer: Settled) -> tuple[str | None, list[dict[str, Any]]]:
        text = completion_text(self.state, answer, self.body)
        calls = [json.loads(found) for found in CALL.findall(text)] if self.body.get("tools") else []
        made = [
            {"name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)} for call in calls
        ]
        return (None if calls else text), [
            {"id": f"chatcmpl-tool-{random_id(16)}", "type": "function", "function": function} for function in made
        ]

    def _choice(self, index: int, answer: Settled) -> dict[str, Any]:
        content, calls = self._parsed(answer)
        message = {"role": "assistant", "content": content, **dict.fromkeys(UNUSED_OF_MESSAGE)}
        made = {"message": {**message, **({"tool_calls": calls} if calls else {})}, "routed_experts": None}
        return {"index": index, **made, **self._end(answer), **self._columns(answer, 0, len(answer.output_ids))}

    def _end(self, answer: Settled) -> dict[str, Any]:
        called = answer.finish == "stop" and bool(self._parsed(answer)[1])
        return {"finish_reason": "tool_calls" if called else answer.finish, "stop_reason": stop_reason(answer)}

    def _columns(self, answer: Settled, start: int, end: int) -> dict[str, Any]:
        named = self.body.get("return_tokens_as_token_ids")
        pairs = list(zip(answer.output_ids, answer.logprobs, strict=True))[start:end]
        texts = [f"token_id:{token}" if named else self.state.piece(token) for token, _ in pairs]
        rest: dict[str, Any] = {"bytes": None, "top_logprobs": []}
        content = [{"token": text, "logprob": pair[1], **rest} for text, pair in zip(texts, pairs, strict=True)]
        columns: dict[str, Any] = {"logprobs": {"content": content} if self.body.get("logprobs") else None}
        return {**columns, "token_ids": [token for token, _ in pairs]} if self.body.get("return_token_ids") else columns

    def _deltas(self, answer: Settled) -> Iterator[dict[str, Any]]:
        """Yield one choice for each token. A call begins with its opening tag, and has its arguments at the other."""
        _, calls = self._parsed(answer)
        texts, total, shown = deltas(self.state, answer, self.body), len(answer.output_ids), 0
        for n, (token, text) in enumerate(zip(answer.output_ids, texts, strict=True)):
            delta: dict[str, Any] = {} if calls or not text else {"content": text}
            if calls and (piece := self.state.piece(token)) in ("<tool_call>", "</tool_call>"):
                opens, (name, arguments) = piece == "<tool_call>", calls[shown]["function"].items()
                begun = {**calls[shown], "function": dict([name])}
                part = begun if opens else {"function": dict([arguments])}
                delta = {"content": None, "tool_calls": [{"index": shown, **part}]}
                shown += not opens
            end = self._end(answer) if n == total - 1 else {"finish_reason": None}
            yield {"index": 0, "delta": delta, **end, **self._columns(answer, n, n + 1)}
