"""Write docs/parsers.md from docs/parsers.json, docs/parsers_cases.json (results) and docs/parsers.toml (reasons)."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cases_page import ENGINES, known_cases, written

DOCS = Path(__file__).resolve().parents[3] / "docs"
FOREIGN = Path(__file__).with_name("foreign.md")
RESULTS, REASONS, PAGE = DOCS / "parsers.json", DOCS / "parsers.toml", DOCS / "parsers.md"
Results = dict[str, dict[str, dict[str, Any]]]
FATES = ("invented", "broken arguments", "as it was", "no call", "hung")
INTRODUCTION = """# How parsers differ

Our parsers compared with those inside the real engines, over turns drawn from a seed: {turns} sound and {turns} damaged
ones of each format. Written by `tests/parsing/prove/differential.py`, which runs in an engine's own environment
(`tito engine install` makes it); `docs/parsers.json` has every count, commit and date. {versions}.

## Sound turns

How many turns give the same names and arguments. Ours read {wrong} of all {all} turns wrongly.

| format | {engines} |
| --- | --- | --- |
"""
DAMAGED = """
## Damaged turns

Each is a sound turn of two calls (one in formats that allow no more) in which one thing of the last call is broken: cut
off, a character or a tag lost, a comma too many, single quotes. In per cent:

- *reported*: the parser returns a malformed call with its tokens and a reason, and the call does not run. Engines
  cannot report one.
- *invented*: the parser returns a call that the turn never held, and the call would run.
- *broken arguments*: the parser returns a call whose arguments are not JSON, and leaves it to the client.
- *as it was*: the parser returns both calls as if nothing were wrong.
- *no call*: the broken call became text, or vanished.

Where our parser returns no call, the damage removed the markup that makes text a call. Ours repaired {repaired}.

"""


def known() -> Results:
    """Return the results so far, by engine and format."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}


def write_page(results: Results) -> None:
    """Write the page."""
    ran = [found for of_one in results.values() for found in of_one.values() if "sound" in found]
    versions = " and ".join(
        f"{ENGINES[engine]} {next(found['version'] for found in results[engine].values() if 'version' in found)}"
        for engine in ENGINES
        if engine in results
    )
    page = INTRODUCTION.format(
        turns=f"{min(found['turns'] for found in ran):,}",
        versions=versions,
        wrong=sum(found["sound"]["ours_wrong"] for found in ran) or "none",
        all=f"{sum(found['turns'] for found in ran):,}",
        engines=" | ".join(ENGINES.values()),
    )
    formats = sorted({name for of_one in results.values() for name in of_one})
    page += "".join(
        f"| `{name}` | {' | '.join(_agreed(results.get(engine, {}).get(name)) for engine in ENGINES)} |\n"
        for name in formats
    )
    page += "\n## What differs, and why\n" + "".join(_differences(results))
    repaired = sum(len(found["damaged"]["repaired"]) for found in ran)
    page += DAMAGED.format(repaired=f"{repaired:,} of them" if repaired else "none")
    page += "".join(_damage(results))
    page += "".join(written(known_cases(), tomllib.loads(REASONS.read_text(encoding="utf-8"))))
    PAGE.write_text(page + FOREIGN.read_text(encoding="utf-8"), encoding="utf-8")


def _agreed(found: dict[str, Any] | None) -> str:
    if found is None:
        return "not run yet"
    if "not_compared" in found:
        return "has none"
    sound = found["sound"]
    return "all" if sound["agree"] == sound["turns"] else f"{sound['agree']:,} of {sound['turns']:,}"


def _differences(results: Results) -> Iterator[str]:
    reasons = tomllib.loads(REASONS.read_text(encoding="utf-8"))
    for engine, of_one in results.items():
        for name, found in sorted(of_one.items()):
            for kind, count in found.get("sound", {}).get("differ", {}).items():
                yield f"\n**{ENGINES[engine]}, `{name}`: {kind}** ({count:,} turns). "
                yield _reason(reasons, f"{engine} {name}", kind) + "\n"
                if example := found["sound"]["examples"].get(kind):
                    yield f"\n```text\n{example[0]}\n{ENGINES[engine]}: {example[1]}\n```\n"


def _reason(reasons: dict[str, str], where: str, kind: str) -> str:
    return reasons.get(f"{where}: {kind}") or reasons.get(where) or "No reason was given yet."


def _damage(results: Results) -> Iterator[str]:
    for engine, of_one in results.items():
        heads = ("format", "ours: reported", "no call", f"{ENGINES[engine]}: {FATES[0]}", *FATES[1:], "raised")
        yield f"### {ENGINES[engine]}\n\n| {' | '.join(heads)} |\n"
        yield "| --- " * len(heads) + "|\n"
        for name, found in sorted(of_one.items()):
            if "damaged" in found:
                damaged = found["damaged"]
                ours = [_per_cent(damaged["ours"].get(fate, 0), damaged["turns"]) for fate in ("reported", "no call")]
                theirs = [_per_cent(damaged["theirs"].get(fate, 0), damaged["turns"]) for fate in FATES]
                raised = sum(count for fate, count in damaged["theirs"].items() if fate.startswith("raised"))
                yield f"| `{name}` | {' | '.join([*ours, *theirs, _per_cent(raised, damaged['turns'])])} |\n"
        yield "\n"


def _per_cent(count: int, whole: int) -> str:
    share = 100 * count / whole
    return "0" if not count else f"{share:.1f}" if share < 1 or 99 < share < 100 else f"{share:.0f}"


if __name__ == "__main__":
    write_page(known())
