"""A small agent loop that does to a history what Strands does, and what people do to it."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from strands_tito.testing.moves import Ask

Message = dict[str, Any]

TOOLS: list[Any] = [
    {
        "name": "add",
        "description": "Add two numbers.",
        "inputSchema": {
            "json": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            }
        },
    },
    {
        "name": "look_up",
        "description": "Look a word up; kinds are <noun> and [verb].",
        "inputSchema": {
            "json": {
                "type": "object",
                "properties": {"word": {"type": "string", "enum": ["tree", "house"]}, "exact": {"type": "boolean"}},
                "required": ["word"],
            }
        },
    },
]
"""Specs of the tools that the agents have."""
SYSTEMS = ("Be brief.", "You are an exact assistant.\nUse tools.", None)


@dataclass
class Life:
    """One agent: its history, its opening, and its own channel to the model."""

    messages: list[Message] = field(default_factory=list)
    system: str | None = SYSTEMS[0]
    state: dict[str, Any] = field(default_factory=dict)

    def shown(self) -> list[Message]:
        """Return the history as Strands hands it out: a deep copy."""
        return copy.deepcopy(self.messages)

    def history(self) -> list[str]:
        """Return opening and messages as JSON each, in which 1, 1.0 and true differ."""
        return [json.dumps(item, sort_keys=True) for item in (self.system, *self.messages)]

    def pending(self) -> list[Any]:
        """List the calls of the last answer, which no result has met."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            return []
        return uses_of(self.messages[-1])

    def hear(self, text: str, ask: Ask | None = None) -> None:
        """Add what comes before the next answer: results of the calls that wait for them, else the user's words."""
        calls = self.pending()
        if calls:
            results = [_result(call, text, ask or Ask()) for call in calls]
            blocks = results[::-1] if ask is not None and ask.reverse else results
        else:
            blocks = [{"text": text or "?"}]
        if self.messages and self.messages[-1]["role"] == "user":
            self.messages[-1]["content"] += blocks
        else:
            self.messages.append({"role": "user", "content": blocks})

    def uses(self) -> list[Any]:
        """List every call of the history."""
        return [use for message in self.messages for use in uses_of(message)]

    def edit(self, at: int, text: str) -> None:
        """Let a message that has words say others."""
        message = self.messages[at % len(self.messages)]
        if any("text" in block for block in message["content"]):
            message["content"] = [{"text": text} if "text" in block else block for block in message["content"]]

    def drop_first(self, count: int) -> None:
        """Let the oldest messages go, up to a user's own words."""
        del self.messages[:count]
        while self.messages and not _is_words(self.messages[0]):
            del self.messages[0]

    def drop_last(self, count: int) -> None:
        """Let the latest messages go, and a call without results."""
        del self.messages[max(0, len(self.messages) - count) :]
        while self.messages and (self.messages[-1]["role"] == "assistant" and self.pending()):
            del self.messages[-1]


def uses_of(message: Message) -> list[Any]:
    """List the calls of one message."""
    return [block["toolUse"] for block in message["content"] if "toolUse" in block]


def _is_words(message: Message) -> bool:
    return message["role"] == "user" and all("text" in block for block in message["content"])


def _result(call: Any, text: str, ask: Ask) -> Any:
    content: dict[str, list[Any]] = {
        "text": [{"text": text}],
        "json": [{"json": {"value": text, "n": [1, 1.5, True, None]}}],
        "blocks": [{"text": text}, {"text": text[::-1]}],
        "empty": [],
        "error": [{"text": f"Error: {text}"}],
    }
    status = "error" if ask.form == "error" else "success"
    return {"toolResult": {"toolUseId": call["toolUseId"], "status": status, "content": content[ask.form]}}


@dataclass
class Answer:
    """What one call of the model brought: its message, and whether it came to its end."""

    message: Message
    reason: str | None


async def listen(events: AsyncIterator[Any], stop: threading.Event | None = None) -> Answer:
    """Put a stream of events together to the message that Strands would store."""
    blocks: list[Any] = []
    reason, text, use, thought = None, "", None, ""
    async for event in events:
        if "contentBlockStart" in event:
            use = event["contentBlockStart"].get("start", {}).get("toolUse")
            use = None if use is None else {**use, "input": ""}
            text = thought = ""
        elif "contentBlockDelta" in event:
            delta = event["contentBlockDelta"]["delta"]
            text += delta.get("text", "")
            thought += delta.get("reasoningContent", {}).get("text", "")
            if use is not None:
                use["input"] += delta.get("toolUse", {}).get("input", "")
        elif "contentBlockStop" in event:
            blocks.append(_block(use, text, thought))
            use = None
        elif "messageStop" in event:
            reason = event["messageStop"]["stopReason"]
    return Answer({"role": "assistant", "content": blocks}, reason)


def _block(use: Any, text: str, thought: str) -> Any:
    if use is not None:
        return {"toolUse": {**use, "input": json.loads(use["input"] or "{}")}}
    if thought:
        return {"reasoningContent": {"reasoningText": {"text": thought}}}
    return {"text": text}
