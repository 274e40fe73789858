"""Outputs that pages show and no command refreshes: each has the shape of today's output."""

from __future__ import annotations

import re
from collections import Counter
from io import StringIO
from pathlib import Path

import pytest
from strands import Agent
from typer.testing import CliRunner

from strands_tito.collect.cli import on_console
from strands_tito.collect.run import Tally
from support.calculating import calculator
from support.pages import blocks
from support.scripted import Says, call, model_of
from tito_core.termination import Termination
from tito_engines import cli
from tito_engines import process as state
from tito_engines.process import RunningEngine
from tito_engines.terminal import VisibleConsole


def shape(text: str) -> str:
    """Return a text without what differs from run to run: UUIDs, names in quotes, figures and the bar's strokes."""
    text = re.sub(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", "UUID", text.replace("-:--:--", "0:00:00"))
    return " ".join(re.sub(r"\d[\d,.]*", "0", re.sub("[━╸╺]+", "━", re.sub(r"'[^']*'", "''", text))).split())


def test_the_lines_of_repr_are_those_of_the_page() -> None:
    model = model_of("vllm", Says(call("calculator", '{"expression": "25 * 17"}'), "It is 425."))
    model = model.policy.model(ledger=model.policy.ledger(task_id="sum-0"))
    Agent(model=model, tools=[calculator], callback_handler=None)("What is 25 * 17?")
    (shown,) = blocks(Path("docs/view.md"), "text")
    printed = "\n".join(map(repr, (model.policy, model.ledger, model.trajectory)))
    assert shape(shown) == shape(printed)


def test_the_output_of_a_started_engine_is_that_of_the_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TITO_CACHE_DIR", str(tmp_path))
    url = "http://127.0.0.1:8000"
    running = RunningEngine("vllm", url, "smollm2", 8000, tmp_path, 1, 0.0, 1.0, "", tokenizer="smollm2")
    monkeypatch.setattr(state, "load", lambda _: running)
    started = CliRunner().invoke(cli.app, ["start", "vllm", "--port", "8000"])
    (shown,) = blocks(Path("docs/quickstart.md"), "text")
    assert shown == started.stdout + started.stderr


def test_the_progress_of_a_collection_is_that_of_the_page() -> None:
    out = StringIO()
    failures = Counter({Termination.ENGINE_ERROR: 2, Termination.TOOL_ERROR: 1})
    with on_console(VisibleConsole(file=out, force_terminal=True, width=160, color_system=None)) as draw:
        draw(Tally(4096, finished=1483, failed_in_a_row=1, failures=failures, sampled=3_000_000))
    printed = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    shown = next(block for block in blocks(Path("docs/collect.md"), "text") if "━" in block)
    assert shape(printed.splitlines()[-1]) == shape(shown)
