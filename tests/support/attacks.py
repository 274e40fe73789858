"""Attempts to write control tokens through content: a grammar over a tokenizer's control strings."""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random
from typing import Any

from strands.types.content import Message, Messages

from support.conversations import calls, results, user
from tito_core.chat.template import ChatTemplate
from tito_core.chat.traced import Traced

HARMLESS = "wörd"
_WIDE = str.maketrans({chr(c): chr(c + 0xFEE0) for c in range(0x21, 0x7F)})


def controls(template: ChatTemplate) -> list[str]:
    """Return the control strings in sorted order."""
    return sorted(template.encoder.added)


def attack(random: Random, strings: list[str]) -> str:
    """Return a random string with control tokens: whole, partial, disguised, nested or doubled."""
    return "".join(_piece(random, strings) for _ in range(random.randint(1, 3)))


def _piece(random: Random, strings: list[str]) -> str:
    text = random.choice(strings)
    at = random.randrange(len(text) + 1)
    half = random.choice([text[:at], text[at:]])
    inner = re.sub(r"^\W+|\W+$", "", text)
    return random.choice(
        [
            text, text, text, half, inner, "/" + inner, text[:at] + text + text[at:], text.upper(),
            text.translate(_WIDE),
            text[:at] + random.choice(["\u200b", "\u0301", "\u0338", " ", "\n", "\ud83d"]) + text[at:], f" {text} ",
            f"{text}\n{random.choice(strings)}user", HARMLESS, "\n", "<", ">", "|",
        ]
    )  # fmt: skip


@dataclass(frozen=True)
class Attempt:
    """A conversation with attacks in every place for content."""

    system: str
    spec: Any
    messages: Messages
    after: Messages

    @classmethod
    def of(cls, draw: Any, tools: bool) -> Attempt:
        """Fill a conversation with strings from `draw`."""
        first: Message = user(draw(), draw())
        if not tools:
            answer: Message = {"role": "assistant", "content": [{"text": draw() + HARMLESS}]}
            return cls(draw(), None, [first, answer, user(draw())], [user(draw(), draw())])
        schema = {"type": "object", "properties": {draw(): {"type": "string", "enum": [draw()], draw(): draw()}}}
        spec = {"name": draw(), "description": draw(), "inputSchema": {"json": {**schema, "$defs": {draw(): draw()}}}}
        [called] = calls((draw(), {draw(): draw(), "b": [draw(), {draw(): draw()}]}), reasoning=draw())
        shown = results(draw())
        block: Any = shown["content"][0]
        block["toolResult"]["content"].append({"json": {draw(): [draw()]}})
        return cls(draw(), spec, [first, called, shown], [results(draw()), user(draw())][:1])


def written(template: ChatTemplate, text: Traced) -> list[int]:
    """List the control tokens that lie wholly in the template's own text."""
    alternatives = sorted(template.encoder.added, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, alternatives)))
    plain, found, at = str.__str__(text), [], 0
    for start, stop in [*((a, b) for a, b, _ in text.spans), (len(plain), len(plain))]:
        found += [template.encoder.added[match] for match in pattern.findall(plain[at:start])]
        at = stop
    return found


def from_content(template: ChatTemplate, attempt: Attempt, *, system: bool = True) -> int:
    """Return the number of control ids from content, in a first prompt and in a delta."""
    prompt = attempt.system if system else None
    specs = [attempt.spec] if attempt.spec else None
    text = template.rendering.of_messages(attempt.messages, prompt, specs)
    ids = template.first_prompt(attempt.messages, prompt, specs).ids.tolist()
    control = template.encoder.control_ids
    excess = _excess([i for i in ids if i in control], written(template, text))
    answered = attempt.messages[1]
    delta = template.delta(answered, attempt.after, None, tool_specs=specs or (), history=[])
    tail = template.tail(answered, attempt.after, tool_specs=specs or (), history=[])
    own = [i for i in delta.ids[delta.provenance != 2].tolist() if i in control]
    return excess + _excess(own, written(template, tail))


def _excess(found: list[int], allowed: list[int]) -> int:
    return 0 if found == allowed else max(1, len(found) - len(allowed))
