from __future__ import annotations

import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest
from typer.testing import CliRunner, Result

from support.fake_engine import FAKE, processes_of
from tito_engines import EngineEnv, EngineError, EngineSpec, cli
from tito_engines import process as state
from tito_engines.cli import app


@pytest.fixture(autouse=True)
def offered(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a package offered the fake engine, and no other."""

    def find(name: str) -> EngineSpec:
        if name != "fake":
            raise EngineError(f"Unknown engine {name!r}. Available: fake.")
        return FAKE

    monkeypatch.setattr(cli, "find", find)
    monkeypatch.setattr(cli, "installed", lambda: {"fake": FAKE})


def tito(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


DIFFERENT = [
    (["--arg=--x"], "with --arg=--y and not --arg=--x"),
    (["--dev-mode"], "with no --dev-mode"),
    (["--port", "9"], "and not 9"),
    (["--arg=--x", "--dev-mode"], "no --dev-mode and --arg=--y and not --arg=--x"),
    (["--model", "{other}"], "--model tiny-model and not "),
]


def test_the_life_of_a_server(model: Path, cache: Path, tmp_path: Path) -> None:
    assert "not running; Fake 1.0 is not installed" in tito("status").output
    assert tito("status", "fake").exit_code == 1

    started = tito("start", "fake", "--model", model, "--arg=--y")
    assert started.exit_code == 0
    url = started.stdout.strip()
    line = f'TITOModel(backend="fake", base_url="{url}", tokenizer="{model}")'
    assert line in started.stderr
    assert line in tito("status").stdout
    assert httpx.get(url + "/health").status_code == 200
    for options in ([], ["--arg=--y"]):
        again = tito("start", "fake", "--model", model, *options)
        assert (again.exit_code, again.stdout.strip()) == (0, url)
    (tmp_path / "other").mkdir()
    for options, said in DIFFERENT:
        words = [word.replace("{other}", str(tmp_path / "other")) for word in options]
        other = tito("start", "fake", "--model", model, *words)
        assert (other.exit_code, said in other.output.replace("\n", " ")) == (1, True), other.output
    assert f"tiny-model at {url}" in other.output
    assert "`tito engine stop fake`" in other.output
    assert f"fake: running tiny-model at {url}" in tito("status", "fake").output
    assert "serving tiny-model" in tito("logs", "fake").output

    stopped = tito("stop", "fake")
    assert "stopped" in stopped.output
    assert processes_of(cache) == []
    assert "fake is not running" in tito("stop", "fake").output
    assert "serving tiny-model" in tito("logs", "fake", "-n", "5").output


@pytest.mark.parametrize("victim", ["server", "supervisor"])
def test_a_killed_server_says_that_it_was_killed_and_where_its_log_is(
    fake_env: EngineEnv, victim: str, model: Path, cache: Path
) -> None:
    tito("start", "fake", "--model", model)
    engine = state.load("fake")
    assert engine is not None
    supervisor = psutil.Process(engine.pid)
    killed = supervisor.children()[0] if victim == "server" else supervisor
    killed.kill()
    psutil.wait_procs([killed, supervisor])
    for _ in range(2):
        shown = tito("status", "fake")
        assert shown.exit_code == 1
        assert "crashed or was killed" in shown.output
        assert str(engine.log) in shown.output
        assert ("ended by itself, with signal 9" in shown.output) == (victim == "server")
    assert "crashed or was killed" in tito("stop", "fake").output
    assert processes_of(cache) == []
    assert "crashed" not in tito("status", "fake").output


def test_logs_are_followed_until_the_server_ends(fake_env: EngineEnv, model: Path) -> None:
    tito("start", "fake", "--model", model)
    engine = state.load("fake")
    assert engine is not None

    def go_on() -> None:
        time.sleep(0.2)
        with engine.log.open("a") as log:
            log.write("one more line\n")
        time.sleep(0.2)
        cli.process.stop(engine)  # not by the command: its runner swaps stdout, which only one thread can do

    writer = threading.Thread(target=go_on)
    writer.start()
    followed = tito("logs", "fake", "--follow")
    writer.join()
    assert followed.output.count("one more line") == 1
    assert followed.output.count("serving tiny-model") == 1


def test_installing_says_where(cache: Path) -> None:
    done = tito("install", "fake")
    assert done.exit_code == 0
    assert f"Fake 1.0 is installed in {cache}" in done.output
    assert f"fake: not running; Fake 1.0 is installed in {cache}" in tito("status").output


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["start", "vlm"], ("Error: ", "'vlm'", "fake")),
        (["logs", "fake"], ("Error: ", "`tito engine start fake`")),
        (["install", "fake", "--python", "/nonexistent/python"], ("Error: ", "Fake 1.0", "/nonexistent/python")),
        (["start", "fake", "--model", "{model}", "--arg=--fail", "--arg=no luck"], ("Error: fake ", "no luck")),
    ],
)
def test_an_error_is_a_message_and_an_exit_status(
    fake_env: EngineEnv, model: Path, words: list[str], values: tuple[str, ...]
) -> None:
    failed = tito(*[word.replace("{model}", str(model)) for word in words])
    assert failed.exit_code == 1
    assert [value for value in values if value not in failed.output.replace("\n", " ")] == []
    assert "Traceback" not in failed.output.replace("Traceback (most recent call last):\n    in the fake", "")


def test_state_of_another_version_is_ignored(cache: Path) -> None:
    (cache / "state").mkdir(parents=True)
    (cache / "state" / "fake.json").write_text('{"name": "fake"}')
    assert "not running" in tito("status").output
