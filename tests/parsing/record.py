"""Write tests/parsing/recorded.json: how each format parses valid, damaged and cut turns, with the exact reasons.

    python -m parsing.record hermes       (from tests/; without names: every format anew, in minutes)

Policies are trained on these reasons, so they should not change by accident. Of many random turns it keeps one for each
combination of statuses and reasons, and adds those of `parsing.edges`.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from parsing.edges import EDGES
from parsing.families import CALL_FAMILIES, Call, Family, ids_of, schema_of
from parsing.prove.generated import damaged, sound
from tito_core.parsing import ParsedTurn, get_tool_parser

PATH = Path(__file__).with_name("recorded.json")
TURNS = 250
MOST = 30
"""Turns to keep of a format; more only for reasons that none of them has."""


def read(family: Family, completion: str, calls: list[Call], by_token: bool, truncated: bool) -> dict[str, Any]:
    """Parse a turn, and return the result as JSON."""
    tools = {name: schema_of(given) for name, given in calls}
    session = get_tool_parser(family.name, family.tokenizer(by_token)).start((), tools)
    session.feed(ids_of(family, completion, by_token))
    return shown(session.finish(truncated=truncated))


def shown(turn: ParsedTurn) -> dict[str, Any]:
    """Write a turn as JSON."""
    calls = [
        [str(one.status), one.name, one.arguments and dict(one.arguments), one.start, one.stop, one.reason, one.id]
        for one in turn.calls
    ]
    return {"reasoning": turn.reasoning, "text": turn.text, "closed": turn.reasoning_closed, "calls": calls}


QUOTED = re.compile(r"""schema: .* is not of type|(?<!\w)'[^']*'|(?<!\w)"[^"]*"|\d+""", re.DOTALL)
"""What reasons quote of a call: keys and values that do not fit, texts, which no apostrophe begins, and numbers."""


def reasons(found: dict[str, Any]) -> set[tuple[str, bool, str]]:
    """Return status, whether it has a name, and reason of each call of a turn, without the values that are quoted."""
    return {(call[0], bool(call[1]), QUOTED.sub("_", call[5])) for call in found["calls"]}


def signature(found: dict[str, Any]) -> str:
    """Return what distinguishes turns to record."""
    return json.dumps([bool(found["reasoning"]), bool(found["text"].strip()), found["closed"], sorted(reasons(found))])


def candidates(family: Family, rng: random.Random) -> Iterator[tuple[str, list[Call]]]:
    """Generate valid and damaged turns: whole, cut, joined, and with text and reasoning."""
    opened, closed = family.think or ("", "")
    for one, other in zip(sound(family, TURNS, 2), damaged(family, TURNS, 3), strict=True):
        cut = rng.randrange(len(one.text) + 1)
        for completion in (
            one.text,
            other.text,
            f"So. {one.text} Then?" if family.text_before else one.text,
            f"{opened}Hm.{closed}{one.text}",
            f"{opened}{other.text}",
            one.text[:cut],
            one.text[cut:],
            other.text[:cut] + one.text,
        ):
            yield completion, [*one.calls, *other.calls]


def record(family: Family) -> list[dict[str, Any]]:
    """Return the turns of one format to record."""
    rng, seen = random.Random(family.name), set[tuple[str, bool, str]]()
    kept: dict[str, dict[str, Any]] = {}
    edges = [
        entry(family, completion, [("look", {"a": 1, "b": "x"})], by_token, truncated)
        for completion in EDGES.get(family.name, ())
        for by_token, truncated in ((True, False), (True, True), (False, False))
    ]
    for completion, calls in candidates(family, rng):
        by_token, truncated = rng.random() < 0.7, rng.random() < 0.3
        found = read(family, completion, calls, by_token, truncated)
        known, new = kept.get(signature(found)), reasons(found) - seen
        if len(completion) < len(known["completion"]) if known else new or len(kept) < MOST:
            kept[signature(found)] = entry(family, completion, calls, by_token, truncated)
            seen |= new
    return [*kept.values(), *edges]


def entry(family: Family, completion: str, calls: list[Call], by_token: bool, truncated: bool) -> dict[str, Any]:
    """Return the record of one turn."""
    found = read(family, completion, calls, by_token, truncated)
    return {"completion": completion, "calls": calls, "by_token": by_token, "truncated": truncated, "parsed": found}


def main(names: Collection[str]) -> None:
    """Record these formats, and keep the others' turns."""
    kept = json.loads(PATH.read_text(encoding="utf-8"))
    records = {name: record(CALL_FAMILIES[name]) if name in names else kept[name] for name in sorted(CALL_FAMILIES)}
    lines = [
        f"{json.dumps(name)}: [\n" + ",\n".join(json.dumps(each, ensure_ascii=False) for each in turns) + "\n]"
        for name, turns in records.items()
    ]
    PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:] or CALL_FAMILIES)
