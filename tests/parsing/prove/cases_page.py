"""The part of evidence/parsers.md on written cases, from evidence/parsers_cases.json and evidence/parsers.toml."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CASES = Path(__file__).resolve().parents[3] / "evidence" / "parsers_cases.json"
ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
Count = dict[str, Any]
Cases = dict[str, dict[str, dict[str, Count]]]
"""Counts by set of cases, engine and format."""
OURS = "documented"
KINDS = ("sound", "damaged", "draft", "loose", "text", "given")
WRITTEN = """## Written cases

`tests/parsing/documented.json` has {total} answers in all formats as the models' documentation and the engines' bug
trackers show them. The table counts the cases that our parsers ([strict and lenient](tools.md#strict-and-lenient)) and
the engines' read right; for damaged ones and drafts, those in which a call runs.

- *Valid* calls must run in both modes. *Damaged* ones (broken JSON, lost tags, a key twice) and *drafts* in closed
  reasoning must never run.
- *Loose* calls are not as documented, but have one reading.
- *Silent* losses are calls that end as plain text without a status: {silent}.

The author knew our parsers, but not our other tests, and changed some labels after a first run: a call whose last
closing tag is missing counts as loose if lenient mode runs it. `tests/parsing/prove/by_cases.py` writes this section.

"""
GROUPS = ("valid", "damaged, drafts", "loose")
HEADS = ("format", "valid: cases", "ours", "vLLM", "SGLang", "damaged, drafts: cases", "ours", "vLLM", "SGLang",
         "loose: cases", "strict", "lenient", "vLLM", "SGLang")  # fmt: skip
SUITES = """
The next table has the inputs of the engines' own test suites, read by an engine's parsers and by ours. The suites do
not say which calls are valid, so it counts how often ours return the same calls as the engine.

| suite, parsers | cases | the engine reads calls | ours the same, strict | lenient | silent |
| --- | --- | --- | --- | --- | --- |
"""
MISSED = """
### Loose calls that only an engine reads

None is silent: each is malformed, or a [suspect](tools.md#strict-and-lenient) if it has no markup.

| format | case | why not |
| --- | --- | --- |
"""


def known_cases() -> Cases:
    """Return the counts so far."""
    return json.loads(CASES.read_text(encoding="utf-8")) if CASES.exists() else {}


def written(cases: Cases, reasons: dict[str, str]) -> Iterator[str]:
    """Yield the part of the page."""
    both = [cases.get(OURS, {}).get(engine, {}) for engine in ENGINES]
    if not all(both):
        return
    sums = [_sums(of_one) for of_one in both]
    silent = _sum(sums[0], "silent")
    yield WRITTEN.format(total=_sum(sums[0], *KINDS), silent="none" if silent == "0" else silent)
    yield f"| {' | '.join(HEADS)} |\n{'| --- ' * len(HEADS)}|\n"
    for name in both[0]:
        yield _row(f"`{name}`", [of_one[name] for of_one in both])
    yield _row("**all**", sums)
    yield SUITES
    for suite, by_engine in cases.items():
        for engine, of_one in by_engine.items() if suite != OURS else ():
            figures = ("given", "given engine", "given strict", "given lenient", "silent")
            cells = (_sum(_sums(of_one), key) for key in figures)
            yield f"| {suite}, {ENGINES[engine]} | {' | '.join(cells)} |\n"
    yield MISSED
    for name, note in sorted({(name, note) for each in both for name, one in each.items() for note in _missed(one)}):
        reason = reasons.get(f"{name}: {note}") or "No reason was given yet."
        yield f"| `{name}` | {note.replace('|', chr(92) + '|')} | {reason} |\n"


def _missed(count: Count) -> list[str]:
    return list(count.get("missed", ()))


def _row(title: str, both: list[Count]) -> str:
    ours = both[0]
    engines = [None if each.get("engine") == "none" else each for each in both]
    cells = [title, _sum(ours, "sound"), _sum(ours, "sound strict"), *(_sum(each, "sound engine") for each in engines)]
    cells += [_sum(ours, "damaged", "draft"), _sum(ours, "damaged lenient", "draft lenient")]
    cells += [_sum(each, "damaged engine", "draft engine") for each in engines]
    cells += [_sum(ours, kind) for kind in ("loose", "loose strict", "loose lenient")]
    return f"| {' | '.join([*cells, *(_sum(each, 'loose engine') for each in engines)])} |\n"


def _sums(of_one: dict[str, Count]) -> Count:
    totals: Count = {}
    for count in of_one.values():
        for key, value in count.items():
            if isinstance(value, int):
                totals[key] = totals.get(key, 0) + value
    return totals


def _sum(count: Count | None, *keys: str) -> str:
    return "-" if count is None else f"{sum(count.get(key, 0) for key in keys):,}"
