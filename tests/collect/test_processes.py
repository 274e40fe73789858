"""Rollouts in several processes: the same as in one, also when processes are lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from strands_tito.collect import AgentError, Connection, InProcess, Processes, Tally, Workers, collect, collected
from strands_tito.collect.rollout import CollectError
from support.collect_command import HERE, served
from tito_core.backend import EngineConnectionError
from tito_core.ledger import Ledger
from tito_core.termination import Termination

TASKS = [{"id": f"t{number}", "question": f"What is {number} * 17?"} for number in range(12)]
SAMPLING: Any = {"seed": 7, "temperature": 0.5}


def content(ledger: Ledger) -> list[Any]:
    """Return all of a rollout that does not name the one attempt at it."""
    turns = [
        (draft.sampling, *(column.tolist() for column in (draft.prompt_ids, draft.output_ids, draft.columns.logprobs)))
        for draft in (turn.draft for turn in ledger)
    ]
    notes = [(note.name, note.value) for note in ledger.annotations]
    return [ledger.header.task_id, ledger.header.user["sample"], notes, turns]


async def results(workers: Workers, out: Path, concurrency: int, killed: int = 0) -> list[list[Any]]:
    """Collect three rollouts a task; return their content in the order of their ends. May kill a process midway."""

    def on_end(tally: Tally) -> None:
        if killed and tally.finished == 6:
            os.kill(killed, signal.SIGKILL)

    tally = await collect(TASKS, workers, out, n=3, concurrency=concurrency, on_end=on_end)
    await workers.aclose()
    assert (tally.finished, tally.failed) == (3 * len(TASKS), 0), tally.last_error
    return [content(ledger) for ledger in collected(out)]


@pytest.mark.timeout(300)
async def test_results_equal_those_of_one_process(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strands_tito.collect.actors.RESTART_S", 0.1)
    monkeypatch.syspath_prepend(str(HERE))
    with served("sglang", latency=0.01) as server:
        connection = Connection("sglang", server.base_url, folder)
        one = InProcess(await connection.connect(), "collect_agents:run", sampling=SAMPLING)
        expected = await results(one, tmp_path / "0", 1)
        two = await Processes.start(connection, "collect_agents:run", workers=2, sampling=SAMPLING)
        lost = two._actors[0]._process.pid
        found = await results(two, tmp_path / "2", 6, killed=lost)
        assert two._actors[0]._process.pid != lost, "it was started again"
        assert sorted(found, key=str) == sorted(expected, key=str)
        assert not server.engine.running


async def test_what_a_process_raises_at_its_start_is_raised_here(folder: str) -> None:
    nobody = Connection("vllm", "http://127.0.0.1:9", folder, options={"patience_s": 0})
    with pytest.raises(EngineConnectionError):
        await Processes.start(nobody, "collect_agents:run", workers=1, folder=HERE)
    lambdas = Connection("vllm", "http://127.0.0.1:9", "t", options={"http_transport": lambda: None})
    with pytest.raises(CollectError, match="cannot be sent to another process"):
        await Processes.start(lambdas, "collect_agents:run", workers=1, folder=HERE)
    with pytest.raises(CollectError, match="workers=0 must be at least 1"):
        await Processes.start(nobody, "collect_agents:run", workers=0, folder=HERE)


@pytest.mark.timeout(180)
async def test_what_an_agent_does_to_its_process(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool ends a process that it forked; an agent cancels every task of the process, or raises SystemExit in one."""
    monkeypatch.setattr("strands_tito.collect.actors.RESTART_S", 0.1)
    monkeypatch.setattr("strands_tito.collect.actors.MAX_ATTEMPTS", 2)
    with served("vllm") as server:
        connection = Connection("vllm", server.base_url, folder)
        workers = await Processes.start(connection, "collect_agents:named", workers=1, folder=HERE)
        await collect([{"agent": "forking"}], workers, tmp_path / "forking")
        assert [ledger.annotation("reward") for ledger in collected(tmp_path / "forking")] == [-signal.SIGTERM]
        tally = await collect([{"agent": "cancelling"}], workers, tmp_path / "cancelling")
        assert tally.failures == {Termination.ABORTED: 1}
        assert "actor was lost 2 times" in tally.last_error
        with pytest.raises(AgentError, match=r"raised SystemExit\(0\)"):
            await collect([{"agent": "leaving"}], workers, tmp_path / "leaving")
        await workers.aclose()
