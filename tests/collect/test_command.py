"""`tito collect` as a user types it: output, exit status and error messages."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from strands_tito.collect import (
    AgentError,
    CollectError,
    FolderError,
    Rollout,
    RolloutFolder,
    Tally,
    Tasks,
    collected,
    entries,
)
from strands_tito.collect.cli import on_console, status, summary
from support.collect_command import (
    HERE,
    Nursery,
    command,
    expect_collected,
    nursery,
    served,
    wait_for,
    written,
)
from support.made_up import made_up_result
from support.typed import tito
from tito_conformance.testing import Fault, ScriptedRequest
from tito_core.store import SchemaError

WANTED = {(f"line-{line}", sample) for line in range(1, 6) for sample in range(3)}


@pytest.fixture(scope="module")
def forks() -> Iterator[Nursery]:
    with nursery() as started:
        yield started


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"What is {number} * 17?"}) + "\n" for number in range(5)))
    return path


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in this process, in the folder of the agents."""
    monkeypatch.chdir(HERE)
    monkeypatch.setenv("COLUMNS", "200")


@pytest.mark.parametrize(("kind", "agent"), [("vllm", "run"), ("sglang", "factory")])
def test_it_collects_and_a_second_time_has_nothing_to_do(
    kind: str, agent: str, tasks: Path, folder: str, tmp_path: Path, here: None
) -> None:
    out = tmp_path / "out"
    more = ("-n", "3", "--concurrency", "4", "--agent", f"collect_agents:{agent}", "--sampling", "temperature=0.5")
    with served(kind) as server:
        argv = command(kind, server, folder, tasks, out, *more)
        first = tito(*argv)
        assert first.exit_code == 0, first.output
        assert first.stderr.startswith("reading the tasks and the agent\n")
        assert "measuring the semantics" in first.stderr
        turns = expect_collected(out, server, WANTED)
        connecting = len(server.engine.requests)
        again = tito(*argv)
        assert again.exit_code == 0, again.output
        assert len(server.engine.requests) - connecting < 8, "only what is asked at connect"
    assert "15 of 15 rollouts are finished.\nThis run: 15 in " in first.stderr
    assert f", {turns} turns, " in first.stderr
    assert "15 of 15 rollouts are finished, 15 of them by an earlier run.\nThis run: 0 in " in again.stderr
    assert {entry.reward is None for entry in entries(out)} == {agent == "factory"}
    assert json.loads((out / "collection.json").read_text())["about"] == {
        "agent": f"collect_agents:{agent}",
        "tokenizer": folder,
        "sampling": {"temperature": 0.5},
    }


def test_any_option_of_a_rollout_or_policy_can_be_given(tasks: Path, folder: str, tmp_path: Path, here: None) -> None:
    options = [
        "thinking=as-template",
        'optional_outputs={"top_logprobs":2}',
        "tool_calls=lenient",
        "connect_timeout_s=9",
    ]
    more = [part for option in options for part in ("--option", option)]
    with served("vllm") as server:
        done = tito(*command("vllm", server, folder, tasks, tmp_path / "out", *more))
        assert done.exit_code == 0, done.output
        other = tito(*command("vllm", server, folder, tasks, tmp_path / "out", *more[:-4]))
    assert isinstance(other.exception, FolderError), "the collection has other options"
    assert {turn.draft.extras["top_ids"].shape[1] for ledger in collected(tmp_path / "out") for turn in ledger} == {2}
    assert json.loads((tmp_path / "out" / "collection.json").read_text())["about"]["options"] == {
        "thinking": "as-template",
        "optional_outputs": {"top_logprobs": 2},
        "tool_calls": "lenient",
    }


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--option", "thinking"], ["write name=value, such as thinking=as-template"]),
        (["--option", "thinking=as_template"], ["thinking must be 'keep' or 'as-template'"]),
        (["--option", "stream=3"], ["stream must be True or False"]),
        (["--option", "thinkin=keep"], ["Did you mean 'thinking'"]),
        (["--option", "max_tokens=5"], ["sampling={'max_new_tokens'"]),
        (["--option", "verify_echo=first"], ["use --verify-echo"]),
        (["--option", "sampling={}"], ["use --sampling"]),
        (["--option", "api_key=sk-12345"], ["TITO_API_KEY"]),
        (["--option", "store=x.tito"], ["use --out"]),
        (["--sampling", "hot"], ["--sampling hot", "name=value"]),
        (["--sampling", "temprature=1"], ["--sampling", "temprature", "temperature"]),
        (["--sampling", "temperature=-1"], ["--sampling", "temperature", "-1"]),
        (["--n", "3"], ["No such option: --n"]),
        (["-n", "0"], ["Invalid value for '-n'"]),
        (["-n", "99999"], ["Invalid value for '-n'"]),
        (["--sampling", "stop=" + "[" * 100_000], ["--sampling stop", "nested"]),
        (["--verify-echo", "never"], ["verify_echo", "'always'", "'never'"]),
        (["--turn-timeout", "0"], ["turn_timeout_s", "seconds"]),
        (["--patience", "-1"], ["Invalid value for '--patience'"]),
        (["--workers", "2", "--ray", "auto"], ["with --ray use --ray-actors"]),
    ],
)
def test_a_wrong_option_is_refused_before_the_server_is_asked(
    words: list[str], said: list[str], tasks: Path, folder: str, tmp_path: Path, here: None
) -> None:
    with served("vllm") as server:
        found = tito(*command("vllm", server, folder, tasks, tmp_path / "out", *words))
        assert not server.engine.requests
    assert found.exit_code == 2
    shown = " ".join(found.output.replace("│", " ").split())
    assert [value for value in said if value not in shown] == []
    assert not (tmp_path / "out").exists()


def test_a_signal_ends_it_cleanly_with_what_is_done(tasks: Path, folder: str, tmp_path: Path, forks: Nursery) -> None:
    out, log, held = tmp_path / "out", tmp_path / "log", [True]

    def fault(number: int, request: ScriptedRequest) -> Fault | None:
        return Fault(hang=True) if held and len(written(out)) >= 4 else None  # so that it cannot end before the signal

    with served("sglang", fault=fault) as server:
        argv = command("sglang", server, folder, tasks, out, "-n", "3", "--concurrency", "2")
        pid = forks.start([*argv, "--workers", "2"], log)
        wait_for(out, 4)
        os.kill(pid, signal.SIGTERM)
        assert forks.wait(pid) == 143, log.read_text()
        held.clear()
        had = written(out)
        text = log.read_text()
        assert f"{len(had)} of 15 rollouts are finished." in text
        assert f"{15 - len(had)} are missing: run the same command again" in text
        assert "Traceback" not in text
        assert not server.engine.running, "what the engine worked on was aborted"
        assert forks.wait(forks.start(argv, log)) == 0, log.read_text()
        assert written(out)[: len(had)] == had
        expect_collected(out, server, WANTED)


@pytest.mark.parametrize("signals", [1, 2])
def test_agents_that_do_not_end_cannot_hold_it_up(
    signals: int, tasks: Path, folder: str, tmp_path: Path, forks: Nursery
) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    with served("vllm") as server:
        pid = forks.start(command("vllm", server, folder, tasks, out, "--agent", "collect_agents:stubborn"), log)
        wait_for(out, 1)
        for _ in range(signals):
            os.kill(pid, signal.SIGINT)
            time.sleep(0.2)  # two signals of one kind that are pending together are one
        assert forks.wait(pid) == 130, log.read_text()
    assert "1 of 5 rollouts are finished." in log.read_text()
    assert len(written(out)) == 1


def test_engine_failures_are_counted_and_set_the_exit_status(
    tasks: Path, folder: str, tmp_path: Path, here: None
) -> None:
    out = tmp_path / "out"
    with served("vllm", fault=lambda number, request: Fault(status=400) if request.max_new_tokens == 17 else None) as (
        server
    ):
        argv = command("vllm", server, folder, tasks, out, "-n", "2", "--sampling", "max_new_tokens=17")
        found = tito(*argv, "--max-failures", "40")
    assert found.exit_code == 1, found.output
    assert "0 of 10 rollouts are finished." in found.stderr
    assert "10 failed (engine_error 10), the last with: BadRequestError: " in found.stderr
    assert "10 are missing: run the same command again" in found.stderr
    assert len((out / "failures.jsonl").read_text().splitlines()) == 10


def test_the_patience_is_an_option(tasks: Path, folder: str, tmp_path: Path, here: None) -> None:
    busy = Fault(status=503)
    with served("vllm", fault=lambda number, request: busy if request.max_new_tokens == 17 else None) as server:
        argv = command("vllm", server, folder, tasks, tmp_path / "out", "--sampling", "max_new_tokens=17")
        found = tito(*argv, "--patience", "0")
        tries = sum(request.max_new_tokens == 17 for request in server.engine.requests)
    assert found.exit_code == 1, found.output
    assert (tries, "(engine_error 5), the last with: ThrottledError" in found.stderr) == (5, True)


def test_an_exit_in_a_task_of_the_agents_code_is_an_error_not_success(
    tasks: Path, folder: str, tmp_path: Path, here: None
) -> None:
    with served("vllm") as server:
        argv = command("vllm", server, folder, tasks, tmp_path / "out", "--agent", "collect_agents:leaving")
        found = tito(*argv)
    assert isinstance(found.exception, AgentError), found.output
    assert "raised SystemExit(0)" in str(found.exception)
    assert "5 are missing: run the same command again" in found.stderr


def test_an_invalid_task_is_an_error_before_the_server_is_asked(
    tasks: Path, folder: str, tmp_path: Path, forks: Nursery
) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    with tasks.open("a") as file:
        file.write("{\n")
    with served("vllm") as server:
        assert forks.wait(forks.start(command("vllm", server, folder, tasks, out), log)) == 1
        assert not server.engine.requests
    assert "TaskError: " in log.read_text()
    assert "line 6 is not JSON" in log.read_text()
    assert "Traceback" not in log.read_text()
    assert not out.exists()


@pytest.mark.parametrize("where", ["file", "file/below", "described"])
def test_an_unusable_folder_is_an_error_before_the_server_is_asked(
    where: str, tasks: Path, folder: str, tmp_path: Path, here: None
) -> None:
    (tmp_path / "file").write_text("Precious.")
    (tmp_path / "described" / "collection.json").mkdir(parents=True)
    with served("vllm") as server:
        found = tito(*command("vllm", server, folder, tasks, tmp_path / where))
        assert not server.engine.requests
    assert isinstance(found.exception, SchemaError if where == "described" else FolderError)
    assert str(tmp_path / where) in str(found.exception)


def test_a_full_disk_is_an_error_that_says_what_to_do(
    tasks: Path, folder: str, tmp_path: Path, here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("strands_tito.collect.folder.LedgerFile.append", full)
    with served("vllm") as server:
        found = tito(*command("vllm", server, folder, tasks, tmp_path / "out"))
    assert isinstance(found.exception, FolderError), found.output
    assert "No space left on device. Free disk space" in str(found.exception)


def test_missing_ray_is_an_error_with_the_extra(
    tasks: Path, folder: str, tmp_path: Path, here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strands_tito.collect.on_ray.find_spec", lambda name: None)
    with served("vllm") as server:
        found = tito(*command("vllm", server, folder, tasks, tmp_path / "out", "--ray", "local"))
        assert not server.engine.requests
    assert isinstance(found.exception, CollectError)
    assert "pip install '.[ray]'" in str(found.exception)


def tally(tmp_path: Path) -> Tally:
    """A tally of two rollouts that finished and three that failed."""
    (task,) = Tasks.of([{"question": 1}])
    counts = Tally(total=1_200, before=700)
    counts.began -= 10
    with RolloutFolder(tmp_path, {}) as folder:
        for sample in range(2):
            entry = folder.append(made_up_result(Rollout(folder.run, task, sample)))
            counts.add(entry, rewarded=entry.reward is not None)
        for sample in range(2, 5):
            counts.add_failure(made_up_result(Rollout(folder.run, task, sample), "ServerError: gone."))
    return counts


def test_the_summary_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tally, "seconds", property(lambda _: 10.0))  # on a busy machine this test takes some
    counts = tally(tmp_path)
    counts.sampled = 20_000
    first, second, third, fourth = summary(counts).splitlines()
    assert first.startswith("702 of 1,200 rollouts")
    assert "700" in first
    assert f"2 in 10.0 s, {counts.turns} turns, 2,000 tokens/s: completed 2" in second
    assert third.startswith("3 failed (engine_error 3)")
    assert third.endswith("ServerError: gone.")
    assert fourth.startswith("498 are missing: run the same command again")


def test_a_terminal_sees_speed_and_failures_by_reason(tmp_path: Path) -> None:
    counts = tally(tmp_path)
    console = Console(force_terminal=True, width=140, record=True, file=(tmp_path / "shown").open("w"))
    with console.file, on_console(console) as draw:
        draw(counts)
    shown = console.export_text()
    assert "702/1200" in shown
    assert status(counts) in shown
    assert status(counts).endswith("tokens/s · 3 failed (engine_error 3)")


def test_without_a_terminal_a_line_comes_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from strands_tito.collect import cli as progress

    counts = tally(tmp_path)
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    console = Console(force_terminal=False, width=140, record=True, file=(tmp_path / "shown").open("w"))
    with console.file, on_console(console) as draw:
        for _ in range(120):
            now[0] += 0.1
            draw(counts)
    shown = console.export_text().splitlines()
    assert len(shown) == 2
    assert all(line.startswith("702 of 1,200 rollouts · ") for line in shown)
