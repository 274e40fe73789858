"""A server that gives every request the same answer, on SGLang's and vLLM's wire, with as little CPU as possible.

    python benchmarks/canned_server.py ANSWER.json

It prints its port and runs until its standard input is closed. ANSWER.json holds `output_ids`, `logprobs`, `text`,
`pieces` (the text of each token) and `max_model_len`. Of a request it reads only what the answer depends on: the prompt
ids as text, to echo them on request, the request's id, and the start of prompt logprobs. Its CPU is not measured, but
it must not be slower than a client that keeps a core busy.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_RID = re.compile(rb'"rid": ?"([^"]*)"')
_REQUEST_ID = re.compile(rb"x-request-id: *(\S+)", re.IGNORECASE)
_FROM = re.compile(rb'"logprob_start_len": ?(-?\d+)')
_IDS = re.compile(rb'"(?:input_ids|token_ids|prompt)": ?\[')
_LIMIT = re.compile(rb'"max_(?:new_)?tokens": ?(\d+)')
_REFUSAL = b'{"error":{"message":"logit_bias must has keys in [0, %d], got 2147483647."}}'


@dataclass(frozen=True)
class AnswerParts:
    """The first tokens of the answer, in the format of each wire."""

    count: int
    ids: bytes
    text: bytes
    entries: bytes
    content: bytes
    finish: bytes
    stop: bytes


class Answers:
    """The response bodies, made from one answer."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self.answer = answer
        model = {"id": "canned", "object": "model", "max_model_len": answer["max_model_len"]}
        self.models = _json({"object": "list", "data": [model]})
        self.chat = self._chat()
        self.whole = self._truncated(len(answer["output_ids"]))

    def parts(self, body: bytes) -> AnswerParts:
        """Return the whole answer, or its first `max_new_tokens` tokens."""
        limit = _LIMIT.search(body)
        limited = int(limit[1]) if limit else self.whole.count
        return self.whole if limited >= self.whole.count else self._truncated(limited)

    def _truncated(self, count: int) -> AnswerParts:
        ids, logprobs = self.answer["output_ids"][:count], self.answer["logprobs"][:count]
        whole = count == len(self.answer["output_ids"])
        return AnswerParts(
            count,
            _json(ids),
            _json(self.answer["text"] if whole else "".join(self.answer["pieces"][:count])),
            _json([[logprob, token, None] for token, logprob in zip(ids, logprobs, strict=True)]),
            _json(
                [
                    {"token_id": token, "logprob": logprob, "rank": 1, "top_logprobs": []}
                    for token, logprob in zip(ids, logprobs, strict=True)
                ]
            ),
            b"stop" if whole else b"length",
            b'"matched":%d' % ids[-1] if whole else b'"length":%d' % count,
        )

    def sglang(self, body: bytes) -> bytes:
        """Answer `/generate`."""
        ids, parts = _ids(body), self.parts(body)
        prompt, rid, prompt_start = ids.count(b",") + 1, _RID.search(body), _FROM.search(body)
        start = int(prompt_start[1]) if prompt_start else -1
        scored = b'"input_token_logprobs":%b,' % scores(ids, start) if 0 <= start < prompt else b""
        echo = b',"prompt_token_ids":[%b]' % ids if b'"return_prompt_token_ids":true' in body else b""
        return (
            b'{"text":%b,"output_ids":%b,"meta_info":{"id":"%b","finish_reason":{"type":"%b",%b},'
            b'"prompt_tokens":%d,"weight_version":"default","num_retractions":0,"reasoning_tokens":0,%b'
            b'"output_token_logprobs":%b,"completion_tokens":%d,"cached_tokens":%d,'
            b'"weight_versions":[{"version":"default","start":0,"end":%d}],"dp_rank":null,"e2e_latency":0.01}%b}'
        ) % (
            parts.text,
            parts.ids,
            rid[1] if rid else b"none",
            parts.finish,
            parts.stop,
            prompt,
            scored,
            parts.entries,
            parts.count,
            prompt - 1,
            parts.count,
            echo,
        )

    def vllm(self, head: bytes, body: bytes) -> bytes:
        """Answer `/inference/v1/generate`."""
        name = _REQUEST_ID.search(head)
        ids, parts = _ids(body), self.parts(body)
        prompt = ids.count(b",") + 1
        echo = b"[%b]" % ids if b'"return_token_ids":true' in body else b"null"
        return (
            b'{"request_id":"generate-tokens-%b","model":"canned","created":1,"usage":{"prompt_tokens":%d,'
            b'"total_tokens":%d,"completion_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}},'
            b'"prompt_logprobs":null,"prompt_token_ids":%b,"choices":[{"index":0,"finish_reason":"%b",'
            b'"stop_reason":null,"token_ids":%b,"routed_experts":null,"sampling_mask":null,'
            b'"weight_versions":[{"version":"default","start":0,"end":%d}],"logprobs":{"content":%b}}]}'
        ) % (
            name[1] if name else b"x",
            prompt,
            prompt + parts.count,
            parts.count,
            prompt - 1,
            echo,
            parts.finish,
            parts.ids,
            parts.count,
            parts.content,
        )

    def scored(self, head: bytes, body: bytes) -> bytes:
        """Answer `/v1/completions` to a request for prompt logprobs."""
        tokens = json.loads(b"[%b]" % _ids(body))
        choice = {"finish_reason": "length", "prompt_logprobs": [None, *({t: {"logprob": -1.25}} for t in tokens[1:])]}
        name = _REQUEST_ID.search(head)
        usage = {"prompt_tokens": len(tokens), "completion_tokens": 1}
        return _json({"id": f"cmpl-{name[1].decode() if name else 'x'}", "choices": [choice], "usage": usage})

    def _chat(self) -> bytes:
        """Answer `/v1/chat/completions` with one event per token."""
        common = {"id": "chatcmpl-x", "object": "chat.completion.chunk", "created": 1, "model": "canned"}
        events: list[Any] = []
        for number, (token, piece) in enumerate(zip(self.answer["output_ids"], self.answer["pieces"], strict=True)):
            last = number == len(self.answer["output_ids"]) - 1
            choice = {
                "index": 0,
                "delta": {"content": piece},
                "logprobs": None,
                "finish_reason": "stop" if last else None,
                "token_ids": [token],
            }
            events.append({**common, "choices": [choice]})
        count = len(self.answer["output_ids"])
        usage = {"prompt_tokens": 1, "completion_tokens": count, "total_tokens": count + 1}
        events.append({**common, "choices": [], "usage": usage})
        lines = [b"data: %b\n\n" % _json(event) for event in events]
        return b"".join([*lines, b"data: [DONE]\n\n"])


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _ids(body: bytes) -> bytes:
    found = _IDS.search(body)
    if found is None:
        return b""
    return body[found.end() : body.index(b"]", found.end())].replace(b" ", b"")


@lru_cache(maxsize=64)
def scores(ids: bytes, start: int) -> bytes:
    """Return prompt logprobs from an offset on, in SGLang's format."""
    entries: list[Any] = [[-1.25, int(token), None] for token in ids.split(b",")[start:]]
    entries[0][0] = None
    return _json(entries)


class Connection(asyncio.Protocol):
    """One connection: requests with a known length, answered one after the other."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.received = bytearray()
        self.needed = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        self.transport: Any = transport

    def data_received(self, data: bytes) -> None:
        """Answer every complete request."""
        self.received += data
        while len(self.received) >= max(self.needed, 1):
            end = self.received.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(self.received[:end])
            length = _LENGTH.search(head)
            self.needed = end + 4 + (int(length[1]) if length else 0)
            if len(self.received) < self.needed:
                return
            body = bytes(self.received[end + 4 : self.needed])
            del self.received[: self.needed]
            self.needed = 0
            status, kind, answer = self._answer(head, body)
            self.transport.write(
                b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (status, kind, len(answer), answer)
            )

    def _answer(self, head: bytes, body: bytes) -> tuple[bytes, bytes, bytes]:
        ok, plain = b"200 OK", b"application/json"
        match head.split(b" ", 2)[1].decode():
            case "/generate" if b'"2147483647"' in body:
                return b"400 Bad Request", plain, _REFUSAL % (2**20)
            case "/generate":
                return ok, plain, self.answers.sglang(body)
            case "/inference/v1/generate" if b'"token_ids":[]' in body:
                return b"400 Bad Request", plain, b'{"error":{"message":"empty"}}'
            case "/inference/v1/generate":
                return ok, plain, self.answers.vllm(head, body)
            case "/v1/completions":
                return ok, plain, self.answers.scored(head, body)
            case "/v1/chat/completions":
                return ok, b"text/event-stream; charset=utf-8", self.answers.chat
            case "/v1/models":
                return ok, plain, self.answers.models
            case "/v1/loads":
                return ok, plain, b'{"version":"0.5.23","loads":[]}'
            case "/version":
                return ok, plain, b'{"version":"0.32.0"}'
            case "/model_info":
                return ok, plain, b'{"weight_version":"default","has_image_understanding":false}'
            case _:
                return b"404 Not Found", plain, b'{"detail":"Not Found"}'


async def main(answers: Answers) -> None:
    """Serve until standard input is closed."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(answers), "127.0.0.1", 0, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()


if __name__ == "__main__":
    asyncio.run(main(Answers(json.loads(Path(sys.argv[1]).read_text()))))
