"""Compare our parsers with an engine's on written cases, ours (`documented.json`) or other files of the same form.

A file has `tools`, JSON Schemas by tool name, and `cases`: format, kind, completion, expected calls or null, note, and
maybe tools of its own. In a case of the kind "given", which another project wrote without saying which calls it holds,
our calls are compared with the engine's. evidence/parsers_cases.json keeps the results, evidence/parsers.md shows them.

    ENGINE_ENVIRONMENT/bin/python tests/parsing/prove/by_cases.py vllm|sglang [--name documented] [--file FILE]
"""

from __future__ import annotations

import argparse
import json
import logging
from collections import defaultdict
from pathlib import Path
from typing import Any

import parsing_only  # before all of ours
import theirs
from cases_page import CASES, KINDS, Count, known_cases
from differential import attempted, same
from generated import Turn
from parsers_page import known, write_page
from theirs import ENGINES

from parsing.families import CALL_FAMILIES, Call, ids_of, parse

DOCUMENTED = parsing_only.ROOT / "tests" / "parsing" / "documented.json"


def ours(name: str, completion: str, tools: dict[str, Any], lenient: bool) -> tuple[list[Call], bool]:
    """Return the calls that would run, and whether anything has a status."""
    family = CALL_FAMILIES[name]
    turn = parse(family, ids_of(family, completion), tools=tools, lenient=lenient)
    return [(c.name or "", dict(c.arguments or {})) for c in turn.calls if c.status.runs], bool(turn.records)


def counted(engine: str, file: Path) -> dict[str, Count]:
    """Return the counts of each format."""
    given = json.loads(file.read_text(encoding="utf-8"))
    tools = dict(given["tools"])
    theirs.tools_of = lambda turn: [
        {"type": "function", "function": {"name": name, "description": "", "parameters": schema}}
        for name, schema in tools.items()
    ]
    found: dict[str, Count] = defaultdict(lambda: defaultdict(int))
    parsers: dict[str, theirs.Theirs | None] = {}
    for name, kind, completion, expected, note, *own in given["cases"]:
        tools = own[0] if own else given["tools"]
        if name not in parsers:
            try:
                parsers[name] = ENGINES[engine](CALL_FAMILIES[name])
            except LookupError:
                parsers[name] = None
        parser = parsers[name]
        result = None if parser is None else attempted(parser, Turn(completion, []))
        read = [] if result is None or isinstance(result, str) else [list(call) for call in result]
        right = read if kind == "given" else expected
        count = found[name]
        count[kind] += 1
        has_status = True
        for mode in ("strict", "lenient"):
            calls, has_status = ours(name, completion, tools, mode == "lenient")
            as_lists = [list(call) for call in calls]
            if kind != "given" or right:
                count[f"{kind} {mode}"] += same(as_lists, right) if right else bool(calls)
            lost = kind in ("loose", "given") and mode == "lenient" and right and same(read, right)
            if lost and not same(as_lists, right):
                count.setdefault("missed", []).append(note or completion[:120])
        count["silent"] += not has_status and (
            kind in ("sound", "damaged", "loose") or (kind == "given" and bool(read))
        )
        if parser is None:
            count["engine"] = "none"
        else:
            count[f"{kind} engine"] += bool(read) if not right or kind == "given" else same(read, right)
    return {name: dict(count) for name, count in sorted(found.items())}


def main() -> None:
    """Compare, save and print."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("engine", choices=ENGINES)
    arguments.add_argument("--name", default="documented")
    arguments.add_argument("--file", type=Path, default=DOCUMENTED)
    options = arguments.parse_args()
    logging.disable(logging.CRITICAL)
    found = counted(options.engine, options.file)
    results = known_cases()
    results.setdefault(options.name, {})[options.engine] = found
    CASES.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    write_page(known())
    print(options.engine, sum(sum(count.get(kind, 0) for kind in KINDS) for count in found.values()), "cases")


if __name__ == "__main__":
    main()
