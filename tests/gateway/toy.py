"""A small sound gateway, and what can be wrong with one: `Toy(engine, tokenizer, defect)`.

It speaks chat completions, and by `toy_wires` messages and responses. It renders ChatML itself, sends vLLM's
`/inference/v1/generate` the recorded ids again, and keeps a session as a list of turns. Each
switch of `DEFECTS` makes one thing wrong.
"""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from gateway import toy_wires

CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
SAMPLING = ("temperature", "top_p", "seed", "stop", "presence_penalty", "frequency_penalty", "logit_bias", "max_tokens")
KNOWN = {*SAMPLING, "model", "messages", "tools", "stream", "stream_options"}
DEFECTS = {
    "render again": "prefix",
    "closer doubled": "prefix",
    "cut turn rendered": "prefix_after_a_truncated_turn",
    "prompt retokenized": "alignment",
    "ids by call id": "prefix_under_new_call_ids",
    "arguments as text": "prefix_under_other_json_spacing",
    "mask early": "alignment",
    "mask late": "alignment",
    "logprobs shifted": "alignment",
    "logprobs short": "alignment",
    "stop dropped": "alignment",
    "zero logprob": "missing_logprobs",
    "short logprobs": "missing_logprobs",
    "unreported token lost": "missing_logprobs",
    "trained twice": "exactly_once",
    "last row only": "exactly_once",
    "edits overwrite": "branches",
    "calls reordered": "parallel_calls",
    "call ids equal": "parallel_calls",
    "arguments cut": "parallel_calls",
    "closer trained": "truncated_turn",
    "cut call repaired": "truncated_turn",
    "cut is stop": "truncated_turn",
    "no retries": "retry_after_a_lost_answer",
    "no joining": "retry_while_the_first_runs",
    "siblings merged": "resampling",
    "siblings replaced": "resampling",
    "abandoned is kept": "disconnect",
    "abandoned goes on": "disconnect",
    "crossed sessions": "equal_prompts_in_two_sessions",
    "equal prompts merged": "equal_prompts_in_two_sessions",
    "one at a time": "prompts_at_once_in_one_session",
    "stream loses text": "stream_equals_plain",
    "stream encodes again": "stream_equals_plain",
    "stream says stop": "stream_equals_plain",
    "usage in characters": "usage",
    "usage without prompt": "usage",
    "usage missing": "usage",
    "content as control": "control_words_stay_text",
    "content stripped": "control_words_stay_text",
    "results as sent": "order_of_tool_results",
    "seed dropped": "parameters",
    "stop dropped silently": "parameters",
    "max_tokens fixed": "parameters",
    "format dropped": "parameters",
    "n ignored": "several_choices",
    "overflow is 500": "context_overflow",
    "overflow without code": "context_overflow",
    "errors are answers": "engine_error",
    "error recorded": "engine_error",
    "abort is stop": "aborted_by_the_engine",
}
"""Each defect, and the check that catches it."""


@dataclass
class Turn:
    messages: list[Any]
    prompt: list[int]
    output: list[int]
    logprobs: list[float]
    finish: str
    closed: bool
    answer: dict[str, Any]
    asked: str

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.output


@dataclass
class Toy:
    engine: str
    tokenizer: Any
    defect: str = ""
    sessions: dict[str, list[Turn]] = field(default_factory=dict)
    running: dict[tuple[str, str], asyncio.Task[Any]] = field(default_factory=dict)
    last: str = ""

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 24)
        for path in ("chat/completions", "messages", "responses"):
            app.router.add_post(f"/sessions/{{name}}/v1/{path}", self.serve)
        app.router.add_get("/sessions/{name}/trajectories", self.export)
        app.cleanup_ctx.append(self._http)
        return app

    async def _http(self, app: web.Application) -> Any:
        async with aiohttp.ClientSession() as self.http:
            yield

    # Messages to ids

    def encode(self, text: str, content: bool = False) -> list[int]:
        if content and self.defect == "content stripped":
            text = re.sub(r"<[^>]*>", "", text)
        inert = content and self.defect != "content as control"
        pieces = re.split(r"(?<=<)", text) if inert else [text]  # no control token is left whole
        return [token for piece in pieces for token in self.tokenizer.encode(piece, add_special_tokens=False)]

    def rendered(self, messages: list[Any], tools: Any) -> list[int]:
        """Return the ids of messages after a closed turn, tool results in their calls' order, and the answer's head."""
        ids: list[int] = []
        for message in self.ordered(messages):
            role, text = message["role"], message.get("content") or ""
            if role == "system" and tools:
                text += f"\n# Tools\n{json.dumps(tools)}"
            if role == "tool":
                role, text = "user", f"Result: {text}"
            ids += self.encode(f"<|im_start|>{role}\n") + self.encode(text, content=role != "assistant")
            for call in message.get("tool_calls") or ():
                made = {"name": call["function"]["name"], "arguments": json.loads(call["function"]["arguments"])}
                ids += self.encode(f"<tool_call>\n{json.dumps(made)}\n</tool_call>")
            ids += self.encode("<|im_end|>\n")
        return ids + self.encode("<|im_start|>assistant\n")

    def ordered(self, messages: list[Any]) -> list[Any]:
        places = [call["id"] for message in messages for call in message.get("tool_calls") or ()]
        if self.defect == "results as sent" or len(places) != len({*places}):
            return messages
        made, results = [], []  # type: list[Any], list[Any]
        for message in [*messages, None]:
            if message is not None and message["role"] == "tool":
                results.append(message)
                continue
            made += sorted(
                results, key=lambda each: places.index(each["tool_call_id"]) if each["tool_call_id"] in places else 0
            )
            made, results = made + ([message] if message else []), []
        return made

    def key(self, messages: list[Any]) -> str:
        """Return what must be equal of two histories: call ids by their place, arguments as values."""
        numbers: dict[str, int] = {}
        kept = []
        for message in messages:
            calls = []
            for call in message.get("tool_calls") or ():
                numbers.setdefault(call["id"], len(numbers))
                text = call["function"]["arguments"]
                value = text if self.defect == "arguments as text" else json.loads(text)
                calls.append([call["function"]["name"], value, call["id"] if self.defect == "ids by call id" else 0])
            own = message.get("tool_call_id")
            kept.append([message["role"], message.get("content") or "", calls, numbers.get(own, own)])
        return json.dumps(kept, sort_keys=True)

    def prompt(self, turns: list[Turn], messages: list[Any], tools: Any) -> list[int]:
        for turn in sorted(turns, key=lambda turn: -len(turn.messages)):
            known = len(turn.messages)
            if self.defect == "cut turn rendered" and turn.finish == "length":
                continue
            if self.defect == "render again" or self.key(messages[:known]) != self.key(turn.messages):
                continue
            closer = [] if turn.closed and self.defect != "closer doubled" else self.encode("<|im_end|>")
            calls = [message for message in messages[:known] if message.get("tool_calls")]
            new = self.ordered([*calls, *messages[known:]])[len(calls) :]
            return turn.ids + closer + self.encode("\n") + self.rendered(new, None)
        return self.rendered(messages, tools)

    # One turn

    async def serve(self, request: web.Request) -> web.StreamResponse:
        wire = request.path.rpartition("/")[2].replace("completions", "chat")
        try:
            try:
                body = toy_wires.to_chat(wire, await request.json(), self.defect)
            except ValueError as error:
                raise http_error(400, str(error), None) from None
            self.refuse(wire, body)
            turn = await self.chat(request, body)
        except web.HTTPException as error:
            found = toy_wires.error(wire, json.loads(str(error.text)), self.defect)
            return web.json_response(found, status=error.status)
        return self.answered(wire, body, turn)

    async def chat(self, request: web.Request, body: dict[str, Any]) -> Turn:
        name = request.match_info["name"]
        if self.defect == "equal prompts merged":
            name = self.key(body["messages"][:2])
            self.sessions[request.match_info["name"]] = self.sessions.setdefault(name, [])
        asked, marked = json.dumps(body, sort_keys=True), "x-stainless-retry-count" in request.headers
        turns = self.sessions.setdefault(name, [])
        self.last = name
        known = next((turn for turn in reversed(turns) if turn.asked == asked), None)
        if known is not None and ((marked and self.defect != "no retries") or self.defect == "siblings merged"):
            return known
        running = self.running.get((name, asked if self.defect != "one at a time" else ""))
        join = marked and self.defect not in ("no joining", "no retries")
        if running is not None and (join or self.defect == "one at a time"):
            joined: Turn = await asyncio.shield(running)
            return joined
        task = asyncio.create_task(self.turn(name, body, asked))
        self.running[name, asked if self.defect != "one at a time" else ""] = task
        try:
            turn = await (asyncio.shield(task) if self.defect.startswith("abandoned") else task)
        finally:
            self.running.pop((name, asked if self.defect != "one at a time" else ""), None)
        if self.defect == "abandoned goes on":
            turns.append(turn)
        return turn

    def refuse(self, wire: str, body: dict[str, Any]) -> None:
        ignored = {"n": "n ignored", "response_format": "format dropped"}
        names = {chat: own for own, chat in toy_wires.NAMES[wire].items()}
        for name in body.keys() - KNOWN:
            if self.defect != ignored.get(name):
                raise http_error(400, f"`{names.get(name, name)}` is not supported.", "unsupported_parameter")

    async def turn(self, name: str, body: dict[str, Any], asked: str) -> Turn:
        turns = self.sessions[name]
        prompt = self.prompt(turns, body["messages"], body.get("tools"))
        sampling = {key: body[key] for key in SAMPLING if key in body} | {"logprobs": 0}
        for key, defect in {
            "seed": "seed dropped",
            "stop": "stop dropped silently",
            "max_tokens": "max_tokens fixed",
        }.items():
            if self.defect == defect:
                sampling.pop(key, None)
        sent = {"token_ids": prompt, "sampling_params": sampling}
        async with self.http.post(f"{self.engine}/inference/v1/generate", json=sent) as response:
            found = await response.json()
        if response.status != 200:
            return self.fail(turns, body, prompt, response.status, found, asked)
        [choice] = found["choices"]
        turn = self.recorded(body, prompt, choice, asked)
        if self.defect == "crossed sessions":
            turns = self.sessions[self.last]
        if self.defect == "siblings replaced":
            turns[:] = [each for each in turns if each.prompt != prompt]
        if self.defect == "edits overwrite":
            turns[:] = [each for each in turns if turn.prompt[: len(each.ids)] == each.ids]
        if self.defect != "abandoned goes on":
            turns.append(turn)
        return turn

    def fail(self, turns: list[Turn], body: Any, prompt: list[int], status: int, found: Any, asked: str) -> Turn:
        overflow = status == 400 and "maximum model length" in found["error"]["message"]
        if self.defect == "errors are answers":
            return Turn([], prompt, [], [], "stop", True, {"role": "assistant", "content": "error"}, "")
        if self.defect == "error recorded":
            turns.append(
                Turn([*body["messages"], {"role": "assistant"}], prompt, prompt[-1:], [-1.0], "stop", True, {}, asked)
            )
        if overflow and self.defect == "overflow is 500":
            raise http_error(500, "Internal Server Error", None)
        if overflow:
            code = None if self.defect == "overflow without code" else "context_length_exceeded"
            raise http_error(400, found["error"]["message"], code)
        raise http_error(502, f"The engine answered {status}.", "engine_error")

    def recorded(self, body: Any, prompt: list[int], choice: Any, asked: str) -> Turn:
        output, finish = choice["token_ids"], choice["finish_reason"]
        content = (choice["logprobs"] or {}).get("content") or []
        logprobs = [entry["logprob"] for entry in content]
        if self.defect == "zero logprob" and not content:
            logprobs = [0.0] * len(output)
        if self.defect == "short logprobs" and content:
            logprobs += [0.0] * (len(output) - len(logprobs))
        if self.defect == "unreported token lost" and logprobs:
            output = output[: len(logprobs)]
        if len(logprobs) != len(output) or (finish == "abort" and self.defect != "abort is stop"):
            raise http_error(502, f"The engine gave {len(output)} ids, {len(logprobs)} logprobs, {finish}.", "engine")
        answer, finish = self.parsed(output, "stop" if finish == "abort" else finish)
        closed = output[-1:] == self.encode("<|im_end|>")
        if self.defect == "stop dropped" and closed:
            output, logprobs, closed = output[:-1], logprobs[:-1], False
        if self.defect == "stream encodes again" and body.get("stream"):
            output = self.encode(self.tokenizer.decode(output))
            logprobs = [-1.0] * len(output)
        return Turn([*body["messages"], answer], prompt, output, logprobs, finish, closed, answer, asked)

    def parsed(self, output: list[int], finish: str) -> tuple[dict[str, Any], str]:
        text = self.tokenizer.decode(output).removesuffix("<|im_end|>")
        if self.defect == "cut call repaired" and finish == "length":
            text = '<tool_call>{"name": "lookup", "arguments": {"q": ""}}</tool_call>'
        made = [json.loads(found) for found in CALL.findall(text)]
        if self.defect == "calls reordered":
            made.reverse()
        if not made:
            return {"role": "assistant", "content": text}, "stop" if self.defect == "cut is stop" else finish
        ids = ["call_0" if self.defect == "call ids equal" else f"call_{id(output)}_{n}" for n in range(len(made))]
        calls = [
            {
                "id": own,
                "type": "function",
                "function": {"name": call["name"], "arguments": self.arguments(call["arguments"])},
            }
            for own, call in zip(ids, made, strict=True)
        ]
        return {"role": "assistant", "content": None, "tool_calls": calls}, "tool_calls" if finish == "stop" else finish

    def arguments(self, given: Any) -> str:
        return json.dumps(given)[: -1 if self.defect == "arguments cut" else None]

    # The answer and the export

    def answered(self, wire: str, body: Any, turn: Turn) -> web.StreamResponse:
        counts = {"prompt_tokens": len(turn.prompt), "completion_tokens": len(turn.output)}
        if self.defect == "usage in characters":
            counts["completion_tokens"] = len(turn.answer.get("content") or "")
        if self.defect == "usage without prompt":
            counts["prompt_tokens"] = 0
        usage = None if self.defect == "usage missing" else {**counts, "total_tokens": sum(counts.values())}
        message, finish, stream = {**turn.answer}, turn.finish, bool(body.get("stream"))
        if stream and self.defect == "stream loses text" and message["content"]:
            message["content"] = message["content"].rpartition(" ")[0]
        if stream and self.defect == "stream says stop":
            finish = "stop"
        if wire != "chat":
            whole, events = toy_wires.answer(wire, message, finish, usage, self.defect)
        else:
            whole, events = completion(message, finish, usage)
        if not stream:
            return web.json_response(whole)
        named = [f"event: {event['type']}\n" if "type" in event else "" for event in events]
        text = "".join(f"{name}data: {json.dumps(event)}\n\n" for name, event in zip(named, events, strict=True))
        return web.Response(
            text=text + ("data: [DONE]\n\n" if wire == "chat" else ""), content_type="text/event-stream"
        )

    async def export(self, request: web.Request) -> web.Response:
        turns = self.sessions.get(request.match_info["name"], [])
        done: set[int] = set()
        rows = []
        leaves = [turn for turn in turns if not any(each is not turn and self.extends(each, turn) for each in turns)]
        for leaf in leaves[-1:] if self.defect == "last row only" else leaves:
            path = sorted([each for each in turns if self.extends(leaf, each)], key=lambda each: len(each.prompt))
            rows.append(self.row(leaf, path, done))
        return web.json_response({"trajectories": rows})

    @staticmethod
    def extends(turn: Turn, other: Turn) -> bool:
        return turn is other or turn.prompt[: len(other.ids)] == other.ids

    def row(self, leaf: Turn, path: list[Turn], done: set[int]) -> dict[str, Any]:
        ids = leaf.ids
        mask, logprobs = [0] * len(ids), [None] * len(ids)  # type: list[int], list[float | None]
        for turn in path:
            start, end = len(turn.prompt), len(turn.ids)
            logprobs[start:end] = turn.logprobs
            if id(turn) not in done or self.defect == "trained twice":
                mask[start:end] = [1] * (end - start)
            if self.defect == "closer trained" and not turn.closed and end < len(ids):
                mask[end], logprobs[end] = 1, -0.5
            done.add(id(turn))
        if self.defect == "mask early":
            mask = [*mask[1:], 1]
        if self.defect == "mask late":
            mask = [0, *mask[:-1]]
        if self.defect == "logprobs shifted":
            logprobs = [*logprobs[1:], None]
        if self.defect == "logprobs short":
            logprobs.pop()
        if self.defect == "prompt retokenized":
            old = len(leaf.prompt)
            ids = self.encode(self.tokenizer.decode(leaf.prompt)) + leaf.output
            new = len(ids) - len(leaf.output)
            mask, logprobs = [0] * new + mask[old:], [None] * new + logprobs[old:]
        return {
            "token_ids": ids,
            "loss_mask": mask,
            "logprobs": [p if m else None for p, m in zip(logprobs, mask, strict=False)],
        }


def completion(message: Any, finish: str, usage: Any) -> tuple[Any, list[Any]]:
    """Return a chat completion, and the chunks of its stream."""
    pieces = re.findall(r"\S+\s*", message.get("content") or "")
    deltas: list[Any] = [{"content": piece} for piece in pieces]
    deltas += [{"tool_calls": [{"index": n, **call}]} for n, call in enumerate(message.get("tool_calls") or ())]
    chunks: list[Any] = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    chunks += [{"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]}, {"choices": [], "usage": usage}]
    return {"choices": [{"index": 0, "message": message, "finish_reason": finish}], "usage": usage}, chunks


def http_error(status: int, message: str, code: str | None) -> web.HTTPException:
    made = web.HTTPBadRequest(text=json.dumps({"error": {"message": message, "code": code}}))
    made.set_status(status)
    return made
