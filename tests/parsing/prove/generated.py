"""Valid and damaged turns of every format, from a seed: the same in every environment."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from parsing.families import Call, Family

WORDS = (
    "x",
    "é漢🙂",
    'a "quoted" word',
    "it's",
    "two\nlines",
    "back\\slash",
    " blank ",
    "",
    "null",
    "5",
    "<b>&amp;</b>",
)
NUMBERS = (0, -1, 5, 2**31, 2**63, 10**20, 0.5, -1.25e-7, 1e22, 1.7976931348623157e308)
NAMES = ("look", "count", "get_weather", "sum_all", "f", "tool_2")
KEYS = ("at", "far", "of", "all", "unit", "deep")
STRUCTURE = '<>{}[]":,/=()|;'


@dataclass(frozen=True)
class Turn:
    """A turn.

    Attributes:
        text: The text of the turn, including tags.
        calls: Its calls; of a damaged turn, those before the damage.
        damage: The kind of damage; empty for a valid turn.
    """

    text: str
    calls: list[Call]
    damage: str = ""


def value(rng: random.Random, deep: int = 0) -> Any:
    kind = rng.choice(("word", "word", "number", "bool", "none", "list", "dict") if deep < 2 else ("word", "number"))
    if kind == "word":
        return rng.choice(WORDS)
    if kind == "number":
        return rng.choice(NUMBERS)
    if kind == "list":
        return [value(rng, deep + 1) for _ in range(rng.randrange(3))]
    if kind == "dict":
        return {key: value(rng, deep + 1) for key in rng.sample(KEYS, rng.randrange(3))}
    return None if kind == "none" else rng.random() < 0.5


def calls(rng: random.Random, family: Family) -> list[Call]:
    names = rng.sample(NAMES, 1 if family.single_call else rng.choice((1, 1, 2, 3)))
    deep = 0 if family.nested else 2
    return [(name, {key: value(rng, deep) for key in rng.sample(KEYS, rng.randrange(4))}) for name in names]


def sound(family: Family, count: int, seed: int = 0) -> Iterator[Turn]:
    rng = random.Random(f"{family.name} {seed}")
    for _ in range(count):
        sampled = calls(rng, family)
        yield Turn(family.render(sampled), sampled)


def damaged(family: Family, count: int, seed: int = 1) -> Iterator[Turn]:
    """Damage one place of the last call, whose values are plain words and numbers, so that a value cannot hide it."""
    rng = random.Random(f"{family.name} {seed}")
    while count:
        values = (7, "word", ["p", 2] if family.nested else "p")
        sampled: list[Call] = [(n, {k: rng.choice(values) for k in rng.sample(KEYS, 2)})
                            for n in rng.sample(NAMES, 1 if family.single_call else 2)]  # fmt: skip
        text = family.render(sampled)
        from_last = len(family.render(sampled[:-1])) // 2 if len(sampled) > 1 else 1
        damage, broken = rng.choice(DAMAGES)(rng, family, text, from_last)
        if broken != text:
            count -= 1
            yield Turn(broken, sampled, damage)


def _cut(rng: random.Random, _: Family, text: str, start: int) -> tuple[str, str]:
    return "cut off", text[: rng.randrange(start, len(text))]


def _character(rng: random.Random, _: Family, text: str, start: int) -> tuple[str, str]:
    places = [i for i in range(start, len(text)) if text[i] in STRUCTURE]
    at = rng.choice(places)
    return "a character lost", text[:at] + text[at + 1 :]


def _tag(rng: random.Random, family: Family, text: str, start: int) -> tuple[str, str]:
    lost = [tag for tag in family.control if tag != "<|constrain|>"]  # the template of gpt-oss leaves that one out
    tags = [m.span() for tag in lost for m in re.finditer(re.escape(tag), text) if m.start() >= start]
    if not tags:
        return "", text
    begin, end = rng.choice(tags)
    return "a tag lost", text[:begin] + text[end:]


def _comma(rng: random.Random, family: Family, text: str, start: int) -> tuple[str, str]:
    plain = text
    for tag in family.control:  # a bracket in a tag does not end a list
        plain = plain.replace(tag, " " * len(tag))
    places = [m.start() for m in re.finditer(r"[}\]]", plain) if m.start() >= start and '"' in text]
    if not places:
        return "", text
    at = rng.choice(places)
    return "a comma too many", text[:at] + "," + text[at:]


def _quotes(_: random.Random, __: Family, text: str, start: int) -> tuple[str, str]:
    body = text[start:]
    return "single quotes", text[:start] + re.sub(r'"(word|at|far|of|all|unit|deep)"', r"'\1'", body)


DAMAGES = (_cut, _character, _character, _tag, _comma, _quotes)
