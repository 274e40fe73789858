"""The probe conversations that certify a chat template: small, without markup, in every shape that agents produce.

Each text holds a number and each call an id that are unique in their conversation, so that they can be located in a
rendering.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
FIND: ToolSpec = {
    "name": "find",
    "description": "Find a thing.",
    "inputSchema": {"json": {"type": "object", "properties": {}, "required": []}},
}
TOOLS = [LOOK, FIND]


def user_message(*texts: str) -> Message:
    """Return a user message."""
    return {"role": "user", "content": [{"text": text} for text in texts]}


def assistant_message(text: str = "Seen it.", thought: str = "") -> Message:
    """Return an assistant message without calls."""
    return {"role": "assistant", "content": _text_blocks(text, thought)}


def call_message(*calls: tuple[str, dict[str, Any]], text: str = "", thought: str = "", first: int = 0) -> Message:
    """Return an assistant message with calls, whose ids are `call_{first}` and up."""
    content = _text_blocks(text, thought)
    for i, (name, arguments) in enumerate(calls, first):
        content.append({"toolUse": {"toolUseId": f"call_{i}", "name": name, "input": arguments}})
    return {"role": "assistant", "content": content}


def result_message(*results: list[Any], status: Any = "success", text: str = "", first: int = 0) -> Message:
    """Return a user message with results of the calls `call_{first}` and up, each a list of blocks, and a text."""
    content: list[ContentBlock] = [
        {"toolResult": {"toolUseId": f"call_{i}", "status": status, "content": blocks}}
        for i, blocks in enumerate(results, first)
    ]
    return {"role": "user", "content": [*content, {"text": text}] if text else content}


def _text_blocks(text: str, thought: str) -> list[ContentBlock]:
    content: list[ContentBlock] = []
    if thought:
        content.append({"reasoningContent": {"reasoningText": {"text": thought}}})
    if text:
        content.append({"text": text})
    return content


@dataclass(frozen=True, slots=True)
class Case:
    """A probe: an assistant message, what precedes it and what follows it.

    Attributes:
        opened: The part that the message left open, if it was truncated.
        remark: Its text in front of calls, which some templates move or drop.
    """

    name: str
    before: Messages
    answer: Message
    new: Messages
    system: str | None = None
    tools: list[ToolSpec] | None = None
    opened: Opened | None = None
    remark: str = ""

    @property
    def calls(self) -> bool:
        """Whether the message calls tools."""
        return any("toolUse" in block for block in self.answer["content"])

    @property
    def history(self) -> Messages:
        """The whole conversation."""
        return [*self.before, self.answer, *self.new]


class _Writer:
    """Writes the messages of one conversation; each text has the next number and each call the next id."""

    def __init__(self) -> None:
        self._texts = 0
        self._calls = 0

    def text(self, words: str) -> str:
        self._texts += 1
        return f"{words} n{self._texts:03}."

    def question(self) -> Message:
        return user_message(self.text("Why"))

    def answer(self, thought: bool = False) -> Message:
        return assistant_message(thought=self.text("Hm") if thought else "", text=self.text("Seen"))

    def thought(self) -> Message:
        return assistant_message("", thought=self.text("Hm"))

    def call(self, count: int = 1, *, odd: bool = False, remark: bool = False, thought: bool = False) -> Message:
        reasoning = self.text("Hm") if thought else ""
        remark_text = self.text("Looking") if remark else ""
        calls: list[tuple[str, dict[str, Any]]] = [("look", {"at": self.text("the door")}) for _ in range(count)]
        if odd:
            calls[-1:] = [("find", {"n": [1, None], "deep": {"é": True}, "text": self.text('a "b" \\n')})]
        return self._message_of(*calls, text=remark_text, thought=reasoning)

    def bare(self) -> Message:
        return self._message_of(("find", {}))

    def _message_of(self, *calls: Any, text: str = "", thought: str = "") -> Message:
        self._calls += len(calls)
        return call_message(*calls, text=text, thought=thought, first=self._calls - len(calls))

    def result(self, count: int = 1, *, question: bool = False, status: str = "success") -> Message:
        blocks: list[list[Any]] = [[{"text": self.text("It is open")}] for _ in range(count)]
        return self.results(*blocks, text=self.text("Go on") if question else "", status=status)

    def results(self, *blocks: list[Any], text: str = "", status: str = "success") -> Message:
        return result_message(*blocks, text=text, status=status, first=self._calls - len(blocks))

    def round(self, count: int = 1) -> Messages:
        return [self.call(count), self.result(count)]


_Before = Callable[[_Writer], Messages]
_Turn = Callable[[_Writer], tuple[Message, Messages]]

BEFORE: dict[str, _Before] = {
    "first": lambda t: [t.question()],
    "after an answer": lambda t: [t.question(), t.answer(), t.question()],
    "after a thought": lambda t: [t.question(), t.answer(thought=True), t.question()],
    "after a round of tools": lambda t: [t.question(), *t.round(), t.answer(), t.question()],
    "in mid round": lambda t: [t.question(), *t.round()],
}
DEEPER: dict[str, _Before] = {
    "after two answers": lambda t: [t.question(), t.answer(), t.question(), t.answer(), t.question()],
    "in the third round": lambda t: [t.question(), *t.round(), *t.round()],
    "in the fourth round": lambda t: [t.question(), *t.round(), *t.round(), *t.round()],
    "after two rounds and answers": lambda t: [
        *(t.question(), *t.round(), t.answer()),
        *(t.question(), *t.round(), t.answer(), t.question()),
    ],
    "after a round of two calls": lambda t: [t.question(), *t.round(2)],
    "after a result and question": lambda t: [t.question(), t.call(), t.result(question=True)],
    "after a remark and its result": lambda t: [t.question(), t.call(remark=True), t.result()],
    "after a thought and its result": lambda t: [t.question(), t.call(thought=True), t.result()],
}
"""Places that are combined with the turns in `USUAL` only; they find templates that count earlier messages."""
CUT: dict[str, Opened] = {
    "question after a cut answer": Opened.MESSAGE,
    "question after a cut thought": Opened.REASONING,
}
TURNS: dict[str, _Turn] = {
    "question": lambda t: (t.answer(), [t.question()]),
    "question of two blocks": lambda t: (t.answer(), [user_message(t.text("And"), t.text("then"))]),
    "empty question": lambda t: (t.answer(), [user_message("")]),
    "question after a thought": lambda t: (t.answer(thought=True), [t.question()]),
    "question after a cut answer": lambda t: (t.answer(), [t.question()]),
    "question after a cut thought": lambda t: (t.thought(), [t.question()]),
    "two questions": lambda t: (t.answer(), [t.question(), t.question()]),
    "result": lambda t: (t.call(), [t.result()]),
    "empty result": lambda t: (t.call(), [t.results([])]),
    "result of two blocks": lambda t: (t.call(), [t.results([{"text": t.text("Open")}, {"text": t.text("é") + "\n"}])]),
    "JSON result": lambda t: (t.call(odd=True), [t.results([{"json": {"a": [1, None], "é": t.text("x")}}])]),
    "failed result": lambda t: (t.call(), [t.result(status="error")]),
    "result of a call without arguments": lambda t: (t.bare(), [t.result()]),
    "result and question": lambda t: (t.call(), [t.result(question=True)]),
    "result after a thought": lambda t: (t.call(thought=True), [t.result()]),
    "two results": lambda t: (t.call(2, odd=True), [t.result(2)]),
    "two results and question": lambda t: (
        t.call(2),
        [t.results([{"text": t.text("It is open")}], [], text=t.text("Go on"))],
    ),
    "two results in another order": lambda t: (t.call(2), [_reversed(t.result(2))]),
    "result after a remark": lambda t: (t.call(remark=True), [t.result()]),
    "result after a thought and a remark": lambda t: (t.call(remark=True, thought=True), [t.result()]),
}
USUAL = ("question", "result", "two results", "result and question")
"""The turns that are tried in the places of `DEEPER`."""


def _reversed(message: Message) -> Message:
    return {"role": "user", "content": message["content"][::-1]}


def cases() -> Iterator[Case]:
    """Yield the corpus: each turn in each place; the first place with and without tools and a system prompt."""
    for name, turn in TURNS.items():
        for place, before in {**BEFORE, **(DEEPER if name in USUAL else {})}.items():
            writer = _Writer()
            history = before(writer)
            answer, new = turn(writer)
            uses = any("toolUse" in block for message in [*history, answer] for block in message["content"])
            variants: list[tuple[str | None, list[ToolSpec] | None]] = [(None, TOOLS if uses else None)]
            if place == "first":
                variants = [(None, None), (None, TOOLS), (SYSTEM, None), (SYSTEM, TOOLS)]
            elif place in DEEPER:  # a system prompt shifts the index of later messages, and some templates count
                variants = [(None, variants[0][1]), (SYSTEM, variants[0][1])]
            texts = [block["text"] for block in answer["content"] if "text" in block]
            remark = texts[0] if texts and any("toolUse" in block for block in answer["content"]) else ""
            for system, tools in variants:
                words = [name, place, *(["with a system prompt"] if system else []), *(["with tools"] if tools else [])]
                yield Case(", ".join(words), history, answer, new, system, tools, CUT.get(name), remark)
