"""Measure the code: its size, its imports, and the engine names in the core.

    python tools/house.py [--check]

`--check` exits with 1 for import cycles and engine names in the core, which are laws of the house. The rest is
reported: lines of code (without docstrings, comments and blanks), files, modules with a single importer, the longest
chain of imports. What a turn runs through is counted by benchmarks/warm_turn.py.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import grimp

SRC = Path(__file__).parents[1] / "src"
PACKAGES = sorted(path.parent.name for path in SRC.glob("*/__init__.py"))
NEUTRAL = ("strands_tito", "tito_core")
"""Packages that must not name an engine."""
ENGINES = re.compile("vllm|sglang", re.IGNORECASE)
MOST_DEPTH = 16
"""What a chain of imports below `tito_core.model` should not exceed."""
UNCOUNTED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def main() -> int:
    """Print the figures; with --check, the problems."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 for import cycles and engine names")
    found = [f"import cycle: {' <-> '.join(group)}" for group in cycles()]
    found += [f"engine name: {place}" for place in engine_names(SRC)]
    if parser.parse_args().check:
        print("\n".join(found) or "No import cycles, no engine names.")
        return int(bool(found))
    lines = {path: code_lines(path.read_text("utf-8")) for path in sorted(SRC.rglob("*.py"))}
    figures = {
        "files": len(lines),
        "code lines": sum(lines.values()),
        "files of the core": sum("tito_core" in path.parts for path in lines),
        "code lines of the core": sum(count for path, count in lines.items() if "tito_core" in path.parts),
        "modules with one importer": len(single_importers()),
        f"import depth (should be at most {MOST_DEPTH})": len(longest_chain("tito_core.model")),
    }
    print(*(f"{name:38} {value:7,}" for name, value in figures.items()), *found, sep="\n")
    return 0


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


def engine_names(src: Path) -> Iterator[str]:
    """Yield `file:line name` of every identifier, string or file name with an engine name; docstrings may have them."""
    for path in (path for package in NEUTRAL for path in sorted((src / package).rglob("*.py"))):
        yield from (f"{path.relative_to(src)}:{line} {name[:60]!r}" for line, name in named(path.read_text("utf-8")))
        if ENGINES.search(path.name):
            yield f"{path.relative_to(src)}:0 the file name"


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
    """Return the import graph, with imports inside functions, without those for type checkers only."""
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


def cycles() -> list[list[str]]:
    """Return each group of modules that import each other."""
    circular = [module for module in sorted(imports().modules) if module in below(module)]
    groups = {frozenset(other for other in below(module) if module in below(other)) for module in circular}
    return sorted(sorted(group) for group in groups)


def single_importers() -> list[str]:
    """Return the modules that exactly one other imports."""
    return [each for each in imports().modules if len(imports().find_modules_that_directly_import(each)) == 1]


@cache
def longest_chain(module: str) -> tuple[str, ...]:
    """Return the longest chain of imports below a module, which skips cycles."""
    onward = [one for one in sorted(imports().find_modules_directly_imported_by(module)) if module not in below(one)]
    return max(((one, *longest_chain(one)) for one in onward), key=len, default=())


if __name__ == "__main__":
    sys.exit(main())
