"""`tito collect --ray` on a cluster: a lost actor, a lost node and a killed driver lose and repeat nothing.

Each node has a raylet of its own, as a machine has. Takes what to do, the wire's name and a folder.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from strands_tito.collect import AgentError, CollectError, Connection, OnRay, TaskError, collect, entries
from support.collect_command import (
    HERE,
    Nursery,
    command,
    expect_collected,
    lines,
    nursery,
    served,
    tokenizer_folder,
    wait_for,
)
from tito_conformance.testing import ScriptedServer
from tito_core.backend import EngineConnectionError

GROUP, COUNT, LATENCY_S = 4, 40, 0.05


def tasks_of(path: Path) -> None:
    path.write_text("".join(json.dumps({"id": f"t{n}", "question": f"What is {n} * 17?"}) + "\n" for n in range(COUNT)))


def expected(count: int = COUNT) -> set[tuple[str, int]]:
    return {(f"t{number}", sample) for number in range(count) for sample in range(GROUP)}


def killed_and_gone_on_with(
    kind: str, server: ScriptedServer, forks: Nursery, cluster: Any, folder: str, place: Path
) -> None:
    """The driver is killed twice; the last one finishes what is left, and loses a node on the way."""
    out, log = place / "killed", place / "log"
    more = ("-n", str(GROUP), "--concurrency", "16", "--ray", cluster.address, "--ray-actors", "2")
    argv = command(kind, server, folder, place / "tasks.jsonl", out, *more)
    had: list[bytes] = []
    for moment in (15, 60):
        pid = forks.start(argv, log)
        wait_for(out, moment)
        os.kill(pid, signal.SIGKILL)
        assert forks.wait(pid) == -signal.SIGKILL, log.read_text()
        assert lines(out)[: len(had)] == had
        had = lines(out)
    pid = forks.start(argv, log)
    wait_for(out, 90)
    cluster.remove_node(sorted(cluster.worker_nodes, key=str)[0])
    assert forks.wait(pid) == 0, log.read_text()
    assert lines(out)[: len(had)] == had
    turns = expect_collected(out, server, expected())
    print(f"{kind}: {len(expected())} rollouts of {turns} turns after two kills and a lost node")


async def an_actor_is_lost(kind: str, server: ScriptedServer, cluster: Any, folder: str, place: Path) -> None:
    """An actor's process dies while it has rollouts; it is started again and takes part again."""
    connection = Connection(kind, server.base_url, folder)
    workers = await OnRay.start(
        cluster.address, connection, "collect_agents:run", actors=2, concurrency=16, folder=HERE
    )
    try:
        collecting = asyncio.ensure_future(
            collect(place / "tasks.jsonl", workers, place / "lost", n=GROUP, concurrency=16)
        )
        while len(lines(place / "lost")) < 30:
            await asyncio.sleep(0.01)
        ray.kill(workers._actors[0], no_restart=False)
        tally = await collecting
    finally:
        await workers.aclose()
    assert (tally.finished, tally.failed) == (len(expected()), 0), tally
    expect_collected(place / "lost", server, expected())
    print(f"{kind}: {tally.finished} rollouts after a lost actor")


async def errors_come_as_they_are(kind: str, server: ScriptedServer, cluster: Any, folder: str, place: Path) -> None:
    """An actor's own error is raised; cancellation reaches the engine."""
    nobody = Connection(kind, "http://127.0.0.1:9", folder)
    with pytest.raises(EngineConnectionError):
        await OnRay.start(cluster.address, nobody, "collect_agents:run", actors=1, folder=HERE)
    connection = Connection(kind, server.base_url, folder)
    with pytest.raises(CollectError, match=r"99 actors .*--ray-actors"):
        await OnRay.start(cluster.address, connection, "collect_agents:run", actors=99, folder=HERE)
    with pytest.raises(AgentError, match="has no 'walk'"):
        await OnRay.start(cluster.address, connection, "collect_agents:walk", actors=1, folder=HERE)
    workers = await OnRay.start(cluster.address, connection, "collect_agents:factory", actors=1, folder=HERE)
    with pytest.raises(TaskError, match="must be a string or a list"):
        await collect([{"question": "no prompt"}], workers, place / "none")
    running = asyncio.ensure_future(collect([{"prompt": "Hello."}], workers, place / "cancelled", n=50, concurrency=50))
    server.engine.latency = 60.0
    until = time.monotonic() + 60
    while server.engine.running < 10:
        assert time.monotonic() < until
        await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await workers.aclose()
    while server.engine.running:
        assert time.monotonic() < until, f"{server.engine.running} requests are left on the engine"
        await asyncio.sleep(0.01)
    print(f"{kind}: {len(list(entries(place / 'cancelled')))} of 50 when it was cancelled, nothing left on the engine")


def main(part: str, kind: str, place: Path) -> None:
    folder = tokenizer_folder(place)
    tasks_of(place / "tasks.jsonl")
    with nursery() as forks, served(kind, latency=LATENCY_S) as server:
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        try:
            cluster.add_node(num_cpus=1)
            cluster.add_node(num_cpus=1)
            cluster.wait_for_nodes()
            if part == "killed":
                killed_and_gone_on_with(kind, server, forks, cluster, folder, place)
            elif part == "lost":
                asyncio.run(an_actor_is_lost(kind, server, cluster, folder, place))
            else:
                asyncio.run(errors_come_as_they_are(kind, server, cluster, folder, place))
        finally:
            cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
