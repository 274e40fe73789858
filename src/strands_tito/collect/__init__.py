"""Collect groups of rollouts for each task into a folder; resumable after any interruption.

    policy = await Policy.connect_async(backend="vllm", base_url="http://localhost:8000", tokenizer="Qwen/Qwen3-4B")
    tally = await collect("tasks.jsonl", InProcess(policy, run), "rollouts", n=8, concurrency=256)
    for ledger in collected("rollouts"):
        ...

`tito collect` does the same from a shell. `OnRay` runs the rollouts on the machines of a Ray cluster.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from strands_tito.collect.errors import AgentError, CollectError, FolderError, TaskError, TooManyFailuresError

if TYPE_CHECKING:
    from strands_tito.collect.collector import Tally, collect
    from strands_tito.collect.connection import Connection
    from strands_tito.collect.entry import Entry
    from strands_tito.collect.folder import RolloutFolder, collected
    from strands_tito.collect.index import entries
    from strands_tito.collect.on_ray import OnRay
    from strands_tito.collect.rollout import Failure, Rollout, RolloutResult
    from strands_tito.collect.task import Task, Tasks
    from strands_tito.collect.workers import InProcess, Workers

__all__ = [
    "AgentError",
    "CollectError",
    "Connection",
    "Entry",
    "Failure",
    "FolderError",
    "InProcess",
    "OnRay",
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
    "Connection": "connection",
    "Entry": "entry",
    "Failure": "rollout",
    "InProcess": "workers",
    "OnRay": "on_ray",
    "Rollout": "rollout",
    "RolloutFolder": "folder",
    "RolloutResult": "rollout",
    "Tally": "collector",
    "Task": "task",
    "Tasks": "task",
    "Workers": "workers",
    "collect": "collector",
    "collected": "folder",
    "entries": "index",
}


def __getattr__(name: str) -> object:
    """Import a name when it is first used, so that reading a folder does not load Strands."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
