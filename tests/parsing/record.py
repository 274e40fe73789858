"""Write tests/parsing/recorded.json: how each format parses valid, damaged and cut turns, with the exact reasons.

    python -m parsing.record hermes       (from tests/; without names: every format)

Policies are trained on these reasons, so they should not change by accident. The turns of a format that it has are
parsed anew. Of generated turns of a new format it keeps one for each combination of statuses and reasons. Write a
turn by hand as its completion, calls (whose arguments make the tools' schemas), `by_token` and `truncated`.
"""

import json
import random
import re
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from parsing.families import CALL_FAMILIES, Family, ids_of, schema_of
from parsing.prove.generated import damaged, sound
from tito_core.parsing import ParsedTurn, get_tool_parser

PATH = Path(__file__).with_name("recorded.json")
TURNS = 250
QUOTED = re.compile(r"""schema: .* is not of type|(?<!\w)'[^']*'|(?<!\w)"[^"]*"|\d+""", re.DOTALL)
"""What reasons quote of a call: keys and values that do not fit, texts, which no apostrophe begins, and numbers."""


def read(family: Family, turn: dict[str, Any]) -> ParsedTurn:
    """Parse a recorded turn."""
    tools = {name: schema_of(given) for name, given in turn["calls"]}
    session = get_tool_parser(family.name, family.tokenizer(turn["by_token"])).start((), tools)
    session.feed(ids_of(family, turn["completion"], turn["by_token"]))
    return session.finish(truncated=turn["truncated"])


def shown(turn: ParsedTurn) -> dict[str, Any]:
    """Write a turn as JSON."""
    calls = [
        [str(one.status), one.name, one.arguments and dict(one.arguments), one.start, one.stop, one.reason, one.id]
        for one in turn.calls
    ]
    suspects = {"suspects": [[one.name, one.start, one.stop] for one in turn.suspects]} if turn.suspects else {}
    return {
        "reasoning": turn.reasoning, "text": turn.text, "closed": turn.reasoning_closed, "calls": calls, **suspects
    }  # fmt: skip


def generated(family: Family) -> list[dict[str, Any]]:
    """Return turns of a new format: whole, damaged, cut, and with reasoning."""
    rng, kept = random.Random(family.name), dict[str, dict[str, Any]]()
    opened, closed = family.think or ("", "")
    for one, other in zip(sound(family, TURNS, 2), damaged(family, TURNS, 3), strict=True):
        cut = rng.randrange(len(one.text) + 1)
        texts = one.text, other.text, f"{opened}Hm.{closed}{one.text}", one.text[:cut], one.text[cut:]
        for completion in texts:
            turn = {
                "completion": completion, "calls": [*one.calls, *other.calls], "by_token": rng.random() < 0.7,
                "truncated": rng.random() < 0.3,
            }  # fmt: skip
            found = shown(read(family, turn))
            reasons = sorted((call[0], QUOTED.sub("_", call[5])) for call in found["calls"])
            kept.setdefault(json.dumps([bool(found["reasoning"]), bool(found["text"].strip()), reasons]), turn)
    return list(kept.values())


def main(names: Collection[str]) -> None:
    """Record these formats, and keep the others' turns."""
    kept = json.loads(PATH.read_text(encoding="utf-8"))
    for name in names:
        family = CALL_FAMILIES[name]
        turns = kept.get(name) or generated(family)
        kept[name] = [{**turn, "parsed": shown(read(family, turn))} for turn in turns]
    lines = [
        f"{json.dumps(name)}: [\n" + ",\n".join(json.dumps(each, ensure_ascii=False) for each in kept[name]) + "\n]"
        for name in sorted(kept)
    ]
    PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:] or CALL_FAMILIES)
