"""The limits of the code: no import cycles, no engine names in the core, few loose modules, short import chains."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tito_engines.spec import names

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def house() -> Any:
    spec = importlib.util.spec_from_file_location("house", ROOT / "tools" / "house.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_core_and_suite_name_no_engine(house: Any) -> None:
    assert all(house.ENGINES.fullmatch(name) for name in names()), "tools/house.py looks for every installed engine"
    assert house.engine_names(ROOT / "src") == []


def test_no_modules_import_each_other(house: Any) -> None:
    assert house.cycles() == []


def test_the_code_is_within_all_limits(house: Any) -> None:
    assert house.problems(ROOT / "src") == []


def test_a_long_chain_of_imports_is_reported(house: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = house.longest_chain("tito_core.model")
    steps = zip(("tito_core.model", *chain), chain, strict=False)
    assert all(after in house.imports().find_modules_directly_imported_by(before) for before, after in steps)
    monkeypatch.setattr(house, "MOST_DEPTH", len(chain) - 1)
    [problem] = house.problems(ROOT / "src")
    assert f"import depth {len(chain)}" in problem
    assert chain[-1] in problem


def test_a_ninth_loose_module_is_reported(house: Any, tmp_path: Path) -> None:
    (tmp_path / "tito_core").mkdir()
    for name in (*"abcdefgh", "__init__"):
        (tmp_path / "tito_core" / f"{name}.py").touch()
    assert house.problems(tmp_path) == []
    (tmp_path / "tito_core" / "i.py").touch()
    assert house.problems(tmp_path) == ["9 modules directly in tito_core, most 8: a, b, c, d, e, f, g, h, i"]


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
def test_an_engine_name_is_found_in_any_position(house: Any, source: str) -> None:
    assert house.named(source)


def test_docstrings_and_comments_may_cite_an_engine(house: Any) -> None:
    source = '"""As vLLM 0.32 does."""\nx = 1  # SGLang, too\n"""Of vLLM."""\ndef f():\n    """SGLang."""\n'
    assert not house.named(source)


def test_lines_of_code_are_counted_without_docstrings_comments_and_blanks(house: Any) -> None:
    assert (
        house.code_lines(
            '"""Two\nlines."""\n\n# One.\nx = (\n    1  # two\n)\n\ndef f():\n    """Say."""\n    return x\n'
        )
        == 5
    )
