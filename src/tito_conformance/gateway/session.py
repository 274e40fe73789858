"""The harness: one session with a gateway, its requests and its answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from tito_conformance.gateway.dialects import DIALECTS, MISSHAPEN, Answer, Dialect

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": text,
            "parameters": {"type": "object", "properties": {key: {"type": "string"}}, "required": [key]},
        },
    }
    for name, text, key in (("lookup", "Look a thing up.", "q"), ("weigh", "Weigh a thing.", "item"))
]
SYSTEM = {"role": "system", "content": "Be brief."}
RETRY = {"x-stainless-retry-count": "1"}
"""What the `openai` and `anthropic` clients send with a request that they send again."""
TIMEOUT_S = 60.0
"""Seconds that an answer may take; gateways ask a broken engine again for up to half a minute."""


class NotApplicable(Exception):
    """The wire has no such thing."""


class Failed(Exception):
    """The gateway did not do what a check expects. The message has the values."""


class Unanswered(Failed):
    """A request that every gateway must serve got no answer, or an error; `status` is 0 without one."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer of the gateway.

    Attributes:
        status: HTTP status.
        message: The assistant's message; of a stream, put together from its deltas. Empty for an error.
        finish: The finish reason.
        usage: The reported usage.
        raw: The body as text.
        choices: Number of choices.
    """

    status: int
    message: Mapping[str, Any] = field(default_factory=dict)
    finish: str | None = None
    usage: Mapping[str, Any] | None = None
    raw: str = ""
    choices: int = 1

    @property
    def calls(self) -> list[tuple[str, Any]]:
        """Name and decoded arguments of each tool call."""
        made = [call["function"] for call in self.message.get("tool_calls") or ()]
        return [(function["name"], json.loads(function["arguments"])) for function in made]

    @property
    def call_ids(self) -> list[str]:
        """Ids of the tool calls."""
        return [call["id"] for call in self.message.get("tool_calls") or ()]

    @property
    def text(self) -> str:
        """The text of the message."""
        return self.message.get("content") or ""

    @property
    def error(self) -> Mapping[str, Any]:
        """The error object of the body, empty if it has none."""
        try:
            error = json.loads(self.raw).get("error")
        except (ValueError, AttributeError):
            return {}
        return error if isinstance(error, dict) else {}

    def expect_ok(self) -> Reply:
        """Return the same reply.

        Raises:
            Unanswered: It is an error.
        """
        if self.status != 200:
            raise Unanswered(f"the gateway answered {self.status}: {self.raw[:300]}", self.status)
        return self


@dataclass(slots=True)
class Session:
    """A session of a gateway, as a harness uses it.

    Attributes:
        name: The session's name, as the adapter knows it.
        nonce: A word of the first user message, by which the engine's log knows this session.
        base_url: What comes before the dialect's path.
        messages: The conversation so far, in chat form.
        dialect: What the harness speaks.
    """

    name: str
    nonce: str
    base_url: str
    headers: Mapping[str, str]
    model: str
    http: aiohttp.ClientSession
    tools: bool = True
    messages: list[dict[str, Any]] = field(default_factory=list)
    dialect: Dialect = DIALECTS["chat"]

    def user(self, text: str) -> dict[str, Any]:
        """Return a user message; the first of a conversation has the nonce."""
        first = not any(message["role"] == "user" for message in self.messages)
        return {"role": "user", "content": f"Note {self.nonce}. {text}" if first else text}

    async def say(self, text: str, **more: Any) -> Reply:
        """Add a user message and the gateway's answer to the conversation."""
        self.messages = self.messages or [SYSTEM]
        self.messages.append(self.user(text))
        return await self._go_on(more)

    async def results(self, results: Sequence[tuple[str, str]], **more: Any) -> Reply:
        """Add (call id, text) of tool results and the gateway's answer to the conversation."""
        self.messages += [{"role": "tool", "tool_call_id": own, "content": text} for own, text in results]
        return await self._go_on(more)

    async def _go_on(self, more: Mapping[str, Any]) -> Reply:
        reply = (await self.send(self.messages, **more)).expect_ok()
        self.messages.append(dict(reply.message))
        return reply

    def body(self, messages: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
        """Return a request's body on the wire."""
        given: dict[str, Any] = {"model": self.model, "messages": list(messages), "max_tokens": 256, "temperature": 1.0}
        if self.tools:
            given["tools"] = TOOLS
        if more.get("stream"):
            given["stream_options"] = {"include_usage": True}
        return self.dialect.body({name: value for name, value in {**given, **more}.items() if value is not None})

    async def send(
        self, messages: Sequence[Mapping[str, Any]], *, headers: Mapping[str, str] | None = None, **more: Any
    ) -> Reply:
        """Send a conversation, and return the answer."""
        body, timeout = self.body(messages, **more), aiohttp.ClientTimeout(TIMEOUT_S)
        url, sent = self.base_url + self.dialect.path, {**self.headers, **(headers or {})}
        try:
            async with self.http.post(url, json=body, headers=sent, timeout=timeout) as response:
                raw = await response.text()
        except (TimeoutError, aiohttp.ClientError) as error:
            raise Unanswered(f"no answer from {url}: {error!r}") from error
        return _read(self.dialect, response.status, raw, bool(more.get("stream")))

    async def leave(
        self, messages: Sequence[Mapping[str, Any]], seen: asyncio.Event | None = None, **more: Any
    ) -> None:
        """Send a conversation, and break the connection once `seen` is set, or else at the answer's first byte."""
        url = urlsplit(self.base_url)
        body = json.dumps(self.body(messages, **more)).encode()
        fields = {**self.headers, "Host": url.netloc, "Content-Type": "application/json", "Content-Length": len(body)}
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        writer.write(f"POST {url.path}{self.dialect.path} HTTP/1.1\r\n{head}\r\n".encode() + body)
        try:
            await asyncio.wait_for(reader.read(1) if seen is None else seen.wait(), TIMEOUT_S)
        except (OSError, TimeoutError) as error:
            raise Unanswered(f"no answer from {self.base_url}: {error!r}") from error
        writer.transport.abort()


def _read(dialect: Dialect, status: int, raw: str, stream: bool) -> Reply:
    if status != 200:
        return Reply(status, raw=raw)
    try:
        answer = dialect.streamed(raw) if stream else dialect.whole(json.loads(raw))
        _check_types(answer)
    except MISSHAPEN as error:
        raise Unanswered(f"the answer does not have the form of {dialect.name} ({error!r}): {raw[:300]}") from error
    return Reply(200, answer.message, answer.finish, answer.usage, raw, answer.choices)


def _check_types(answer: Answer) -> None:
    """Check what the checks rely on, so that a strange answer fails one of them, and does not end the run."""
    content, usage = answer.message["content"], answer.usage
    if not isinstance(content, str | None) or not isinstance(usage, Mapping | None):
        raise ValueError(f"content {content!r}, usage {usage!r}")
    for call in answer.message.get("tool_calls") or ():
        function = call["function"]
        if not all(isinstance(each, str) for each in (call["id"], function["name"])):
            raise ValueError(f"a call has the id {call['id']!r} and the name {function['name']!r}")
        json.loads(function["arguments"])
