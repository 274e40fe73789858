"""Calls with one change: each gets a status, and one that runs has exactly the arguments that its text gives.

TITO_MUTATED=20000 TITO_SEED=1 python -m pytest -s tests/parsing/test_mutated.py
"""

from __future__ import annotations

import os
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from parsing.families import CALL_FAMILIES, NAMES, Call, Family, ids_of, parse
from tito_core.parsing import CallStatus, ParsedTurn, get_tool_parser

COUNT = int(os.environ.get("TITO_MUTATED", "100"))
SEED = os.environ.get("TITO_SEED", "0")
VALUES: tuple[Any, ...] = (7, "word", "two words", ["p", 2], True, None, {"of": 3}, "")
KEYS = ("at", "far", "of", "all")
TOOLS = ("look", "get_weather", "tool_2")
CHARACTERS = "<>{}[]\"':;,|/=()_ \nx1"


def random_calls(family: Family, rng: random.Random) -> list[Call]:
    names = rng.sample(TOOLS, 1 if family.single_call else rng.choice((1, 1, 2)))
    return [(name, {key: rng.choice(VALUES) for key in rng.sample(KEYS, rng.randrange(3))}) for name in names]


def _character_lost(completion: str, tags: list[tuple[int, int]], rng: random.Random) -> str:
    at = rng.randrange(len(completion))
    return completion[:at] + completion[at + 1 :]


def _character_more(completion: str, tags: list[tuple[int, int]], rng: random.Random) -> str:
    at = rng.randrange(len(completion) + 1)
    return completion[:at] + rng.choice(CHARACTERS) + completion[at:]


def _character_other(completion: str, tags: list[tuple[int, int]], rng: random.Random) -> str:
    at = rng.randrange(len(completion))
    return completion[:at] + rng.choice(CHARACTERS) + completion[at + 1 :]


def _characters_swapped(completion: str, tags: list[tuple[int, int]], rng: random.Random) -> str:
    at = rng.randrange(len(completion) - 1)
    return completion[:at] + completion[at + 1] + completion[at] + completion[at + 2 :]


def _piece_lost(completion: str, tags: list[tuple[int, int]], rng: random.Random) -> str:
    at = rng.randrange(len(completion))
    return completion[:at] + completion[at + rng.randrange(2, 12) :]


def _piece_twice(completion: str, tags: list[tuple[int, int]], rng: random.Random) -> str:
    at, length = rng.randrange(len(completion)), rng.randrange(2, 12)
    return completion[: at + length] + completion[at:]


def _cut(completion: str, tags: list[tuple[int, int]], rng: random.Random) -> str:
    return completion[: rng.randrange(len(completion) // 2, len(completion))]


def _beginning_lost(completion: str, tags: list[tuple[int, int]], rng: random.Random) -> str:
    return completion[rng.randrange(1, len(completion) // 2) :]


def _tag_lost(completion: str, tags: list[tuple[int, int]], rng: random.Random) -> str:
    start, stop = rng.choice(tags or [(0, 1)])
    return completion[:start] + completion[stop:]


def _tag_twice(completion: str, tags: list[tuple[int, int]], rng: random.Random) -> str:
    start, stop = rng.choice(tags or [(0, 1)])
    return completion[:stop] + completion[start:]


def _tag_elsewhere(completion: str, tags: list[tuple[int, int]], rng: random.Random) -> str:
    start, stop = rng.choice(tags or [(0, 1)])
    at = rng.randrange(len(completion))
    return completion[:at] + completion[start:stop] + completion[at:]


def _quotes(completion: str, tags: list[tuple[int, int]], rng: random.Random) -> str:
    return completion.replace('"', "'")


def _line_breaks_lost(completion: str, tags: list[tuple[int, int]], rng: random.Random) -> str:
    places = [match.start() for match in re.finditer("\n", completion)] or [len(completion)]
    at = rng.choice(places)
    return completion[:at] + completion[at + 1 :]


MUTATIONS: tuple[Callable[[str, list[tuple[int, int]], random.Random], str], ...] = (
    _character_lost, _character_more, _character_other, _characters_swapped, _piece_lost, _piece_twice, _cut,
    _beginning_lost, _tag_lost, _tag_twice, _tag_elsewhere, _quotes, _line_breaks_lost,
)  # fmt: skip


def squeezed(family: Family, completion: str) -> str:
    """Remove blanks, and parts of the notation that are optional or have several forms."""
    completion = re.sub(r"\s+", "", completion)
    if "pythonic" in family.name or family.name in ("lfm2", "olmo3"):  # Python lets a comma follow the last item
        completion = re.sub(r",([)\]}])", r"\1", completion)
    completion = re.sub(r'("tool_call_id":|index=)"[^"]*"', r'\1"0"', completion)
    if family.name == "muse_glimmer":
        completion = re.sub(r"(<\|start\|>assistant)?to=[\w./-]+<\|message\|>", "", completion)
    completion = re.sub(r'(<\|"\|>|<escape>)([^<]*)\1:', r"\2:", completion)  # Gemma's keys may stand bare
    completion = re.sub(
        r"(functions\.[\w-]+|\b[\w-]+):\d+(<\|tool_call_arg)", r"\1:0\2", completion
    )  # the number of a call
    completion = re.sub(
        r"(<\|channel\|>)?(commentary|analysis)?to=", "to=", completion.removeprefix("<|start|>assistant")
    )
    if family.name == "mistral":
        completion = re.sub(r"(?<=\w)\[ARGS\](?={)", "", completion, count=1)
    for word in ("functions.", "<|constrain|>", "<|channel|>commentary", "<|channel|>analysis"):
        completion = completion.replace(word, "")
    if family.name == "lfm2":  # its strings may have raw line breaks
        completion = completion.replace("\\n", "")
    if family.name == "gpt_oss":
        completion = re.sub(r"(<\|call\|>|<\|end\|>)?$", "", completion)
    return re.sub(r"(to=[\w-]+?)(json|code)?(?=<\|message\|>)", r"\1", completion)


def core(family: Family, completion: str, outer: tuple[str, ...]) -> str:
    """Remove the tags around a call."""
    completion = squeezed(family, completion)
    while True:
        shorter = completion
        for each in outer:
            shorter = shorter.removeprefix(each).removesuffix(each)
        if shorter == completion:
            return completion
        completion = shorter


def recognisable(completion: str, tags: tuple[str, ...]) -> bool:
    """Return whether a whole tag or a tool's name is left, so that a person would recognise a call."""
    return any(tag in completion for tag in tags) or any(re.search(rf"\b{name}\b", completion) for name in TOOLS)


def check_runs(family: Family, turn: ParsedTurn, outer: tuple[str, ...], completion: str) -> None:
    for call in turn.calls:
        if not call.status.runs:
            assert call.arguments is None
            continue
        rendered = family.render([(call.name or "", dict(call.arguments or {}))])
        assert core(family, call.raw, outer) == core(family, rendered, outer), (completion, call)


@pytest.mark.parametrize("name", NAMES)
def test_a_mutated_call_has_a_status_and_is_not_repaired(name: str) -> None:
    family, rng = CALL_FAMILIES[name], random.Random(f"mutated {name} {SEED}")
    calls = getattr(get_tool_parser(name, family.tokenizer(True)), "calls", None)
    tags = tuple(sorted({*family.control, *(calls.tags if calls else ())}, key=len, reverse=True))
    outer = tuple(squeezed(family, tag) for tag in (calls.tags[:2] if calls else ()))
    outer += ("[", "]", ",", ";", "functools", "```json", "```")
    found: Counter[str] = Counter()
    for _ in range(COUNT):
        given = random_calls(family, rng)
        completion = family.render(given)
        places = [match.span() for match in re.finditer("|".join(map(re.escape, tags)), completion)] if tags else []
        mutated = rng.choice(MUTATIONS)(completion, places, rng)
        by_token = rng.random() < 0.7
        schemas = {tool: {"type": "object"} for tool in TOOLS}
        schemas |= _schemas(given)
        ids = ids_of(family, mutated, by_token)
        strict, lenient = (
            parse(family, ids, tools=schemas, by_token=by_token, lenient=lenient) for lenient in (False, True)
        )
        for turn in (strict, lenient):
            check_runs(family, turn, outer, mutated)
            statuses = {call.status for call in (*turn.calls, *turn.suspects)}
            assert statuses or not recognisable(mutated, tags), (mutated, turn)
        assert all(call.status != CallStatus.LENIENT for call in strict.calls)
        assert (strict.text, strict.reasoning, strict.suspects) == (lenient.text, lenient.reasoning, lenient.suspects)
        assert len(strict.calls) == len(lenient.calls)
        for one, other in zip(strict.calls, lenient.calls, strict=True):
            repaired = (one.status, other.status) == (CallStatus.MALFORMED, CallStatus.LENIENT)
            unfit = other.reason.startswith("The arguments do not fit the tool's schema: ")  # after a repair
            assert repaired or one == (replace(other, reason=one.reason) if unfit else other)
        found.update(call.status for call in (*lenient.calls, *lenient.suspects))
    print(f"{name}: {COUNT} mutated calls, {dict(found)}")
    assert found[CallStatus.MALFORMED] > COUNT / 5


def _schemas(calls: list[Call]) -> dict[str, Any]:
    names = {bool: "boolean", int: "integer", str: "string", list: "array", dict: "object", type(None): "null"}
    return {
        name: {"type": "object", "properties": {key: {"type": names[type(value)]} for key, value in given.items()}}
        for name, given in calls
    }
