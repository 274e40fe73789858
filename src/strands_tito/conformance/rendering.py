"""Law 7, worked out anew: what the chat template itself writes for a history, by transformers' own rendering.

A history is translated here by other code than the client's. Where the whole rendering ends as the delta does, and goes
on from the answer before it, the delta is the template's own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys under which templates read reasoning."""

_THOUGHT = "Because of the weather"
_CALLED = "weather_at"


class Renderer:
    """Renders histories with a tokenizer's template.

    Args:
        tokenizer: The model's.
        arguments: The template's arguments.
    """

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any]) -> None:
        self.tokenizer = tokenizer
        self._arguments = dict(arguments)
        self.controls = [str(token) for token in tokenizer.added_tokens_decoder.values()]

    def text(self, messages: Sequence[Any], system: str | None, tools: Sequence[Any]) -> str | None:
        """Render a history up to where the policy speaks; None where the template refuses it."""
        functions = [
            {
                "type": "function",
                "function": {
                    "name": tool["name"],
                    "description": tool["description"],
                    "parameters": tool["inputSchema"]["json"],
                },
            }
            for tool in tools
        ]
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    translated(messages, system),
                    tools=functions or None,
                    add_generation_prompt=True,
                    tokenize=False,
                    **self._arguments,
                )
            )
        except Exception:  # a template is a program: what it raises is its author's
            return None

    def reasoning(self, closer: str) -> tuple[str, str, str] | None:
        """Read off a rendering what opens reasoning, what closes it, and all that stands between it and a closer.

        None where the template does not show the reasoning of an answer.
        """
        answer = {"role": "assistant", "content": "", **dict.fromkeys(REASONING, _THOUGHT)}
        messages = [{"role": "user", "content": "Why?"}, answer]
        said = self._said(messages)
        if said is None:
            return None
        before, _, after = said.partition(_THOUGHT)
        closing, found, _ = after.partition(closer)
        if not found or not closing.split() or not before.split():
            return None
        return before.split()[-1], closing.split()[0], closing

    def call(self, closer: str) -> tuple[str, str, str] | None:
        """Read off a rendering the control tokens around a call, and what closes it up to an answer's own closer.

        All three are empty where no control token ends a call, the first where none begins one; None where the template
        shows no call.
        """
        use = {"toolUseId": "call00000", "name": _CALLED, "input": {"at": "noon"}}
        asked = {"role": "user", "content": [{"text": "Why?"}]}
        messages = translated([asked, {"role": "assistant", "content": [{"toolUse": use}]}], None)
        said = self._said(messages)
        if said is None:
            return None
        before, shown, after = said.partition(_CALLED)
        whole, ended, _ = after.partition(closer)
        closing = whole[len(self._before_controls(whole)) :]
        if not shown:
            return None
        if not ended or not closing:
            return "", "", ""
        last = max((control for control in self.controls if control in before), key=before.rfind, default="")
        first = min((control for control in self.controls if control in closing), key=closing.find)
        return last, first, closing

    def _said(self, messages: Sequence[Any]) -> str | None:
        """Render messages that are translated already, to their end; None where the template refuses them."""
        try:
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False, **self._arguments))
        except Exception:  # as above
            return None

    def _before_controls(self, text: str) -> str:
        """Leave out the control tokens that a text ends with, and the blanks between and before them."""
        found = next((control for control in self.controls if text.rstrip().endswith(control)), None)
        return text if found is None else self._before_controls(text.rstrip().removesuffix(found)).rstrip()

    def ids(self, text: str) -> list[int]:
        """Encode a whole rendering as the tokenizer does."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def spell(self, ids: Sequence[int]) -> str:
        """Decode ids, control tokens too."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def survives(self, messages: Sequence[Any], system: str | None) -> bool:
        """Return whether all that messages say is the same once encoded and decoded: some vocabularies lack bytes."""
        said = json.dumps([system, messages], ensure_ascii=False)
        return self.spell(self.ids(said)) == said

    def is_plain(self, messages: Sequence[Any], system: str | None) -> bool:
        """Return whether nothing that a history says spells a control token, or a part of one."""
        said = "\n".join(strings([system, messages]))
        return not any(control in said for control in self.controls) and not any(mark in said for mark in "<>|[]")


def strings(value: Any) -> Iterator[str]:
    """Yield every string in a JSON-like value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings(item)


def apart(one: str, other: str, shown: int = 60) -> tuple[str, str]:
    """Return both texts from shortly before where they first differ."""
    pairs = enumerate(zip(one, other, strict=False))
    at = max(0, next((i for i, (a, b) in pairs if a != b), min(len(one), len(other))) - 10)
    return one[at : at + shown], other[at : at + shown]


def translated(messages: Sequence[Any], system: str | None) -> list[dict[str, Any]]:
    """Translate a history to the messages that templates read."""
    found: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    order: list[str] = []
    names: dict[str, str] = {}
    for message in messages:
        texts = [block["text"] for block in message["content"] if "text" in block]
        if message["role"] == "assistant":
            calls = [block["toolUse"] for block in message["content"] if "toolUse" in block]
            order = [call["toolUseId"] for call in calls]
            names = {call["toolUseId"]: call["name"] for call in calls}
            found.append(_answer(message, texts, calls))
            continue
        results = [block["toolResult"] for block in message["content"] if "toolResult" in block]
        for result in sorted(results, key=lambda each: order.index(each["toolUseId"])):
            shown = [_shown(item) for item in result["content"]]
            name, identity = names[result["toolUseId"]], result["toolUseId"]
            found.append({"role": "tool", "name": name, "tool_call_id": identity, "content": "\n".join(shown)})
        if texts or not results:
            found.append({"role": "user", "content": "\n".join(texts)})
    return found


def _shown(item: Any) -> str:
    return str(item["text"]) if "text" in item else json.dumps(item["json"], ensure_ascii=False)


def _answer(message: Any, texts: list[str], calls: list[Any]) -> dict[str, Any]:
    blocks = [block["reasoningContent"] for block in message["content"] if "reasoningContent" in block]
    thoughts = [block["reasoningText"]["text"] for block in blocks]
    answer: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        answer |= dict.fromkeys(REASONING, "\n".join(thoughts))
    if calls:
        functions = [{"name": call["name"], "arguments": call["input"]} for call in calls]
        pairs = zip(calls, functions, strict=True)
        answer["tool_calls"] = [{"id": c["toolUseId"], "type": "function", "function": f} for c, f in pairs]
    return answer
