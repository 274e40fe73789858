"""The names of the engines' own `--tool-call-parser` are those of `parsing.engine_names`."""

from __future__ import annotations

import re

import pytest

from parsing.engine_names import ENGINE_NAMES
from tito_engines import ensure, find

pytestmark = pytest.mark.engine
LISTS = {
    "vllm": ("vllm/tool_parsers/__init__.py", r'^    "([^"]+)": \('),
    "sglang": ("sglang/srt/function_call/parser_names.py", r'^    "([^"]+)",$'),
}


@pytest.mark.parametrize("engine", LISTS)
def test_every_name_of_the_engine_is_known(engine: str) -> None:
    path, pattern = LISTS[engine]
    [source] = ensure(find(engine)).root.glob(f"lib/python*/site-packages/{path}")
    assert sorted(re.findall(pattern, source.read_text(encoding="utf-8"), re.MULTILINE)) == sorted(ENGINE_NAMES[engine])
