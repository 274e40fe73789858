"""`tito collect` through hours of mishaps: in the end each rollout is there once, and memory stayed flat.

    python tests/collect/prove/soak.py [--rollouts 50000] [--seed 0]

The command runs on a scripted server, in one process or two. It is ended again and again: by SIGKILL, Ctrl-C, SIGTERM
or a disk that is full (a limit on the size of its files). Meanwhile the server gets new weights, pauses, restarts, and
worker processes are killed. The last run does more than half of the rollouts, and its memory is looked at.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from strands_tito.collect import Entry, collected, entries
from support.collect_command import Nursery, command, nursery, served, tokenizer_folder, wait_for, written
from tito_conformance.testing import ScriptedServer
from tito_core.backend import create_backend
from tito_core.ledger import check_ledger

GROUP, CONCURRENCY = 4, 16
MOST_GROWTH = 16 << 20
"""Bytes that a process may grow by in the second half of the last run. A rollout takes none, a task 200 bytes."""
STATUSES = {"kill": -signal.SIGKILL, "interrupt": 130, "term": 143, "full disk": 1}


class Soak:
    """One collection on one wire."""

    def __init__(self, kind: str, count: int, seed: int, place: Path, server: ScriptedServer, forks: Nursery) -> None:
        self.kind, self.server, self.forks, self.place = kind, server, forks, place
        self.dice = random.Random(f"{seed} {kind}")
        self.out, self.tasks, self.log = place / "out", place / "tasks.jsonl", place / "log"
        self.total, self.small = count, count < 1_000
        self.mishaps = itertools.cycle(self.dice.sample([*MISHAPS.items()], len(MISHAPS)))
        self.tasks.write_text(
            "".join(json.dumps({"id": f"t{n}", "question": str(n)}) + "\n" for n in range(count // GROUP))
        )
        self.folder = tokenizer_folder(place)
        self.had: list[Entry] = []
        self.answers: defaultdict[str, set[bytes]] = defaultdict(set)
        self.seen: Counter[str] = Counter()
        self.memory: defaultdict[int, list[int]] = defaultdict(list)

    def start(self, workers: int) -> int:
        """Start the command; return its process id."""
        self.log = self.place / f"log{self.seen['runs']}"
        self.seen["runs"] += 1
        more = ("-n", str(GROUP), "--concurrency", str(CONCURRENCY), "--workers", str(workers))
        return self.forks.start(command(self.kind, self.server, self.folder, self.tasks, self.out, *more), self.log)

    def until(self, pid: int, finished: int, mishaps: int) -> None:
        """Wait until so many rollouts are finished; there are mishaps on the way, evenly spread."""
        begin = len(written(self.out))
        finished = max(finished, begin + 3)  # so that this run has done something
        for number in range(mishaps):
            wait_for(self.out, begin + (finished - begin) * (number + 1) // (mishaps + 1))
            name, mishap = next(self.mishaps)
            self.seen[name] += 1
            mishap(self)
            if (workers := tree(pid)[1:]) and self.dice.random() < 0.3:
                self.seen["lost worker"] += 1
                os.kill(self.dice.choice(workers), signal.SIGKILL)
            self.fold()
            for each in tree(pid):
                self.memory[each].append(resident(each))
        wait_for(self.out, finished)

    def end(self, pid: int, how: str) -> None:
        """End the command, and check that it ended so and left nothing."""
        workers = tree(pid)[1:]
        time.sleep(self.dice.uniform(0, 0.1))
        self.seen[how] += 1
        if how == "full disk":
            newest = max(self.out.glob("rollouts-*.tito"))
            room = newest.stat().st_size + self.dice.randrange(8_000)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
        else:
            os.kill(pid, {"kill": signal.SIGKILL, "interrupt": signal.SIGINT, "term": signal.SIGTERM}[how])
        status = self.forks.wait(pid)
        text = self.log.read_text()
        assert status == STATUSES[how], (how, status, text[-3000:])
        assert (how == "full disk") == ("File too large" in text and "Free disk space" in text), text[-3000:]
        until = time.monotonic() + 30
        while any(map(is_running, workers)) or self.server.engine.running:
            assert time.monotonic() < until, "a worker or a request was left"
            time.sleep(0.05)
        self.check_kept()

    def check_kept(self) -> None:
        """Check that no finished rollout is gone."""
        now = written(self.out)
        assert now[: len(self.had)] == self.had, "a finished rollout is gone"
        self.had = now

    def fold(self) -> None:
        """Keep the ids of the server's answers, and drop its record of them."""
        for record in (self.server.engine.exchanges, self.server.engine.requests):
            part: list[Any] = list(record)
            del record[: len(part)]
            for one in part:
                for answer in getattr(one, "answers", ()):
                    self.answers[answer.request.request_id].add(packed(answer.output_ids))

    def run(self) -> int:
        """Run everything; return the number of turns."""
        ends = [*STATUSES] * (1 if self.small else 4)
        self.dice.shuffle(ends)
        for number, how in enumerate(ends):
            pid = self.start(workers=1 + (how == "kill" if self.small else number % 2))
            self.until(pid, 4 + self.total * 2 * number // (5 * len(ends)), mishaps=1)
            self.end(pid, how)
        self.memory.clear()
        pid = self.start(workers=1 if self.small else 2)  # a process takes seconds to start
        self.until(pid, self.total - CONCURRENCY, mishaps=4 if self.small else 40)
        while self.forks.wait(pid):  # rollouts that failed are missing
            assert self.seen["runs"] < len(ends) + 4, self.log.read_text()[-3000:]
            pid = self.start(workers=1)
        self.check_kept()
        self.check_memory()
        return self.check_rollouts()

    def check_memory(self) -> None:
        """Check that the processes of the last run did not grow in its second half."""
        for samples in self.memory.values():
            half = samples[len(samples) // 2 :]
            assert max(half) - half[0] < MOST_GROWTH, [f"{sample / 2**20:.0f} MiB" for sample in samples]

    def check_rollouts(self) -> int:
        """Check that every rollout is there once and each turn is the server's answer; return the number of turns."""
        self.fold()
        found = list(entries(self.out))
        everything = {(f"t{task}", sample) for task in range(self.total // GROUP) for sample in range(GROUP)}
        assert len(found) == len(everything)
        assert {(entry.task, entry.sample) for entry in found} == everything
        used: Counter[str] = Counter()
        turns = 0
        for entry, ledger in zip(found, collected(self.out), strict=True):
            check_ledger(ledger)
            assert (ledger.header.task_id, ledger.header.user["sample"]) == (entry.task, entry.sample)
            for turn in ledger:
                engine, ids = turn.draft.engine, turn.draft.output_ids
                parts = engine.responses or [(0, len(ids), engine.request_id)]
                for start, stop, request_id in parts:
                    assert packed(ids[start:stop]) in self.answers[request_id], (ledger, turn, request_id)
                    used[request_id] += 1
                self.seen["resumed turns"] += len(parts) > 1
                turns += 1
        assert max(used.values()) == 1, "two turns have one answer"
        return turns


def restart(soak: Soak) -> None:
    """Break all connections, and listen again a moment later."""
    soak.server.__exit__(None, None, None)
    time.sleep(soak.dice.uniform(0, 0.5))
    soak.server.__enter__()


def pause(soak: Soak) -> None:
    """Pause for a moment."""

    async def briefly() -> None:
        backend: Any = create_backend(soak.kind, soak.server.base_url)
        await backend.pause(soak.dice.choice(["keep", "abort"]))
        await asyncio.sleep(soak.dice.uniform(0, 0.5))
        await backend.resume()
        await backend.aclose()

    asyncio.run(briefly())


def change_weights(soak: Soak) -> None:
    """Load new weights."""

    async def load() -> None:
        backend: Any = create_backend(soak.kind, soak.server.base_url)
        version = f"step-{soak.seen['new weights']}"
        await backend.load_weights(str(soak.place), version, running=soak.dice.choice(["keep", "abort"]))
        await backend.aclose()

    asyncio.run(load())


MISHAPS: dict[str, Callable[[Soak], None]] = {"restart": restart, "pause": pause, "new weights": change_weights}


def packed(ids: Any) -> bytes:
    """Return ids as bytes."""
    return np.asarray(ids, np.int32).tobytes()


def tree(pid: int) -> list[int]:
    """Return a process and its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    return [pid, *map(int, children.read_text().split())] if children.exists() else [pid]


def is_running(pid: int) -> bool:
    """Return whether a process runs; one that ended and was not waited for does not."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def resident(pid: int) -> int:
    """Return the bytes of memory that a process has; 0 if it has ended."""
    statm = Path(f"/proc/{pid}/statm")
    return int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else 0


def main() -> None:
    """Run the soak."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--rollouts", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    kinds = ["sglang"] if arguments.rollouts < 2_000 else ["vllm", "sglang"]
    count = -(-arguments.rollouts // len(kinds) // GROUP) * GROUP
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder, served(kind, arguments.seed, 0.02) as server, nursery() as forks:
            began = time.monotonic()
            soak = Soak(kind, count, arguments.seed, Path(folder), server, forks)
            turns = soak.run()
            at_the_end = [f"{samples[-1] / 2**20:.0f} MiB" for samples in soak.memory.values()]
            print(f"{kind}: {turns} turns, {dict(soak.seen)}, {at_the_end}, {time.monotonic() - began:.0f} s")
    print(f"{count * len(kinds)} rollouts, each once")


if __name__ == "__main__":
    main()
