"""The page of mutation scores has counts of survivors; a file next to the tool has the reasons of accepted ones."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).parents[1]
STATUSES = ("killed", "timeout", "survived", "no tests", "not checked")


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tito_mutants_tool", ROOT / "tools" / "mutants.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


def cells(page: str, name: str) -> list[str]:
    [line] = [line for line in page.splitlines() if line.startswith(f"| {name} |")]
    return line.strip("| ").split(" | ")


def test_the_page_is_what_the_tool_writes_and_short(tool: ModuleType) -> None:
    text = tool.PAGE.read_text(encoding="utf-8")
    assert tool.page(tool.written()) == text
    assert set(tool.written()) == set(tool.PACKAGES)
    assert len(text.splitlines()) < 30


def test_the_sums_of_a_row_agree(tool: ModuleType) -> None:
    for name, row in tool.written().items():
        mutants, killed, by_clock, not_run, explained, unexplained = map(int, row[2:8])
        assert mutants == killed + not_run + explained + unexplained, name
        assert by_clock <= killed
        ran = mutants - not_run
        assert row[8] == (f"{killed / ran:.1%}" if ran else "none ran")


def test_every_reason_is_of_a_package_that_is_mutated(tool: ModuleType) -> None:
    for key, reason in tool.explanations().items():
        assert [package for package in tool.PACKAGES.values() if package.mutates(key)], key
        assert reason.strip()


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(statuses=st.lists(st.sampled_from(STATUSES), min_size=1, max_size=30), data=st.data())
def test_a_survivor_without_a_reason_is_only_counted(
    tool: ModuleType, tmp_path: Path, statuses: list[str], data: st.DataObject
) -> None:
    names = [f"tito_core.ledger.turn.x_f__mutmut_{number}" for number in range(len(statuses))]
    found = dict(zip(names, statuses, strict=True))
    survivors = [
        tool.Survivor(name, (f"old{number}",), (f"new{number}",))
        for number, (name, status) in enumerate(found.items())
        if status in ("survived", "no tests")
    ]
    explained = [survivor for survivor in survivors if data.draw(st.booleans())]
    explained_file, page_file = tmp_path / "explained.toml", tmp_path / "page.md"
    lines = [f'"{survivor.key}" = "It is equal."' for survivor in explained]
    needless = "tito_core.ledger.turn.x_gone: x = 2"
    explained_file.write_text("\n".join([*lines, f'"{needless}" = "It was equal."']))
    page_file.write_text(tool.PAGE.read_text(encoding="utf-8"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tool, "EXPLAINED", explained_file)
        patch.setattr(tool, "PAGE", page_file)
        report = tool.report(tool.PACKAGES["ledger"], found, survivors)
    page = page_file.read_text()
    before = tool.PAGE.read_text(encoding="utf-8")
    killed = sum(status in ("killed", "timeout") for status in statuses)
    counts = [len(statuses), killed, statuses.count("timeout"), statuses.count("not checked")]
    assert [int(cell) for cell in cells(page, "ledger")[3:9]] == [
        *counts,
        len(explained),
        len(survivors) - len(explained),
    ]
    assert cells(page, "chat") == cells(before, "chat")
    assert len(page.splitlines()) == len(before.splitlines())
    assert not any(line in page for survivor in survivors for line in (*survivor.removed, *survivor.added))
    assert {line for line in report.splitlines() if line.startswith("+ ")} == {
        f"+ {survivor.added[0]}" for survivor in survivors if survivor not in explained
    }
    assert needless in report
