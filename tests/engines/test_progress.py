from __future__ import annotations

import pytest

from tito_engines import on_console
from tito_engines import terminal as progress


def test_without_a_terminal_it_is_a_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with on_console() as report:
        for package in range(100):
            report(f"vllm: fetching package {package} of 100 [sic]", package / 100)
        report("vllm: ready", 1.0)
    assert capsys.readouterr().err == "vllm: fetching package 0 of 100 [sic]\nvllm: ready\n"


def test_a_long_step_is_told_again(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    with on_console() as report:
        report("vllm: starting, 0 s")
        report("vllm: starting, 1 s")
    assert capsys.readouterr().err.splitlines() == ["vllm: starting, 0 s", "vllm: starting, 1 s"]


def test_on_a_terminal_it_is_one_live_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    with on_console() as report:
        report("vllm: fetching [package] 7 of 141", 0.5)
    drawn = capsys.readouterr().err
    assert "vllm: fetching [package] 7 of 141" in drawn
    assert "\x1b[" in drawn
