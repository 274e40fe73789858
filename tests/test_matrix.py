"""The wheel of torch that all rows of tools/matrix.py share, as pip downloads it; the tests of a row."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tools import matrix

WHEEL = f"torch-{matrix.CPU_TORCH}+cpu-cp311-cp311-linux_x86_64.whl"


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(matrix, "user_cache_path", lambda name: tmp_path)


def download(*command: str) -> str:
    """Write the wheel slowly, as pip does; fail if it is there, because pip would then have read half of it."""
    wheel = Path(command[command.index("-d") + 1]) / WHEEL
    wheel.parent.mkdir(parents=True, exist_ok=True)
    with wheel.open("x") as stream:
        time.sleep(0.2)
        stream.write("whole")
    return ""


def test_rows_side_by_side_download_one_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "run", download)

    def row(python: str) -> str:
        wheel = matrix.cpu_torch(python)
        return wheel.read_text() if wheel else "no wheel"

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(row, ["3.11"] * 2)) == ["whole"] * 2


def test_an_interrupted_download_is_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*command: str) -> str:
        Path(command[command.index("-d") + 1]).mkdir(parents=True, exist_ok=True)
        raise RuntimeError("interrupted")

    monkeypatch.setattr(matrix, "run", interrupted)
    with pytest.raises(RuntimeError, match="interrupted"):
        matrix.cpu_torch("3.11")
    monkeypatch.setattr(matrix, "run", download)
    wheel = matrix.cpu_torch("3.11")
    assert wheel is not None
    assert wheel.read_text() == "whole"


def test_every_test_of_a_row_is_there() -> None:
    assert [one for one in matrix.TESTS if not (Path(__file__).parent / one).exists()] == []
