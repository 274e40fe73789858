"""An installed package whose entry point cannot be used is named, with what it raised and what to do."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tito_core.entry_points
from strands_tito import cli
from strands_tito.errors import BrokenEntryPointError, InvalidValueError, TokenizerError, UnknownParserError
from support.distributions import write_distribution
from support.scripted import tokenizer
from tito_conformance.testing import find_wire
from tito_core.backend import create_backend
from tito_core.backend.registry import option_names
from tito_core.chat.tokenizer import load_tokenizer
from tito_core.parsing.registry import get_tool_parser
from tito_engines import find
from tito_engines.spec import installed

URL = "http://localhost:8000"
USES: dict[str, list[Callable[[str], Any]]] = {
    "tito.backends": [lambda name: create_backend(name, URL), option_names],
    "tito.wires": [find_wire],
    "tito.engines": [find, lambda _: installed()],
    "tito.tool_parsers": [lambda name: get_tool_parser(name, tokenizer())],
    "tito.tokenizers": [load_tokenizer],
    "tito.commands": [lambda name: tito_core.entry_points.load("tito.commands", name)],
}
BREAKS = {
    "lacks": ("needs = 1 + 1\nimport no_such_module", "broken_offer:VALUE", r"\(ModuleNotFoundError: .*no_such_module"),
    "raises": ("raise SyntaxError('cut off')", "broken_offer:VALUE", r"\(SyntaxError: cut off"),
    "moved": ("", "broken_offer:gone", r"\(AttributeError: .*gone"),
    "module": ("", "broken_offer", "is of type module, not a "),
    "none": ("VALUE = None", "broken_offer:VALUE", "is of type NoneType, not a "),
}


@pytest.fixture(params=BREAKS)
def words(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    source, value, words = BREAKS[request.param]
    points = "".join(f"[{group}]\nbroken = {value}\n" for group in USES)
    monkeypatch.syspath_prepend(str(write_distribution(tmp_path, "broken_offer", source, points)))
    yield words
    sys.modules.pop("broken_offer", None)


@pytest.mark.parametrize(("group", "use"), [(group, use) for group, uses in USES.items() for use in uses])
def test_one_that_is_broken_is_named(group: str, use: Callable[[str], Any], words: str) -> None:
    with pytest.raises(TokenizerError if group == "tito.tokenizers" else BrokenEntryPointError) as raised:
        use("broken")
    broken = raised.value if isinstance(raised.value, BrokenEntryPointError) else raised.value.__cause__
    assert str(broken) in str(raised.value)
    assert raised.match(rf"broken_offer.*{words}.*'broken' in {group} of broken-offer 1\.0.*uninstall it")
    assert str(pickle.loads(pickle.dumps(broken))) == str(broken)


def test_a_broken_command_is_named_and_the_others_work(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    cli.add_commands.__wrapped__()
    assert "BrokenEntryPointError: broken_offer" in (printed := capsys.readouterr().err)
    assert "docs: errors.md#brokenentrypointerror" in printed
    assert {"conformance", "verify"} <= {each.name or each.callback.__name__ for each in cli.app.registered_commands}
    assert "broken" not in {each.name for each in cli.app.registered_commands}


HALF = """
class Half:
    name = "half"

    def __init__(self, base_url, **options):
        pass

    async def generate(self, request):
        pass


def no_parser(tokenizer):
    return Half
"""


def test_what_an_entry_point_makes_is_checked_where_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = "[tito.backends]\nhalf = half_offer:Half\n[tito.tool_parsers]\nhalf = half_offer:no_parser\n"
    monkeypatch.syspath_prepend(str(write_distribution(tmp_path, "half_offer", HALF, points)))
    with pytest.raises(InvalidValueError, match="a Half without `async def` of connect, score, tokenize, abort"):
        create_backend("half", URL)
    with pytest.raises(UnknownParserError, match=r"'half' of an installed package makes a type, which has no start"):
        get_tool_parser("half", tokenizer())


def test_what_is_not_offered_is_none() -> None:
    assert tito_core.entry_points.load("tito.backends", "no such backend") is None
