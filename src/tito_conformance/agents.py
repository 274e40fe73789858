"""Simulated agents: their histories, tools and inputs, as Strands would have them."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from tito_conformance.checks import refusing
from tito_conformance.testing.moves import Ask, Look
from tito_conformance.testing.pictures import picture

TOOLS: list[Any] = [
    {
        "name": "add",
        "description": "Add two numbers.",
        "inputSchema": {
            "json": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
                "additionalProperties": False,
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
                "additionalProperties": False,
            }
        },
    },
]
"""Specs of the agents' tools. They allow no other arguments, as a forced weak policy would invent more."""
SYSTEM_PROMPTS = ("Be brief.", "You are an exact assistant.\nUse tools.", None)
CLEARED = ("edit", "trim", "summary", "rewind", "retry", "new system prompt or tools")
"""Reasons of a branch after a history was cleared, or an answer without content was dropped."""
Message = dict[str, Any]


@dataclass
class SimulatedAgent:
    """One agent.

    Attributes:
        messages: Its history.
        system: Its system prompt.
        model_state: Its `model_state` of Strands, which the model reads and writes.
        reasons: Reasons for which its next turn may branch: its history was changed since the last one.
    """

    messages: list[Message] = field(default_factory=list)
    system: str | None = SYSTEM_PROMPTS[0]
    model_state: dict[str, Any] = field(default_factory=dict)
    reasons: set[str] = field(default_factory=set)

    def clear(self) -> None:
        """Drop the history."""
        self.messages.clear()
        self.reasons.update(CLEARED)

    def fingerprint(self) -> list[str]:
        """Return the system prompt and each message as JSON text, in which 1, 1.0 and true differ."""
        return [json.dumps(item, sort_keys=True, default=bytes.hex) for item in (self.system, *self.messages)]

    def pending_calls(self) -> list[Any]:
        """Return the calls of the last answer that have no results yet."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            return []
        return tool_uses(self.messages[-1])

    def add_input(self, text: str, ask: Ask | None = None) -> None:
        """Add the input of the next answer: results of pending calls, or else a user text."""
        results = [_tool_result(call, text, ask or Ask()) for call in self.pending_calls()]
        self._add(results[::-1] if ask is not None and ask.reverse else results or [{"text": text or "?"}])

    def add_pictures(self, look: Look) -> None:
        """Add the input of the next answer with pictures: in each result of pending calls, or else next to a text."""
        blocks = _picture_blocks(look)
        results = [
            {"toolResult": {"toolUseId": call["toolUseId"], "status": "success", "content": copy.deepcopy(blocks)}}
            for call in self.pending_calls()
        ]
        self._add(results or blocks)

    def pictures(self) -> int:
        """Return the number of pictures in the history."""
        content = [message["content"] for message in self.messages]
        content += [block["toolResult"]["content"] for blocks in content for block in blocks if "toolResult" in block]
        return sum("image" in block for blocks in content for block in blocks)

    def _add(self, blocks: list[Any]) -> None:
        if self.messages and self.messages[-1]["role"] == "user":
            self.messages[-1]["content"] += blocks
        else:
            self.messages.append({"role": "user", "content": blocks})

    def edit(self, at: int, text: str) -> None:
        """Replace the text of a message that has one."""
        message = self.messages[at % len(self.messages)]
        if any("text" in block for block in message["content"]):
            message["content"] = [{"text": text} if "text" in block else block for block in message["content"]]

    def drop_first(self, count: int) -> None:
        """Drop the oldest messages, then go on to the next user text."""
        del self.messages[:count]
        while self.messages and not _is_user_text(self.messages[0]):
            del self.messages[0]

    def drop_last(self, count: int) -> None:
        """Drop the latest messages, and calls that lost their results."""
        del self.messages[max(0, len(self.messages) - count) :]
        while self.messages and (self.messages[-1]["role"] == "assistant" and self.pending_calls()):
            del self.messages[-1]


@dataclass
class Answer:
    """The answer of one model call.

    Attributes:
        message: The message, as Strands would store it.
        stop_reason: Strands' stop reason; None if the stream ended early.
    """

    message: Message
    stop_reason: str | None


async def collect_answer(events: AsyncIterator[Any], stop: threading.Event | None = None) -> Answer:
    """Assemble a stream of events into the message that Strands would store."""
    blocks: list[Any] = []
    reason, text, use, thought = None, "", None, ""
    with refusing():
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


def tool_uses(message: Message) -> list[Any]:
    """Return the calls of one message."""
    return [block["toolUse"] for block in message["content"] if "toolUse" in block]


def _block(use: Any, text: str, thought: str) -> Any:
    if use is not None:
        return {"toolUse": {**use, "input": json.loads(use["input"] or "{}")}}
    if thought:
        return {"reasoningContent": {"reasoningText": {"text": thought}}}
    return {"text": text}


def _is_user_text(message: Message) -> bool:
    return message["role"] == "user" and not any("toolResult" in block for block in message["content"])


def _picture_blocks(look: Look) -> list[Any]:
    pictures = [{"image": {"format": "png", "source": {"bytes": picture(seed)}}} for seed in look.pictures]
    text = {"text": look.text or "?"}
    forms: dict[str, list[Any]] = {
        "before": [*pictures, text],
        "after": [text, *pictures],
        "around": [*pictures[:1], text, *pictures[1:], {"text": look.text[::-1] or "!"}],
        "alone": pictures,
    }
    return forms[look.form]


def _tool_result(call: Any, text: str, ask: Ask) -> Any:
    content: dict[str, list[Any]] = {
        "text": [{"text": text}],
        "json": [{"json": {"value": text, "n": [1, 1.5, True, None]}}],
        "blocks": [{"text": text}, {"text": text[::-1]}],
        "empty": [],
        "error": [{"text": f"Error: {text}"}],
    }
    status = "error" if ask.form == "error" else "success"
    return {"toolResult": {"toolUseId": call["toolUseId"], "status": status, "content": content[ask.form]}}
