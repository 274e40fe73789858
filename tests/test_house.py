"""The laws of the house: no import cycles, no engine names in the core."""

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


def test_the_code_is_within_its_laws(house: Any) -> None:
    assert all(house.ENGINES.fullmatch(name) for name in names()), "tools/house.py looks for every installed engine"
    assert list(house.engine_names(ROOT / "src")) == []
    assert house.cycles() == []


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
