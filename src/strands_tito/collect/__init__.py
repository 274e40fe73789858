"""Collect groups of rollouts for each task into a folder; resumable after any interruption.

    policy = await Policy.connect_async(backend="vllm", base_url="http://localhost:8000", tokenizer="Qwen/Qwen3-4B")
    tally = await collect("tasks.jsonl", InProcess(policy, run), "rollouts", n=8, concurrency=256)
    for ledger in collected("rollouts"):
        ...

`tito collect` does the same from a shell. `Processes` runs the rollouts in several processes, `OnRay` on the machines
of a Ray cluster.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from strands_tito.collect.rollout import AgentError, CollectError, FolderError, TaskError, TooManyFailuresError

if TYPE_CHECKING:
    from strands_tito.collect.actors import Connection
    from strands_tito.collect.folder import Entry, RolloutFolder, collected, entries
    from strands_tito.collect.on_ray import OnRay
    from strands_tito.collect.processes import Processes
    from strands_tito.collect.rollout import Failure, Rollout, RolloutResult, Task, Tasks
    from strands_tito.collect.run import InProcess, Tally, Workers, collect

__all__ = [
    "AgentError",
    "CollectError",
    "Connection",
    "Entry",
    "Failure",
    "FolderError",
    "InProcess",
    "OnRay",
    "Processes",
    "Rollout",
    "RolloutFolder",
    "RolloutResult",
    "Tally",
    "Task",
    "TaskError",
    "Tasks",
    "TooManyFailuresError",
    "Workers",
    "collect",
    "collected",
    "entries",
]

_MODULES = {
    "Connection": "actors",
    "Entry": "folder",
    "Failure": "rollout",
    "InProcess": "run",
    "OnRay": "on_ray",
    "Processes": "processes",
    "Rollout": "rollout",
    "RolloutFolder": "folder",
    "RolloutResult": "rollout",
    "Tally": "run",
    "Task": "rollout",
    "Tasks": "rollout",
    "Workers": "run",
    "collect": "run",
    "collected": "folder",
    "entries": "folder",
}


def __getattr__(name: str) -> object:
    """Import a name when it is first used, so that reading a folder does not load Strands."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
