"""The process that runs cases. It prints a line before and after each case, so that a reader knows which one hung.

    python -m fuzz.child CLASS SEED FIRST

CLASS is a key of `CLASSES`, or module:name.
"""

from __future__ import annotations

import json
import os
import random
import resource
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from typing import Any

from fuzz.target import Target

CLASSES = {"files": "fuzz.files:Files", "answers": "fuzz.answers:Answers", "messages": "fuzz.messages:Messages"}
ROOM = 1 << 30
"""Bytes of address space that a case may add to the process."""
GROWTH_MB = 96
"""Megabytes of memory that one case may add. No input is larger than a megabyte."""


def main() -> None:
    """Run cases from FIRST on, until the process is killed."""
    name, seed, first = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    with open(os.devnull, "w") as nothing, redirect_stdout(nothing), redirect_stderr(nothing):
        module, _, cls = CLASSES.get(name, name).partition(":")
        target: Target = getattr(import_module(module), cls)(seed)
        number = first
        run(target, seed, -1)  # fills caches before memory is limited
        limit_memory()
        lines.write("ready\n")
        while True:
            lines.write(f"{number}\n")
            lines.write(json.dumps(run(target, seed, number)) + "\n")
            number += 1


def run(target: Target, seed: int, number: int) -> dict[str, Any]:
    """Run one case, and return its outcome."""
    before = most_memory()
    random.seed(f"{seed} {number}")  # the jitter of retries, so that a finding happens again
    try:
        outcome: dict[str, Any] = {"outcome": target.case(random.Random(f"{seed} {number}"))}
    except Exception as error:
        frames = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
        ours = [frame for frame in frames if "/src/" in frame] or frames
        text = "".join(traceback.format_exception(error, limit=-12))
        outcome = {"finding": f"{type(error).__name__}: {str(error)[:300]}", "at": ours[-1].rpartition("/src/")[2]}
        outcome["trace"] = text[-4_000:]
    grown = most_memory() - before
    if grown > GROWTH_MB and number >= 0:
        outcome = {"finding": "a case took too much memory", "at": "memory", "trace": f"{grown:.0f} MB"}
    return outcome


def most_memory() -> float:
    """Return this process's peak memory in megabytes. `getrusage` would include the parent's."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024


def limit_memory() -> None:
    """Limit the address space, so that unbounded memory raises MemoryError, which is a finding."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))


if __name__ == "__main__":
    main()
