"""Core and suite name no engine: whatever knows one lives in its own package, and is found by entry points."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tito_core.engine.spec import names

ENGINES = names()
SRC = Path(__file__).parents[1] / "src"
FILES = sorted(path for package in ("tito_core", "tito_conformance") for path in (SRC / package).rglob("*.py"))


def words(source: str) -> Iterator[tuple[int, str]]:
    """Yield every identifier and string of a source with its line; docstrings and comments may cite engines."""
    tree = ast.parse(source)
    sentences = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if id(node) in sentences and isinstance(node, ast.Constant):
            continue
        for _, value in ast.iter_fields(node):
            for word in value if isinstance(value, list) else [value]:
                if isinstance(word, bytes):
                    word = word.decode("latin-1")
                if isinstance(word, str):
                    yield getattr(node, "lineno", 0), word


def named(source: str) -> list[tuple[int, str]]:
    return [(line, word) for line, word in words(source) if any(name in word.lower() for name in ENGINES)]


def test_both_engines_are_installed() -> None:
    assert {"vllm", "sglang"} <= {*ENGINES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
def test_a_module_names_no_engine(path: Path) -> None:
    found = [f"{path}:{line}: {word!r}" for line, word in named(path.read_text(encoding="utf-8"))]
    assert not found, "Move it to the engine's own package: " + "; ".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "import tito_vllm",
        "from tito_sglang.wire import read",
        "import wire as vllm_wire",
        "def of_sglang(): pass",
        "class VLLMWire: pass",
        "def f(vllm=None): pass",
        "f(sglang=1)",
        "args.sglang_router_ip",
        "kind = 'vllm'",
        "kind = f'{a} of SGLang'",
        "kind = b'vllm'",
        "match a:\n    case {'b': vllm}:\n        pass",
        "def f():\n    global vllm_state",
    ],
)
def test_a_name_is_noticed_wherever_it_stands(source: str) -> None:
    assert named(source)


def test_docstrings_and_comments_may_cite_an_engine() -> None:
    assert not named('"""As vLLM 0.32 does."""\nx = 1  # SGLang, too\n"""Of vLLM."""\ndef f():\n    """SGLang."""\n')
