"""Random conversations in which each text holds a number of its own, and their OpenAI-style messages, made by hand.

It uses nothing of the code that translates messages for a rollout, so that it can judge it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
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
def talks(draw: Any, *, most_calls: int = 3, thoughts: bool = True, remarks: bool = True, most_rounds: int = 3) -> Any:
    """Draw a conversation that ends with a user's message; its results come in any order."""
    writer = Writer(lambda: draw(st.sampled_from(WORDS)))
    flag = st.booleans()
    messages = [writer.question(draw(st.integers(1, 2)))]
    for _ in range(draw(st.integers(0, most_rounds))):
        if draw(flag):
            count = draw(st.integers(1, most_calls))
            messages.append(writer.calls(count, thoughts and draw(flag), remarks and draw(flag)))
            shown = writer.results(count, draw(flag), draw(flag))
            results = [block for block in shown["content"] if "toolResult" in block]
            shown["content"][: len(results)] = draw(st.permutations(results))
            messages.append(shown)
        else:
            messages += [writer.answer(thoughts and draw(flag)), writer.question()]
    return messages


def openai_messages(
    messages: Sequence[Any], system: str | None = None, *, parts: bool = False, json_arguments: bool = False
) -> list[dict[str, Any]]:
    """Write a conversation as OpenAI's API has it; reasoning stands under each of the names that templates read."""

    def content(texts: list[str]) -> Any:
        return [{"type": "text", "text": "\n".join(texts)}] if parts else "\n".join(texts)

    written: list[dict[str, Any]] = [{"role": "system", "content": content([system])}] if system else []
    calls: list[Any] = []
    for message in messages:
        blocks = message["content"]
        texts = [block["text"] for block in blocks if "text" in block]
        if message["role"] == "assistant":
            calls = [block["toolUse"] for block in blocks if "toolUse" in block]
            answer: dict[str, Any] = {"role": "assistant", "content": content(texts)}
            for block in blocks:
                if "reasoningContent" in block:
                    thought = block["reasoningContent"]["reasoningText"]["text"]
                    answer.update(reasoning_content=thought, thinking=thought, reasoning=thought)
            if calls:
                answer["tool_calls"] = [
                    {
                        "id": call["toolUseId"],
                        "type": "function",
                        "function": {
                            "name": call["name"],
                            "arguments": json.dumps(call["input"], ensure_ascii=False)
                            if json_arguments
                            else call["input"],
                        },
                    }
                    for call in calls
                ]
            written.append(answer)
            continue
        shown = {b["toolResult"]["toolUseId"]: b["toolResult"]["content"] for b in blocks if "toolResult" in b}
        for call in calls:
            if call["toolUseId"] in shown:
                result_texts = [
                    b["text"] if "text" in b else json.dumps(b["json"], ensure_ascii=False)
                    for b in shown[call["toolUseId"]]
                ]
                written.append(
                    {
                        "role": "tool",
                        "tool_call_id": call["toolUseId"],
                        "name": call["name"],
                        "content": content(result_texts),
                    }
                )
        if texts or not shown:
            written.append({"role": "user", "content": content(texts)})
    return written


def openai_tools(tools: Sequence[Any] | None) -> list[dict[str, Any]] | None:
    return [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool["description"],
                "parameters": tool["inputSchema"]["json"],
            },
        }
        for tool in tools or ()
    ] or None


def plain(
    tokenizer: Any,
    messages: Sequence[Any],
    system: str | None = None,
    tools: Any = None,
    prompt: bool = True,
    **form: Any,
) -> str:
    """Render a conversation with transformers alone."""
    return str(
        tokenizer.apply_chat_template(
            openai_messages(messages, system, **form),
            tools=openai_tools(tools),
            add_generation_prompt=prompt,
            tokenize=False,
        )
    )
