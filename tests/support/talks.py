"""Random conversations in which each text holds a number of its own."""

from __future__ import annotations

import json
import re
from typing import Any

from hypothesis import strategies as st

WORDS = ("It is", "é 日本", 'a "b" \\n', "two\nlines", "{x}", "<b>", "'s", "1 2")
LOOK: Any = {
    "name": "look",
    "description": "Look.",
    "inputSchema": {"json": {"type": "object", "properties": {"at": {"type": "string"}}, "required": []}},
}


class Writer:
    """Writes messages; every text ends with the next number, and every call has the next id."""

    def __init__(self, words: Any) -> None:
        self._words = words
        self._texts = self._calls = 0

    def text(self) -> str:
        self._texts += 1
        return f"{self._words()} n{self._texts:03}."

    def question(self, count: int = 1) -> Any:
        return {"role": "user", "content": [{"text": self.text()} for _ in range(count)]}

    def answer(self, thought: bool = False) -> Any:
        return {"role": "assistant", "content": [*self._thought(thought), {"text": self.text()}]}

    def calls(self, count: int = 1, thought: bool = False, remark: bool = False) -> Any:
        content = [*self._thought(thought), *([{"text": self.text()}] if remark else [])]
        for _ in range(count):
            use = {"toolUseId": f"call_{self._calls}", "name": "look", "input": {"at": self.text()}}
            content.append({"toolUse": use})
            self._calls += 1
        return {"role": "assistant", "content": content}

    def results(self, count: int = 1, question: bool = False, as_json: bool = False) -> Any:
        content: list[Any] = []
        for i in range(self._calls - count, self._calls):
            block = {"json": {"é": [self.text(), None]}} if as_json else {"text": self.text()}
            content.append({"toolResult": {"toolUseId": f"call_{i}", "status": "success", "content": [block]}})
        return {"role": "user", "content": [*content, *([{"text": self.text()}] if question else [])]}

    def _thought(self, thought: bool) -> list[Any]:
        return [{"reasoningContent": {"reasoningText": {"text": self.text()}}}] if thought else []


def numbers(value: Any) -> list[str]:
    """Return the numbers of texts in a message, several of them, or a rendering."""
    return re.findall(r"\bn\d{3}\b", value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def after(answered: Any, new: Any, text: str) -> str:
    """Return what a rendering holds after the last text of a turn."""
    until = text.index(found[0]) if (found := numbers(new)) else len(text)
    return text[max(text.rfind(number, 0, until) for number in numbers(answered)) + len("n000.") :]


@st.composite
def talks(draw: Any) -> Any:
    """Draw a conversation that ends with a user's message; its results come in any order."""
    writer = Writer(lambda: draw(st.sampled_from(WORDS)))
    flag = st.booleans()
    messages = [writer.question(draw(st.integers(1, 2)))]
    for _ in range(draw(st.integers(0, 3))):
        if draw(flag):
            count = draw(st.integers(1, 3))
            messages.append(writer.calls(count, remark=draw(flag)))
            shown = writer.results(count, draw(flag), draw(flag))
            results = [block for block in shown["content"] if "toolResult" in block]
            shown["content"][: len(results)] = draw(st.permutations(results))
            messages.append(shown)
        else:
            messages += [writer.answer(), writer.question()]
    return messages
