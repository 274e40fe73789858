"""Write evidence/parsers.md from parsers.json and parsers_cases.json (results) and parsers.toml (reasons) beside it."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cases_page import ENGINES, known_cases, written

DOCS = Path(__file__).resolve().parents[3] / "evidence"
FOREIGN = Path(__file__).with_name("foreign.md")
RESULTS, REASONS, PAGE = DOCS / "parsers.json", DOCS / "parsers.toml", DOCS / "parsers.md"
Results = dict[str, dict[str, dict[str, Any]]]
FATES = ("invented", "broken arguments", "as it was", "no call", "hung")
INTRODUCTION = """# How parsers differ

Do our [tool-call parsers](tools.md) and those of {versions} read the same calls from the same answers?
Each parser reads whole answers, not streams. There are four sets of answers: generated valid ones, generated damaged
ones, cases [written from documentation](#written-cases), and cases by [another author](#cases-by-another-author).
A dash means that the engine has no such parser, or that its package lacks it (vLLM's for `cohere_command`).

`tests/parsing/prove/differential.py` runs the generated answers in an engine's own environment (`tito engine install`
makes it). `evidence/parsers.json` has every count, commit and date.

## Valid answers

The number of answers that give the same names and arguments, of {turns} per format. In {all} comparisons our
parsers read {wrong} wrongly.

| format | {engines} |
| --- | --- | --- |
"""
DAMAGED = """
## Damaged answers

Each is a valid answer with two calls (one in formats that allow no more) and one change in the last call: it is cut
off, a character or a tag is lost, a comma is added, or quotes become single quotes. The tables show per cent:

- *reported*: the parser returns a malformed call with its tokens and a reason, and the call does not run. Engines
  cannot report one.
- *invented*: the parser returns a call that the answer never held, and the call would run.
- *broken arguments*: the parser returns a call whose arguments are not JSON, and leaves it to the client.
- *as it was*: the parser returns all calls as if nothing were wrong.
- *no call*: the broken call became text, or vanished.
- *hung*, *raised*: the parser took more than a second, or raised an exception.

Where our parser returns no call, the damage removed the markup that makes text a call. Our parsers repaired {repaired}.

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
        wrong=sum(found["sound"]["ours_wrong"] for found in ran) or "no answer",
        all=f"{sum(found['turns'] for found in ran):,}",
        engines=" | ".join(ENGINES.values()),
    )
    formats = sorted({name for of_one in results.values() for name in of_one})
    page += "".join(
        f"| `{name}` | {' | '.join(_agreed(results.get(engine, {}).get(name)) for engine in ENGINES)} |\n"
        for name in formats
    )
    page += "\n### What differs, and why\n" + "".join(_differences(results))
    repaired = sum(len(found["damaged"]["repaired"]) for found in ran)
    page += DAMAGED.format(repaired=f"{repaired:,} of them" if repaired else "none")
    page += "".join(_damage(results))
    page += "".join(written(known_cases(), tomllib.loads(REASONS.read_text(encoding="utf-8"))))
    PAGE.write_text(page + FOREIGN.read_text(encoding="utf-8"), encoding="utf-8")


def _agreed(found: dict[str, Any] | None) -> str:
    if found is None:
        return "not run yet"
    if "not_compared" in found:
        return "-"
    sound = found["sound"]
    return "all" if sound["agree"] == sound["turns"] else f"{sound['agree']:,} of {sound['turns']:,}"


def _differences(results: Results) -> Iterator[str]:
    reasons = tomllib.loads(REASONS.read_text(encoding="utf-8"))
    for engine, of_one in results.items():
        for name, found in sorted(of_one.items()):
            by_reason: dict[str, dict[str, int]] = {}
            for kind, count in found.get("sound", {}).get("differ", {}).items():
                by_reason.setdefault(_reason(reasons, f"{engine} {name}", kind), {})[kind] = count
            for reason, kinds in by_reason.items():
                counts = ", ".join(f"{kind} ({count:,})" for kind, count in kinds.items())
                yield f"\n**{ENGINES[engine]}, `{name}`**: {counts}. {reason}\n"
                examples = found["sound"]["examples"]
                if example := next((examples[kind] for kind in kinds if kind in examples), None):
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
