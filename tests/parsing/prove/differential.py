"""Compare our parsers with those in an engine's package, on valid and on damaged turns.

Runs in the engine's own environment. On valid turns both must return the same names and arguments. On damaged turns it
counts the results: "reported" (a malformed call, which no engine has), "no call" (the call became text), "as it was" (a
call of the turn is returned as if nothing were wrong), "invented" (a call that the turn does not contain), "broken
arguments" (a call whose arguments are not JSON). The results are kept in evidence/parsers.json, from which
evidence/parsers.md is written; a format with results for the current code is not run again.

    ENGINE_ENVIRONMENT/bin/python tests/parsing/prove/differential.py vllm|sglang [--turns 5000] [--formats NAME ...]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import math
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import parsing_only  # before all of ours
from generated import Turn, damaged, sound
from parsers_page import RESULTS, known, write_page
from theirs import ENGINES, Theirs, version_of

from parsing.families import CALL_FAMILIES, Call, Family, ids_of, schema_of
from tito_core.parsing import CallStatus, get_tool_parser

LONGEST_S = 1.0
"""CPU seconds; a parser that takes longer for one turn counts as hung."""
LONGEST_EXAMPLE = 400
CODE = ("src/tito_core/parsing", "tests/parsing/families.py", "tests/parsing/prove/generated.py")


def ours(family: Family) -> Callable[[Turn, list[int]], tuple[list[Call], bool]]:
    parser = get_tool_parser(family.name, family.tokenizer(True))

    def parse(turn: Turn, ids: list[int]) -> tuple[list[Call], bool]:
        session = parser.start((), {name: schema_of(given) for name, given in turn.calls})
        session.feed(ids)
        read = session.finish(truncated=False)
        good = [(c.name or "", dict(c.arguments or {})) for c in read.calls if c.status == CallStatus.OK]
        return good, len(good) < len(read.calls)

    return parse


def same(one: Any, other: Any) -> bool:
    """Compare values; 1 and 1.0 are one number, true and 1 are not."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, int | float) and isinstance(other, int | float):
        return one == other or math.isclose(one, other, rel_tol=1e-15)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return type(one) is type(other) and one == other


def how(one: Any, other: Any) -> str:
    """Name the first difference between two values that are not the same."""
    if isinstance(one, str) and isinstance(other, str):
        return "blanks lost" if one.strip() == other.strip() else "another string"
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if len(one) != len(other):
            return "items lost"
        return next(how(a, b) for a, b in zip(one, other, strict=True) if not same(a, b))
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return "other keys"
        return next(how(one[key], other[key]) for key in one if not same(one[key], other[key]))
    shown = repr(one) if one in ("null", None) else type(one).__name__
    return f"{shown} read as {type(other).__name__}"


def attempted(theirs: Theirs, turn: Turn) -> list[Call] | str:
    signal.signal(signal.SIGVTALRM, _too_long)
    signal.setitimer(signal.ITIMER_VIRTUAL, LONGEST_S)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return theirs(turn)
    except json.JSONDecodeError:
        return "broken arguments"
    except TimeoutError:
        return "hung"
    except Exception as error:
        return f"raised {type(error).__name__}"
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _too_long(*_: object) -> None:
    raise TimeoutError


def fate(found: list[Call] | str, turn: Turn, reported: bool = False) -> str:
    """Classify what a parser made of a damaged turn."""
    if isinstance(found, str):
        return found
    if any(not any(same(call, one) for one in turn.calls) for call in found):
        return "invented"
    if reported:
        return "reported"
    return "as it was" if len(found) == len(turn.calls) else "no call"


def on_sound(theirs: Theirs, family: Family, count: int) -> dict[str, Any]:
    """Count agreement and differences on valid turns; keep the shortest example of each difference."""
    mine = ours(family)
    agree, wrong = 0, 0
    differ: Counter[str] = Counter()
    examples: dict[str, list[str]] = {}
    for turn in sound(family, count):
        good, bad = mine(turn, ids_of(family, turn.text))
        wrong += bad or not same(good, turn.calls)
        found = attempted(theirs, turn)
        if not isinstance(found, str) and same(found, good):
            agree += 1
            continue
        kind = found if isinstance(found, str) else how(good, found)
        differ[kind] += 1
        if len(turn.text) < len(examples.get(kind, [" " * LONGEST_EXAMPLE])[0]):
            examples[kind] = [turn.text, repr(found)[:LONGEST_EXAMPLE]]
    return {"turns": count, "agree": agree, "ours_wrong": wrong, "differ": dict(differ), "examples": examples}


def on_damaged(theirs: Theirs, family: Family, count: int) -> dict[str, Any]:
    """Count the results of both on damaged turns; keep those that ours read as if nothing were wrong."""
    mine = ours(family)
    fates: dict[str, Counter[str]] = {"ours": Counter(), "theirs": Counter()}
    repaired = []
    for turn in damaged(family, count):
        good, bad = mine(turn, ids_of(family, turn.text))
        fates["ours"][fate(good, turn, bad)] += 1
        fates["theirs"][fate(attempted(theirs, turn), turn)] += 1
        if fate(good, turn, bad) in ("invented", "as it was"):
            repaired.append([turn.damage, turn.text, repr(good)])
    return {"turns": count, **{who: dict(found.most_common()) for who, found in fates.items()}, "repaired": repaired}


def compare(engine: str, family: Family, count: int) -> dict[str, Any]:
    """Compare one format."""
    began = time.monotonic()
    try:
        theirs = ENGINES[engine](family)
    except Exception as error:
        return {"not_compared": f"{type(error).__name__}: {str(error)[:200]}"}
    found = {"sound": on_sound(theirs, family, count), "damaged": on_damaged(theirs, family, count)}
    return {**found, "seconds": round(time.monotonic() - began), "version": version_of(engine)}


def commit() -> str:
    """Return the last commit of the compared code."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=parsing_only.ROOT, check=True, text=True, capture_output=True
        ).stdout.strip()

    return git("log", "-1", "--format=%h", "--", *CODE) + (
        " with changes" if git("status", "--porcelain", *CODE) else ""
    )


def main() -> None:
    """Compare, save and print."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("engine", choices=ENGINES)
    arguments.add_argument("--turns", type=int, default=5000)
    arguments.add_argument("--formats", nargs="+", default=sorted(CALL_FAMILIES))
    options = arguments.parse_args()
    logging.disable(logging.CRITICAL)
    made_of = {"commit": commit(), "turns": options.turns}
    for name in options.formats:
        before = known().get(options.engine, {}).get(name, {})
        if {key: before.get(key) for key in made_of} == made_of:
            continue
        found = {
            **made_of,
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            **compare(options.engine, CALL_FAMILIES[name], options.turns),
        }
        print(name, json.dumps(found, ensure_ascii=False)[:600], flush=True)
        results = known()  # another engine's run may have written in the meantime
        results.setdefault(options.engine, {})[name] = found
        RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        write_page(results)


if __name__ == "__main__":
    main()
