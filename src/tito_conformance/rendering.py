"""Law 7 and 9, worked out independently: what a chat template writes for a history, and which calls a text holds.

Other code than the client's translates the history here, and transformers renders it. If the whole rendering ends with
the delta, and continues the answer before it, then the delta is the template's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any

from tito_conformance.oracle import Problem

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message from which templates read reasoning."""
_SAMPLE_REASONING = "Because of the weather"
_SAMPLE_TOOL = "weather_at"
_SAMPLE_INPUT = {"at": "noon"}


class Renderer:
    """Renders histories with a tokenizer's template.

    Args:
        tokenizer: The model's tokenizer.
        arguments: The template's arguments.
    """

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any]) -> None:
        self.tokenizer = tokenizer
        self._arguments = dict(arguments)
        self.controls = [str(token) for token in tokenizer.added_tokens_decoder.values()]

    def text(self, messages: Sequence[Any], system: str | None, tools: Sequence[Any]) -> str | None:
        """Render a history with a generation prompt. Return None if the template refuses it."""
        told = [(tool["name"], tool["description"], tool["inputSchema"]["json"]) for tool in tools]
        functions = [
            {"type": "function", "function": {"name": name, "description": text, "parameters": schema}}
            for name, text, schema in told
        ]
        translated = to_template_messages(messages, system)
        return self._render(translated, tools=functions or None, add_generation_prompt=True)

    def pictures(self, messages: Sequence[Any], system: str | None) -> list[str]:
        """Return the sha256 (hex) of each picture of a history, in the order in which the template shows them."""
        contents = [message["content"] for message in to_template_messages(messages, system)]
        return [part["sha256"] for parts in contents if isinstance(parts, list) for part in parts if "sha256" in part]

    def reasoning_tags(self, closer: str) -> tuple[str, str, str] | None:
        """Find the text that opens reasoning, the text that closes it, and all text between reasoning and `closer`.

        Return None if the template does not render an answer's reasoning.
        """
        answer = {"role": "assistant", "content": "", **dict.fromkeys(REASONING_KEYS, _SAMPLE_REASONING)}
        messages = [{"role": "user", "content": "Why?"}, answer]
        rendered = self._render(messages)
        if rendered is None:
            return None
        before, _, after = rendered.partition(_SAMPLE_REASONING)
        closing, found, _ = after.partition(closer)
        if not found or not closing.split() or not before.split():
            return None
        return before.split()[-1], closing.split()[0], closing

    def call_tags(self, closer: str) -> tuple[str, str, str] | None:
        """Find the control tokens that open and close a call, and all text that closes it up to `closer`.

        All three are empty if no control token closes a call; the first is empty if none opens one. Return None if the
        template does not render calls.
        """
        rendered = self._render(_sample_call())
        if rendered is None:
            return None
        before, name, after = rendered.partition(_SAMPLE_TOOL)
        rest, ended, _ = after.partition(closer)
        closing = rest[len(self._without_final_controls(rest)) :]
        if not name:
            return None
        if not ended or not closing:
            return "", "", ""
        last = max((control for control in self.controls if control in before), key=before.rfind, default="")
        first = min((control for control in self.controls if control in closing), key=closing.find)
        return last, first, closing

    def spelled_closing(self, text: str, delta: str) -> str:
        """Return the start of a delta that closes the call's tags which a text opened, where they are no tokens."""
        shown, opened = self._render(_sample_call()) or "", list[str]()
        for slash, name in re.findall(r"<(/?)([\w:.-]+)>", text):
            if slash and name in opened:
                del opened[len(opened) - 1 - opened[::-1].index(name) :]
            elif not slash and f"</{name}>" in shown:
                opened.append(name)
        closers = [f"</{name}>" for name in reversed(opened)]
        begun = (
            next((n for n in range(len(closers[0]) - 1, 0, -1) if text.endswith(closers[0][:n])), 0) if opened else 0
        )
        found = re.match(r"\s*".join(["", *map(re.escape, ["".join(closers[:1])[begun:], *closers[1:]])]), delta)
        return found[0] if found and opened else ""

    def _render(self, messages: Sequence[Any], **more: Any) -> str | None:
        """Render template messages. Return None if the template refuses them."""
        try:
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False, **more, **self._arguments))
        except Exception:  # a template is a program and may raise anything
            return None

    def _without_final_controls(self, text: str) -> str:
        """Strip the control tokens at the end of a text, and the whitespace around them."""
        found = next((control for control in self.controls if text.rstrip().endswith(control)), None)
        return text if found is None else self._without_final_controls(text.rstrip().removesuffix(found)).rstrip()

    def encode(self, text: str) -> list[int]:
        """Encode a text as the tokenizer does, without special tokens around it."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids, control tokens included."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def survives(self, messages: Sequence[Any], system: str | None) -> bool:
        """Return whether a history's text survives encoding and decoding; some vocabularies lack bytes."""
        text = json.dumps([system, messages], ensure_ascii=False, default=bytes.hex)
        return self.decode(self.encode(text)) == text

    def is_plain(self, messages: Sequence[Any], system: str | None) -> bool:
        """Return whether a history's text holds no control token and no bracket, which may be a part of one."""
        text = "\n".join(strings([system, messages]))
        return not any(control in text for control in self.controls) and not any(mark in text for mark in "<>|[]")


def to_template_messages(messages: Sequence[Any], system: str | None) -> list[dict[str, Any]]:
    """Translate a Strands history to the messages that templates read."""
    translated: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    order: list[str] = []
    names: dict[str, str] = {}
    for message in messages:
        texts = [block["text"] for block in message["content"] if "text" in block]
        if message["role"] == "assistant":
            calls = [block["toolUse"] for block in message["content"] if "toolUse" in block]
            order = [call["toolUseId"] for call in calls]
            names = {call["toolUseId"]: call["name"] for call in calls}
            translated.append(_assistant_message(message, texts, calls))
            continue
        results = [block["toolResult"] for block in message["content"] if "toolResult" in block]
        for result in sorted(results, key=lambda each: order.index(each["toolUseId"])):
            content = _content(result["content"])
            name, identity = names[result["toolUseId"]], result["toolUseId"]
            translated.append({"role": "tool", "name": name, "tool_call_id": identity, "content": content})
        own = [block for block in message["content"] if "toolResult" not in block]
        if own or not results:
            translated.append({"role": "user", "content": _content(own)})
    return translated


def _sample_call() -> list[dict[str, Any]]:
    """Return template messages with one call."""
    use = {"toolUseId": "call00000", "name": _SAMPLE_TOOL, "input": _SAMPLE_INPUT}
    question = {"role": "user", "content": [{"text": "Why?"}]}
    return to_template_messages([question, {"role": "assistant", "content": [{"toolUse": use}]}], None)


def _content(blocks: Sequence[Any]) -> str | list[dict[str, Any]]:
    """Return the texts of blocks as one text, or as a list of parts with each picture in its place."""
    parts: list[dict[str, Any]] = []
    for block in blocks:
        if "image" in block:
            parts.append({"type": "image", "sha256": sha256(block["image"]["source"]["bytes"]).hexdigest()})
            continue
        text = str(block["text"]) if "text" in block else json.dumps(block["json"], ensure_ascii=False)
        if parts and "text" in parts[-1]:
            parts[-1]["text"] += "\n" + text
        else:
            parts.append({"type": "text", "text": text})
    if any(part["type"] == "image" for part in parts):
        return parts
    return str(parts[0]["text"]) if parts else ""


def _assistant_message(message: Any, texts: list[str], calls: list[Any]) -> dict[str, Any]:
    blocks = [block["reasoningContent"] for block in message["content"] if "reasoningContent" in block]
    reasoning = [block["reasoningText"]["text"] for block in blocks]
    answer: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if reasoning:
        answer |= dict.fromkeys(REASONING_KEYS, "\n".join(reasoning))
    if calls:
        functions = [{"name": call["name"], "arguments": call["input"]} for call in calls]
        pairs = zip(calls, functions, strict=True)
        answer["tool_calls"] = [{"id": c["toolUseId"], "type": "function", "function": f} for c, f in pairs]
    return answer


def strings(value: Any) -> Iterator[str]:
    """Yield every string in a JSON-like value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings(item)


def differing_excerpts(one: str, other: str, length: int = 60) -> tuple[str, str]:
    """Return an excerpt of each text, from shortly before their first difference."""
    pairs = enumerate(zip(one, other, strict=False))
    at = max(0, next((i for i, (a, b) in pairs if a != b), min(len(one), len(other))) - 10)
    return one[at : at + length], other[at : at + length]


class CallReader:
    """Reads calls of a format that writes a JSON object between two tags.

    Args:
        tokenizer: The model's tokenizer, whose template shows the format.

    Attributes:
        tags: The tags; None if the template does not write calls in this way.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tags = _tags(tokenizer)

    def read(self, text: str) -> list[Any] | None:
        """Return one JSON value for each call, in order; None for one that is not valid, or not closed.

        Return None if the text's reasoning makes it unclear where calls may be.
        """
        if self.tags is None or text.count("<think>") > text.count("</think>"):
            return None
        begin, end = self.tags
        *_, rest = text.split("</think>")
        if "<think>" in text and begin in text[: len(text) - len(rest)]:
            return None
        parts = rest.split(begin)[1:]
        return [_strict(part.partition(end)[0]) if end in part else None for part in parts]

    def said(self, text: str) -> tuple[str, str] | None:
        """Return the reasoning and the text of an answer, without its calls; None if it is unclear where they end."""
        opened = text.count("<think>")
        if self.tags is None or "\N{REPLACEMENT CHARACTER}" in text or opened > 1 or opened != text.count("</think>"):
            return None
        before, _, after = text.partition("</think>") if opened else ("", "", text)
        lead, _, reasoning = before.partition("<think>")
        first, *parts = after.split(self.tags[0])
        whole = all(self.tags[1] in part for part in parts)
        if (
            lead.strip()
            or self.tags[0] in reasoning
            or not whole
            or "<" in first + "".join(parts).replace(self.tags[1], "")
        ):
            return None
        return reasoning.strip("\n"), (first + "".join(part.partition(self.tags[1])[2] for part in parts)).strip()

    def misplaced(self, records: Sequence[Any], decode: Callable[[int, int], str]) -> Iterator[Problem]:
        """Check that the tokens that the ledger records of each executed call hold the format's first tag.

        Where tags are not single tokens, a token may also contain the end of the text before the tag.

        Args:
            records: The turn's calls (`CallRecord`).
            decode: Returns the text of the output's tokens from an offset to another.
        """
        begin, _ = self.tags or ("", "")
        for call in records:
            text = decode(call.start, call.stop)
            if call.status == "ok" and begin not in text:
                yield "calls", f"the ledger has the call of {call.name!r} at tokens that spell {text[:60]!r}."


def compare_calls(read: Sequence[Any], uses: Sequence[Any], malformed: str, *, whole: bool) -> Iterator[Problem]:
    """Compare the calls that were sampled with those that the agent executes.

    Args:
        read: What `CallReader.read` returned.
        uses: The message's calls.
        malformed: Name of the calls that tell the policy what was wrong.
        whole: Whether the answer ended by itself. No call of a truncated answer is executed.
    """
    expected = [call for call in map(_call, read) if call is not None]
    executed = [(use["name"], use["input"]) for use in uses if use["name"] != malformed]
    invented = [call for call in executed if call not in expected]
    if invented:
        yield "calls", f"the agent executes {invented[0]}, which the policy did not sample: its calls are {expected}."
    if whole and len(uses) < len(expected):
        yield "calls", f"the policy sampled {len(expected)} calls, {expected}, but the agent gets {len(uses)}."
    if len(read) > len(expected) and len(executed) > len(expected):
        yield "calls", f"the agent executes {len(executed)} calls, but only {len(expected)} are valid."
    if whole and [call for call in expected if call in executed] != [call for call in executed if call in expected]:
        yield "calls", f"the agent executes {executed}, in another order than sampled: {expected}."


def compare_said(said: tuple[str, str], content: Sequence[Any]) -> Iterator[Problem]:
    """Compare reasoning and text of an answer with those of its message; a parser may take reasoning for text."""
    thoughts = [each["reasoningContent"]["reasoningText"]["text"] for each in content if "reasoningContent" in each]
    text = "".join(each["text"] for each in content if "text" in each).strip()
    reasoning = "\n".join(thoughts)
    if not reasoning and said[0] and "</think>" in text:
        return
    for what, own, sampled in (("reasoning", reasoning, said[0]), ("text", text, said[1])):
        if own != sampled and (what == "text" or sampled.strip()):
            one, other = differing_excerpts(own, sampled)
            yield "calls", f"the message's {what} has {one!r} where the policy sampled {other!r}."


def _tags(tokenizer: Any) -> tuple[str, str] | None:
    text = Renderer(tokenizer, {})._render(_sample_call())
    if text is None:
        return None
    for start in [at for at, letter in enumerate(text) if letter == "{"]:
        try:
            value, stop = json.JSONDecoder().raw_decode(text, start)
        except ValueError:
            continue
        before, after = text[:start].split(), text[stop:].split()
        if _call(value) == (_SAMPLE_TOOL, _SAMPLE_INPUT) and before and after:
            begin, end = before[-1], after[0]
            ends = end.partition(">")[0] + ">"
            begin = "<" + begin.rpartition("<")[2]
            return (begin, ends) if begin.endswith(">") and ends.startswith("<") else None
    return None


def _strict(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _call(value: Any) -> tuple[str, Any] | None:
    """Return the name and the arguments of a call; None if the value is not a call."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    return (value["name"], arguments) if isinstance(arguments, dict) else None
