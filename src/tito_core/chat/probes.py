"""The conversations by which a chat template is certified: small, harmless, and every shape that an agent makes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from strands.types.content import ContentBlock, Message, Messages
from strands.types.tools import ToolSpec

from tito_core.chat.ending import Opened

SYSTEM = "Be brief."
LOOK: ToolSpec = {
    "name": "look",
    "description": "Look at a place.",
    "inputSchema": {
        "json": {
            "type": "object",
            "properties": {"at": {"type": "string", "description": "Where."}},
            "required": ["at"],
        }
    },
}
FIND: ToolSpec = {"name": "find", "description": "Find a thing.", "inputSchema": {"json": {"type": "object"}}}
TOOLS = [LOOK, FIND]


def asked(*texts: str) -> Message:
    """Give a user's message."""
    return {"role": "user", "content": [{"text": text} for text in texts]}


def said(text: str = "Seen it.", thought: str = "") -> Message:
    """Give an answer."""
    return {"role": "assistant", "content": _spoken(text, thought)}


def called(*calls: tuple[str, dict[str, Any]], text: str = "", thought: str = "") -> Message:
    """Give calls, with ids call_0, call_1, ..."""
    content = _spoken(text, thought)
    for i, (name, arguments) in enumerate(calls):
        content.append({"toolUse": {"toolUseId": f"call_{i}", "name": name, "input": arguments}})
    return {"role": "assistant", "content": content}


def returned(*results: list[Any], status: Any = "success", text: str = "") -> Message:
    """Give the results of call_0, call_1, ..., each a list of blocks, and a text after them."""
    content: list[ContentBlock] = [
        {"toolResult": {"toolUseId": f"call_{i}", "status": status, "content": blocks}}
        for i, blocks in enumerate(results)
    ]
    return {"role": "user", "content": [*content, {"text": text}] if text else content}


def _spoken(text: str, thought: str) -> list[ContentBlock]:
    content: list[ContentBlock] = []
    if thought:
        content.append({"reasoningContent": {"reasoningText": {"text": thought}}})
    if text:
        content.append({"text": text})
    return content


@dataclass(frozen=True, slots=True)
class Case:
    """An assistant message in its place and what follows it.

    Attributes:
        beside: A text that the message holds beside calls, which some templates move elsewhere.
        opened: What the message left open, where it was cut off.
    """

    name: str
    before: Messages
    answered: Message
    new: Messages
    system: str | None = None
    tools: list[ToolSpec] | None = None
    beside: str = ""
    opened: Opened | None = None

    @property
    def calls(self) -> bool:
        """Tell whether the message calls tools."""
        return any("toolUse" in block for block in self.answered["content"])


_AT = ("look", {"at": "the door"})
_ODD = ("find", {"n": [1, None], "deep": {"é": True}, "text": 'a "b" \\n'})
_SEEN: list[Any] = [{"text": "It is open."}]
_ROUND: Messages = [called(_AT), returned(_SEEN)]
BEFORE: dict[str, Messages] = {
    "first": [asked("Why?")],
    "after an answer": [asked("Why?"), said(), asked("And?")],
    "after a thought": [asked("Why?"), said(thought="Hm."), asked("And?")],
    "after a round of tools": [asked("Why?"), *_ROUND, said(), asked("And?")],
    "in mid round": [asked("Why?"), *_ROUND],
}
CUT: dict[str, Opened] = {
    "question after a cut answer": Opened.MESSAGE,
    "question after a cut thought": Opened.REASONING,
}
ANSWERS: dict[str, tuple[Message, Messages, str]] = {
    "question": (said(), [asked("And then?")], ""),
    "question of two blocks": (said(), [asked("And", "then?")], ""),
    "empty question": (said(), [asked("")], ""),
    "question after a thought": (said(thought="Hm."), [asked("And then?")], ""),
    "question after a cut answer": (said("Seen"), [asked("And then?")], ""),
    "question after a cut thought": (said("", thought="Hm."), [asked("And then?")], ""),
    "result": (called(_AT), [returned(_SEEN)], ""),
    "empty result": (called(_AT), [returned([])], ""),
    "result of two blocks": (called(_AT), [returned([*_SEEN, {"text": "é\n"}])], ""),
    "JSON result": (called(_ODD), [returned([{"json": {"a": [1, None], "é": "x"}}])], ""),
    "failed result": (called(_AT), [returned([{"text": "Error: shut"}], status="error")], ""),
    "result of a call without arguments": (called(("find", {})), [returned(_SEEN)], ""),
    "result and question": (called(_AT), [returned(_SEEN, text="Go on.")], ""),
    "result after a thought": (called(_AT, thought="Hm."), [returned(_SEEN)], ""),
    "two results": (called(_AT, _ODD), [returned(_SEEN, [{"text": "No."}])], ""),
    "two results and question": (called(_AT, _AT), [returned(_SEEN, [], text="Go on.")], ""),
    "result after a remark": (called(_AT, text="Looking."), [returned(_SEEN)], "Looking."),
}


def cases() -> Iterator[Case]:
    """Yield the corpus: each answer in each place with tools, and in the first place with every opening."""
    openings: list[tuple[str | None, list[ToolSpec] | None]] = [
        (None, None), (None, TOOLS), (SYSTEM, None), (SYSTEM, TOOLS)
    ]  # fmt: skip
    for name, (answered, new, beside) in ANSWERS.items():
        plain = not any("toolUse" in block for block in answered["content"])
        for place, before in BEFORE.items():
            alone = plain and not any("toolUse" in block for message in before for block in message["content"])
            usual = openings[:1] if alone else openings[1:2]
            for system, tools in openings if place == "first" else usual:
                words = [name, place, *(["with a system prompt"] if system else []), *(["with tools"] if tools else [])]
                yield Case(", ".join(words), before, answered, new, system, tools, beside, CUT.get(name))
