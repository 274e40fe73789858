"""`tito collect` on a scripted server, in a process that can be killed."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from strands_tito.collect import Entry, collected, entries
from support import collect_forks
from support.scripted import call, ids_of, tokenizer
from tito_conformance.testing import Completion, ScriptedRequest, ScriptedServer, scripted_server
from tito_core.ledger import check_ledger

HERE = Path(__file__).parent


class Nursery:
    """Starts processes of `tito collect` and waits for their end."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def start(self, argv: list[str], log: Path) -> int:
        """Start a process in the folder of the agents; return its process id."""
        return self._ask({"argv": argv, "cwd": str(HERE), "log": str(log)})

    def wait(self, pid: int) -> int:
        """Return the exit status, or minus the signal that ended the process."""
        return self._ask(pid)

    def _ask(self, order: Any) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


@contextmanager
def nursery() -> Iterator[Nursery]:
    places = os.pathsep.join([str(HERE.parent), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": places, "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "200"}
    with subprocess.Popen(
        [sys.executable, collect_forks.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        yield Nursery(process)
        assert process.stdin is not None
        process.stdin.close()


def tokenizer_folder(path: Path) -> str:
    tokenizer().save_pretrained(path / "tokenizer")
    return str(path / "tokenizer")


def served(kind: Any, seed: int = 0, latency: float = 0.0, **options: Any) -> ScriptedServer:
    """Return a server whose policy calls the tool or answers at random; with a seed, always the same to a prompt."""
    loaded = tokenizer()
    called = ids_of(call("multiply", '{"a": 25, "b": 17}'))

    def answers(request: ScriptedRequest) -> Completion:
        draw = random.Random(
            f"{seed} {request.request_id if request.seed is None else (request.seed, request.context)}"
        )
        ids = [draw.randrange(300, 40_000) for _ in range(draw.randrange(3, 40))]
        if draw.random() < 0.4:
            ids = [*ids, *called]
        return Completion([*ids, loaded.eos_token_id])

    shape: dict[str, Any] = {"vocab_size": len(loaded), "eos_ids": [loaded.eos_token_id]}
    return scripted_server(kind, answers, latency=latency, **{**shape, **options})


def command(kind: str, server: ScriptedServer, folder: str, tasks: Path, out: Path, *more: str) -> list[str]:
    """Return the arguments of the command; the agent is `run` unless `more` has another."""
    return [
        *("collect", str(tasks), "--backend", kind, "--base-url", server.base_url, "--tokenizer", folder),
        *("--out", str(out), *(() if "--agent" in more else ("--agent", "collect_agents:run")), *more),
    ]


def written(out: Path) -> list[Entry]:
    """Return the finished rollouts; none before the folder is made."""
    return list(entries(out)) if (out / "collection.json").exists() else []


def wait_for(out: Path, count: int, seconds: float = 600.0) -> None:
    """Wait until `count` rollouts are finished. Reads only files that grew, because the server uses this core too."""
    until, sizes, found = time.monotonic() + seconds, dict[Path, int](), dict[str, int]()
    while sum(found.values()) < count:
        assert time.monotonic() < until, f"{found} rollouts after {seconds} seconds, not {count}"
        time.sleep(0.01)
        if (out / "collection.json").exists():
            found |= Counter(entry.file for entry in entries(out, sizes))


def expect_collected(out: Path, server: ScriptedServer, expected: set[tuple[str, int]]) -> int:
    """Check that every rollout is there once and each turn is the server's answer; return the number of turns."""
    found = list(entries(out))
    assert len(found) == len(expected)
    assert {(entry.task, entry.sample) for entry in found} == expected
    assert len({entry.ledger for entry in found}) == len(found)
    answers = {answer.request.request_id: answer for one in server.engine.exchanges for answer in one.answers}
    turns = 0
    for entry, ledger in zip(found, collected(out), strict=True):
        check_ledger(ledger)
        assert (ledger.header.task_id, ledger.header.user["sample"]) == (entry.task, entry.sample)
        assert ledger.annotation("termination") == entry.termination
        for turn in ledger:
            answer = answers.pop(turn.draft.engine.request_id)  # no other turn has this id
            assert answer.output_ids == tuple(turn.draft.output_ids.tolist())
            turns += 1
    return turns
