"""Random Strands conversations, and short ways to write single messages."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from strands.types.content import ContentBlock, Message, Messages
from strands.types.tools import ToolSpec

from support.byte_level import MARKUP, SPECIAL

LOOK: ToolSpec = {
    "name": "look",
    "description": 'Look at a place: é, <b> & "quotes".',
    "inputSchema": {
        "json": {
            "type": "object",
            "properties": {"at": {"type": "string", "default": "x"}, "n": {"type": "integer", "minimum": 0}},
            "required": ["at"],
        }
    },
}
PLAIN = st.text(st.characters(exclude_characters="<|>", exclude_categories=["Cs"]), max_size=9)
HOSTILE = st.lists(
    st.one_of(PLAIN, st.sampled_from([*SPECIAL, *MARKUP, "<|im_", "end|>", "<", "think>", "\n"])), max_size=4
).map("".join)
JSON = st.recursive(st.none() | st.booleans() | st.integers() | PLAIN, lambda inner: st.lists(inner, max_size=2))


def user(*texts: str) -> Message:
    return {"role": "user", "content": [{"text": text} for text in texts]}


def answer(text: str, reasoning: str = "") -> Message:
    content: list[ContentBlock] = [{"text": text}]
    if reasoning:
        content.insert(0, {"reasoningContent": {"reasoningText": {"text": reasoning}}})
    return {"role": "assistant", "content": content}


def calls(*named: tuple[str, Any], text: str = "", reasoning: str = "") -> list[Message]:
    """Return one assistant message, in a list, that calls tools with ids call_0, call_1, ..."""
    content: list[ContentBlock] = answer(text, reasoning)["content"] if text else answer("", reasoning)["content"][:-1]
    for i, (name, arguments) in enumerate(named):
        content.append({"toolUse": {"toolUseId": f"call_{i}", "name": name, "input": arguments}})
    return [{"role": "assistant", "content": content}]


def results(*values: Any) -> Message:
    """Return the results of call_0, call_1, ...: text, JSON, or a list of several texts."""
    content: list[ContentBlock] = []
    for i, value in enumerate(values):
        blocks = [{"text": text} for text in value] if isinstance(value, list) else [{"text": value}]
        shown: Any = blocks if isinstance(value, str | list) else [{"json": value}]
        content.append({"toolResult": {"toolUseId": f"call_{i}", "status": "success", "content": shown}})
    return {"role": "user", "content": content}


def translated(value: Any) -> Any:
    """Return template messages or tools as plain strings."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, dict):
        return {translated(key): translated(item) for key, item in value.items()}
    return [translated(item) for item in value] if isinstance(value, list) else value


@st.composite
def rounds_of_tools(draw: Any, text: st.SearchStrategy[str] = PLAIN, *, reasoning: bool = False) -> Messages:
    """Draw one question, then calls and their results a few times; with reasoning, no text with the results."""
    messages: Messages = [user(*draw(st.lists(text, min_size=1, max_size=3)))]
    for _ in range(draw(st.integers(0, 2))):
        count = draw(st.integers(1, 3))
        thought = "Hm" + draw(text) + "." if reasoning and draw(st.booleans()) else ""
        named = [("look", {"at": draw(text), "n": draw(JSON)}) for _ in range(count)]
        messages += calls(*named, text=draw(st.sampled_from(["", "So:"])), reasoning=thought)
        value = st.one_of(text, st.just([]), st.lists(text, min_size=2, max_size=2), st.dictionaries(PLAIN, JSON))
        shown = results(*(draw(value) for _ in range(count)))
        shown["content"] = draw(st.permutations(shown["content"]))
        if not reasoning and draw(st.booleans()):
            shown["content"].append({"text": draw(text)})
        messages.append(shown)
    return messages


@st.composite
def conversations(draw: Any, text: st.SearchStrategy[str] = PLAIN) -> Messages:
    """Draw questions, tool calls with results, answers and follow-ups, ending with a message that is not an answer.

    Answers begin with a letter: a template writes a newline before them, which a blank would merge with.
    """
    messages: Messages = draw(rounds_of_tools(text))
    for _ in range(draw(st.integers(0, 2))):
        messages.append(answer("So " + draw(text)))
        messages += draw(rounds_of_tools(text))
    return messages
