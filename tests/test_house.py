"""The laws of the house: no import cycles, no engine names in the core; the printed reference."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from pydoc import locate
from typing import Any

import pytest

from tito_engines.spec import names

ROOT = Path(__file__).parents[1]


def tool(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def house() -> Any:
    return tool("house")


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


LISTED = re.compile(r"^::: (\S+)(?:\n    options:\n      members: \[(.*)\])?", re.MULTILINE)


def test_the_reference_is_printed_without_a_site() -> None:
    reference = tool("reference")
    listed = [found for page in (ROOT / "docs/api").glob("*.md") for found in LISTED.findall(page.read_text("utf-8"))]
    for name, members in listed:
        if name != "strands_tito.integrations.verl_loop":  # it subclasses a class of verl, which is not installed here
            printed = "\n".join(reference.described(name, locate(name)))
            assert printed.startswith(name), name
            assert all(f"\n{name}.{each}" in printed for each in filter(None, members.split(", "))), (name, members)
