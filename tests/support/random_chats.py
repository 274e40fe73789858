"""Random agent conversations as Strands messages and as OpenAI-style messages; imports nothing of ours.

Contents hold no control token. Each text ends with a word that is unique in its conversation, so that it can be located
in a rendering.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

_WORDS = ("the", "door", "naïve", "日本", "42", "3.14", "a_b", "it's", "x=1;", "open", "far", "né", "–", "Paris", "or")
_GAPS = (" ", " ", " ", " ", ", ", ". ", "  ", "\n")
_TOOLS = ("look", "find_it", "weather.now")
SPEC: dict[str, Any] = {
    "type": "object",
    "properties": {
        "at": {"type": "string", "description": "Where."},
        "n": {"type": "integer", "description": "How many."},
    },
    "required": ["at"],
}


@dataclass(frozen=True)
class Reading:
    """What a template reads and shows of a conversation.

    Attributes:
        arguments: "mapping", or "string" for JSON text.
        parts: Whether content is a list of parts.
        reasoning: Key of an answer's reasoning; None if the template shows none.
        text_and_calls: Whether an answer may have text in front of its calls.
        thought_and_calls: Whether an answer may have reasoning in front of its calls.
        results_and_question: Whether a question may follow results in the same message.
    """

    tools: bool = True
    system: bool = True
    parallel: bool = True
    arguments: str = "mapping"
    parts: bool = False
    reasoning: str | None = "reasoning_content"
    text_and_calls: bool = True
    thought_and_calls: bool = True
    results_and_question: bool = True


@dataclass(frozen=True)
class Answer:
    """An assistant message. `last` is its last word; `cut` names the part that a length limit truncated, or is None."""

    text: str
    thought: str
    calls: tuple[tuple[str, dict[str, Any]], ...]
    last: str
    cut: str | None = None


@dataclass(frozen=True)
class Reply:
    """The messages after an answer: the texts of each call's result, and a question; either may be empty."""

    results: tuple[tuple[str, ...], ...]
    question: str

    def texts(self) -> list[str]:
        """Return the texts that must be shown, in order."""
        return [text for texts in self.results for text in texts] + ([self.question] if self.question else [])


@dataclass(frozen=True)
class Chat:
    """A conversation."""

    system: str
    tools: int
    question: str
    turns: tuple[tuple[Answer, Reply], ...]

    def strands(self, turns: int) -> list[Any]:
        """Return the question and the first turns as Strands messages."""
        messages: list[Any] = [{"role": "user", "content": [{"text": self.question}]}]
        for number, (answer, reply) in enumerate(self.turns[:turns]):
            messages += [strands_answer(answer, number), strands_reply(reply, number)]
        return messages

    def openai(self, turns: int, reading: Reading) -> list[dict[str, Any]]:
        """Return the same, with the system prompt, as OpenAI-style messages."""
        messages = [_plain("system", self.system, reading)] if self.system else []
        messages.append(_plain("user", self.question, reading))
        for number, (answer, reply) in enumerate(self.turns[:turns]):
            messages += [openai_answer(answer, number, reading), *openai_reply(answer, reply, number, reading)]
        return messages

    def strands_tools(self) -> list[Any]:
        """Return the tools as Strands specifications."""
        return [{"name": n, "description": f"Tool {n}.", "inputSchema": {"json": SPEC}} for n in _TOOLS[: self.tools]]

    def openai_tools(self) -> list[Any] | None:
        """Return the tools as OpenAI-style functions, or None."""
        functions = [{"name": n, "description": f"Tool {n}.", "parameters": SPEC} for n in _TOOLS[: self.tools]]
        return [{"type": "function", "function": function} for function in functions] or None


def strands_answer(answer: Answer, number: int) -> Any:
    content: list[Any] = []
    if answer.thought:
        content.append({"reasoningContent": {"reasoningText": {"text": answer.thought}}})
    if answer.text:
        content.append({"text": answer.text})
    for i, (name, arguments) in enumerate(answer.calls):
        content.append({"toolUse": {"toolUseId": call_id(number, i), "name": name, "input": arguments}})
    return {"role": "assistant", "content": content}


def strands_reply(reply: Reply, number: int) -> Any:
    content: list[Any] = []
    for i, texts in enumerate(reply.results):
        blocks = [{"text": text} for text in texts]
        content.append({"toolResult": {"toolUseId": call_id(number, i), "status": "success", "content": blocks}})
    if reply.question:
        content.append({"text": reply.question})
    return {"role": "user", "content": content}


def openai_answer(answer: Answer, number: int, reading: Reading) -> dict[str, Any]:
    message = _plain("assistant", answer.text, reading)
    if answer.thought and reading.reasoning:
        message[reading.reasoning] = answer.thought
    if answer.calls:
        message["tool_calls"] = [
            {
                "id": call_id(number, i),
                "type": "function",
                "function": {
                    "name": name,
                    "arguments": given if reading.arguments == "mapping" else json.dumps(given, ensure_ascii=False),
                },
            }
            for i, (name, given) in enumerate(answer.calls)
        ]
    return message


def openai_reply(answer: Answer, reply: Reply, number: int, reading: Reading) -> list[dict[str, Any]]:
    messages = [
        _plain("tool", "\n".join(texts), reading) | {"tool_call_id": call_id(number, i), "name": answer.calls[i][0]}
        for i, texts in enumerate(reply.results)
    ]
    return messages + ([_plain("user", reply.question, reading)] if reply.question else [])


def call_id(number: int, i: int) -> str:
    """Return the id of a call: nine letters and digits, as Mistral's templates require."""
    return f"c{number:04d}x{i:03d}"


def _plain(role: str, text: str, reading: Reading) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text}] if reading.parts else text}


class Writer:
    """Writes random conversations.

    Args:
        words: Words that three texts of ten hold, such as those that switch a template.
    """

    def __init__(self, random: Random, reading: Reading, *, cuts: float = 0.15, words: Sequence[str] = ()) -> None:
        self.random, self.reading, self.cuts, self.words = random, reading, cuts, words
        self.count = 0

    def chat(self, turns: int) -> Chat:
        """Return a random conversation."""
        chance = self.random.random
        system = self.text() if self.reading.system and chance() < 0.5 else ""
        tools = self.random.randint(1, len(_TOOLS)) if self.reading.tools and chance() < 0.85 else 0
        question = self.text()
        return Chat(system, tools, question, tuple(self.turn(tools) for _ in range(turns)))

    def turn(self, tools: int) -> tuple[Answer, Reply]:
        if not tools or self.random.random() < 0.4:
            return self.answer(), Reply((), self.text())
        answer = self.called(tools)
        results = tuple(self.result() for _ in answer.calls)
        asks = self.reading.results_and_question and self.random.random() < 0.15
        return answer, Reply(results, self.text() if asks else "")

    def answer(self) -> Answer:
        thought = self.thought()
        cut = self.random.choice(["text", "thought"] if thought else ["text"]) if self.cutting() else None
        if cut == "thought":
            return Answer("", thought, (), _last(thought), cut)
        text = self.text()
        return Answer(text, thought, (), _last(text), cut)

    def called(self, tools: int) -> Answer:
        thought = self.thought() if self.reading.thought_and_calls else ""
        text = self.text() if self.reading.text_and_calls and not thought and self.random.random() < 0.3 else ""
        count = self.random.randint(1, 3 if self.reading.parallel else 1)
        calls = []
        for _ in range(count):
            first = {"n": self.random.choice([7, True])} if self.random.random() < 0.3 else {}
            calls.append((_TOOLS[self.random.randrange(tools)], {**first, "zz": self.text(lines=False)}))
        return Answer(text, thought, tuple(calls), _last(calls[-1][1]["zz"]))

    def result(self) -> tuple[str, ...]:
        return tuple(self.text() for _ in range(self.random.choice((1, 1, 1, 1, 2, 0))))

    def thought(self) -> str:
        return self.text() if self.reading.reasoning and self.random.random() < 0.5 else ""

    def cutting(self) -> bool:
        return self.random.random() < self.cuts

    def text(self, *, lines: bool = True) -> str:
        """Return a text of a few words; the last word is unique."""
        self.count += 1
        words = [self.random.choice(_WORDS) for _ in range(self.random.randint(0, 5))]
        if self.words and self.random.random() < 0.3:
            words.insert(self.random.randint(0, len(words)), self.random.choice(self.words))
        gaps = _GAPS if lines and self.random.random() < 0.2 else _GAPS[:-2]
        return "".join(word + self.random.choice(gaps) for word in words) + f"zq{self.count}v"


def _last(text: str) -> str:
    return text.split()[-1]
