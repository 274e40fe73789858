"""Measure the code: its size, the files and functions of one turn, and its imports.

    python tools/house.py [--json] [--check] [--src SRC]

- `code_lines`, `core_code_lines`: lines of `src/` and of `src/tito_core` without docstrings, comments and blanks.
- `files`: Python files of `src/`.
- `files_per_turn`, `functions_per_turn`: files and functions of `src/` that run during one warm tool turn: the third of
  a rollout, from `Model.stream` to its last event, over a socket, with a tool call in the answer.
- `import_cycles`: groups of modules that import each other, including imports inside functions, but not imports for
  type checkers only.
- `engine_names_in_core`: engine names in identifiers or strings (docstrings may) of `tito_core` and `strands_tito`.
- `loose_modules`: modules directly in `tito_core`, without `__init__` and `__main__`.
- `import_depth`: length of the longest chain of imports that starts at `tito_core.model`, which is not counted.

`--check` exits with 1 and prints the places of import cycles and engine names, and the longest chain of imports or the
loose modules if they exceed `MOST_DEPTH` or `MOST_LOOSE`. It measures no turn.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import io
import json
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import grimp

ROOT = Path(__file__).parents[1]
PACKAGES = ("strands_tito", "tito_compat", "tito_conformance", "tito_core", "tito_engines", "tito_sglang", "tito_vllm")
NEUTRAL = ("strands_tito", "tito_core")
"""Packages that must not name an engine."""
ENGINES = re.compile("vllm|sglang", re.IGNORECASE)
UNCOUNTED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
MOST_DEPTH = 16
"""Most modules in a chain of imports below `tito_core.model`."""
MOST_LOOSE = 8
"""Most modules directly in `tito_core`."""
TURN = 3
"""The turn of a rollout that is traced: the first processes the context, the second still fills caches."""


def main() -> int:
    """Print the table or the JSON; with --check, the problems."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a limit is exceeded")
    parser.add_argument("--src", type=Path, default=ROOT / "src", help="folder of the sources")
    arguments = parser.parse_args()
    if arguments.check:
        found = problems(arguments.src)
        print("\n".join(found) or "No import cycles or engine names; import depth and loose modules within limits.")
        return 1 if found else 0
    found = measure(arguments.src)
    print(json.dumps(found) if arguments.json else "\n".join(f"{name:20} {value:7,}" for name, value in found.items()))
    return 0


def problems(src: Path) -> list[str]:
    """Return what `--check` prints: one line for each problem."""
    found = [f"import cycle: {' <-> '.join(group)}" for group in cycles()]
    found += [f"engine name: {place}" for place in engine_names(src)]
    chain = longest_chain("tito_core.model")
    if len(chain) > MOST_DEPTH:
        found.append(f"import depth {len(chain)}, most {MOST_DEPTH}: tito_core.model -> {' -> '.join(chain)}")
    loose = loose_modules(src)
    if len(loose) > MOST_LOOSE:
        found.append(f"{len(loose)} modules directly in tito_core, most {MOST_LOOSE}: {', '.join(loose)}")
    return found


def measure(src: Path) -> dict[str, int]:
    """Return all figures."""
    lines = {path: code_lines(path.read_text("utf-8")) for path in sorted(src.rglob("*.py"))}
    core = src / "tito_core"
    files, functions = followed()
    return {
        "code_lines": sum(lines.values()),
        "core_code_lines": sum(count for path, count in lines.items() if core in path.parents),
        "files": len(lines),
        "files_per_turn": files,
        "functions_per_turn": functions,
        "import_cycles": len(cycles()),
        "engine_names_in_core": len(engine_names(src)),
        "loose_modules": len(loose_modules(src)),
        "import_depth": len(longest_chain("tito_core.model")),
    }


def docstrings(tree: ast.AST) -> list[ast.Constant]:
    """Return the docstrings of modules, classes, functions and attributes."""
    bodies = [body for node in ast.walk(tree) if isinstance(body := getattr(node, "body", None), list)]
    lone = [each.value for body in bodies for each in body if isinstance(each, ast.Expr)]
    return [value for value in lone if isinstance(value, ast.Constant) and isinstance(value.value, str)]


def code_lines(text: str) -> int:
    """Return the number of lines with code."""
    counted: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in UNCOUNTED:
            counted.update(range(token.start[0], token.end[0] + 1))
    for words in docstrings(ast.parse(text)):
        counted.difference_update(range(words.lineno, (words.end_lineno or words.lineno) + 1))
    return len(counted)


@cache
def engine_names(src: Path) -> list[str]:
    """Return `file:line name` of every identifier, string or file name with an engine name."""
    found = []
    for package in NEUTRAL:
        for path in sorted((src / package).rglob("*.py")):
            shown = path.relative_to(src)
            found += [f"{shown}:{line} {name[:60]!r}" for line, name in named(path.read_text("utf-8"))]
            if ENGINES.search(path.name):
                found.append(f"{shown}:0 the file name")
    return found


def named(source: str) -> list[tuple[int, str]]:
    """Return each identifier and string of a source with an engine name, and its line."""
    tree = ast.parse(source)
    allowed = {id(words) for words in docstrings(tree)}
    every = ((node, name) for node in ast.walk(tree) if id(node) not in allowed for name in names(node))
    return [(getattr(node, "lineno", 0), name) for node, name in every if ENGINES.search(name)]


def names(node: ast.AST) -> Iterator[str]:
    """Yield the identifiers and strings of one node."""
    for field, value in ast.iter_fields(node):
        if isinstance(value, str) and field != "type_comment":
            yield value
        elif isinstance(value, list):
            yield from (each for each in value if isinstance(each, str))
        elif isinstance(value, bytes):
            yield value.decode("latin-1")


@cache
def imports() -> grimp.ImportGraph:
    """Return the import graph, without imports for type checkers only."""
    return grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True, cache_dir=None)


@cache
def below(module: str) -> frozenset[str]:
    """Return the modules that a module imports, directly or indirectly; itself only if it is in a cycle."""
    reached: set[str] = set()
    waiting = set(imports().find_modules_directly_imported_by(module))
    while waiting:
        one = waiting.pop()
        if one not in reached:
            reached.add(one)
            waiting |= imports().find_modules_directly_imported_by(one)
    return frozenset(reached)


@cache
def cycles() -> list[list[str]]:
    """Return each group of modules that import each other."""
    circular = [module for module in sorted(imports().modules) if module in below(module)]
    groups = {
        frozenset(other for other in circular if other in below(module) and module in below(other))
        for module in circular
    }
    return sorted(sorted(group) for group in groups)


@cache
def longest_chain(module: str) -> tuple[str, ...]:
    """Return the longest chain of imports below a module, which skips cycles."""
    onward = [one for one in sorted(imports().find_modules_directly_imported_by(module)) if module not in below(one)]
    return max(((one, *longest_chain(one)) for one in onward), key=len, default=())


def loose_modules(src: Path) -> list[str]:
    """Return the modules directly in `tito_core`, without `__init__` and `__main__`."""
    return sorted(path.stem for path in (src / "tito_core").glob("*.py") if not path.name.startswith("__"))


def followed() -> tuple[int, int]:
    """Return the number of files and functions of a warm tool turn, traced in another process."""
    command = [sys.executable, __file__, "--follow"]
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    files, functions = json.loads(answer[-1])
    return files, functions


async def follow(port: int) -> tuple[int, int]:
    """Run a rollout on the canned server and trace one of its turns."""
    from conversation import opening, turn
    from tito_core import Policy
    from tito_engines import models

    tokenizer = models.load_tokenizer("smollm2")
    policy = await Policy.connect_async(backend="sglang", base_url=f"http://127.0.0.1:{port}", tokenizer=tokenizer)
    model: Any = policy.model(sampling={"max_new_tokens": 300})
    messages = opening(500)
    for _ in range(TURN - 1):
        await turn(model, messages)
    passed: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and any(f"/{package}/" in frame.f_code.co_filename for package in PACKAGES):
            passed.add((frame.f_code.co_filename, frame.f_code.co_qualname))

    sys.setprofile(note)
    await turn(model, messages)
    sys.setprofile(None)
    await policy.backend.aclose()
    return len({file for file, _ in passed}), len(passed)


if __name__ == "__main__":
    if sys.argv[1:] == ["--follow"]:
        sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "clients")]
        from bench import canned_server

        with canned_server() as served:
            print(json.dumps(asyncio.run(follow(served))))
    else:
        sys.exit(main())
