"""`tito collect --ray` before a router: a worker and a node are killed, and nothing is lost or doubled.

    python tests/collect/prove/scale.py [--rollouts 20000] [--seed 0]

It runs in the environment of the row ray-2.50.0 of tools/matrix.py. Servers are scripted, and answer at once. Prints
the cost of each eighth of the collection: rollouts a second, CPU of the command, and memory.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np
import psutil
from tools.matrix import environment

from strands_tito.collect import collected, entries
from support.collect_command import command, nursery, served, tokenizer_folder, wait_for
from support.routers import routed
from tito_core.ledger import check_ledger

GROUP, CONCURRENCY, PARTS = 8, 64, 8
MOST_GROWTH = 32 << 20
"""Bytes that the command, or an actor, may grow by in the second half."""


class Fleet:
    """Two servers behind a router, and what they answered."""

    def __init__(self, stack: ExitStack, seed: int, place: Path) -> None:
        self.stacks = [stack.enter_context(ExitStack()) for _ in range(2)]
        self.servers = [own.enter_context(served("vllm", seed + n)) for n, own in enumerate(self.stacks)]
        self.url = stack.enter_context(routed("vllm-router", [server.base_url for server in self.servers], place))
        self.answers: defaultdict[str, set[bytes]] = defaultdict(set)

    def fold(self) -> None:
        """Keep the ids of the answers, and drop the servers' record of them."""
        for server in self.servers:
            for record in (server.engine.exchanges, server.engine.requests):
                part: list[Any] = list(record)
                del record[: len(part)]
                for answer in (answer for one in part for answer in getattr(one, "answers", ())):
                    self.answers[answer.request.request_id].add(packed(answer.output_ids))


def packed(ids: Any) -> bytes:
    """Return ids as bytes."""
    return np.asarray(ids, np.int32).tobytes()


def costs(pid: int) -> dict[str, float]:
    """Return the CPU seconds and the memory of the command, and the memory of the largest actor, in MiB."""
    process = psutil.Process(pid)
    cpu = process.cpu_times()
    actors = [
        each.info["memory_info"].rss for each in psutil.process_iter(["cmdline", "memory_info"]) if is_actor(each)
    ]
    sizes = {"command": process.memory_info().rss / 2**20, "actor": max(actors, default=0) / 2**20}
    return {"time": time.monotonic(), "cpu": cpu.user + cpu.system, **sizes}


def is_actor(process: psutil.Process) -> bool:
    """Return whether a process is an actor of Ray that runs rollouts."""
    return (process.info["cmdline"] or [""])[0].startswith("ray::RolloutActor")


def check(out: Path, fleet: Fleet, total: int) -> int:
    """Check that every rollout is there once, and each turn is an answer of its own; return their number."""
    fleet.fold()
    found, used = list(entries(out)), set[str]()
    everything = {(f"t{task}", sample) for task in range(total // GROUP) for sample in range(GROUP)}
    assert len(found) == len(everything), (len(found), len(everything))
    assert {(entry.task, entry.sample) for entry in found} == everything
    for entry, ledger in zip(found, collected(out), strict=True):
        check_ledger(ledger)
        assert (ledger.header.task_id, ledger.header.user["sample"]) == (entry.task, entry.sample)
        for turn in ledger:
            name = turn.draft.engine.request_id
            assert packed(turn.draft.output_ids) in fleet.answers[name], (ledger, turn, name)
            assert name not in used, "two turns have one answer"
            used.add(name)
    return len(used)


def run(total: int, seed: int, place: Path) -> None:
    """Collect, kill a worker after a quarter and a node after a half, and print what it took."""
    from ray.cluster_utils import Cluster

    tasks, out, log = place / "tasks.jsonl", place / "out", place / "log"
    tasks.write_text("".join(json.dumps({"id": f"t{n}", "question": str(n)}) + "\n" for n in range(total // GROUP)))
    with ExitStack() as stack:
        forks, fleet = stack.enter_context(nursery()), Fleet(stack, seed, place)
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        stack.callback(cluster.shutdown)
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        front: Any = ScriptedServerAt(fleet.url)
        more = ("-n", str(GROUP), "--concurrency", str(CONCURRENCY), "--ray", cluster.address, "--ray-actors", "2")
        argv = command("vllm", front, tokenizer_folder(place), tasks, out, *more)
        pid, seen = forks.start(argv, log), list[dict[str, float]]()
        for part in range(PARTS):
            wait_for(out, max(1, total * part // PARTS))
            fleet.fold()
            seen.append(costs(pid))
            if part == PARTS // 4:
                fleet.stacks[0].close()
            if part == PARTS // 2:
                cluster.remove_node(sorted(cluster.worker_nodes, key=str)[0])
        wait_for(out, total - 4 * CONCURRENCY)  # all actors are busy
        seen.append(costs(pid))
        while status := forks.wait(pid):  # rollouts that failed with their worker are missing
            print(f"status {status}: {log.read_text()[-300:]}")
            assert status == 1, log.read_text()[-3000:]
            pid = forks.start(argv, log)
        turns = check(out, fleet, total)
    for part, (one, other) in enumerate(itertools.pairwise(seen)):
        rate, cpu = total / PARTS / (other["time"] - one["time"]), (other["cpu"] - one["cpu"]) / total * PARTS * 1000
        sizes = f"command {other['command']:.0f} MiB, actor {other['actor']:.0f} MiB"
        print(
            f"to {total * (part + 1) // PARTS}: {rate:.0f} rollouts a second, {cpu:.1f} ms of the command each, {sizes}"
        )
    for name in ("command", "actor"):
        late = [each[name] for each in seen[PARTS // 2 :]]
        assert max(late) - late[0] < MOST_GROWTH >> 20, (name, late)
    size = sum(path.stat().st_size for path in out.iterdir())
    print(f"{total} rollouts, each once, of {turns} turns; {size / total:.0f} bytes a rollout")


class ScriptedServerAt:
    """An address, in the place of a server."""

    def __init__(self, url: str) -> None:
        self.base_url = url


def main() -> None:
    """Read the command line, and run; with Ray's own Python, if this one lacks it."""
    if find_spec("ray") is None:
        python = str(environment("ray-2.50.0"))
        os.execv(python, [python, *sys.argv])
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--rollouts", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run(-(-arguments.rollouts // (GROUP * PARTS)) * GROUP * PARTS, arguments.seed, Path(folder))


if __name__ == "__main__":
    main()
