"""Rollouts in large numbers: groups of them for each task, written as they finish, gone on with after any end.

    policy = await Policy.connect_async(backend="vllm", base_url="http://localhost:8000", tokenizer="Qwen/Qwen3-4B")
    tally = await collect("tasks.jsonl", InProcess(policy, run), "rollouts", n=8, concurrency=256)
    for ledger in collected("rollouts"):
        ...

`tito collect` is the same from a shell, and `OnRay` runs the rollouts on the machines of a Ray cluster.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from strands_tito.collect.errors import AgentError, CollectError, FolderError, TaskError, TooManyFailuresError

if TYPE_CHECKING:
    from strands_tito.collect.collecting import Tally, collect
    from strands_tito.collect.connection import Connection
    from strands_tito.collect.entry import Entry
    from strands_tito.collect.folder import RolloutFolder, collected
    from strands_tito.collect.index import entries
    from strands_tito.collect.on_ray import OnRay
    from strands_tito.collect.rollout import Ended, Failure, Rollout
    from strands_tito.collect.task import Task, Tasks
    from strands_tito.collect.workers import InProcess, Workers

__all__ = [
    "AgentError",
    "CollectError",
    "Connection",
    "Ended",
    "Entry",
    "Failure",
    "FolderError",
    "InProcess",
    "OnRay",
    "Rollout",
    "RolloutFolder",
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

_HOMES = {
    "Connection": "connection",
    "Ended": "rollout",
    "Entry": "entry",
    "Failure": "rollout",
    "InProcess": "workers",
    "OnRay": "on_ray",
    "Rollout": "rollout",
    "RolloutFolder": "folder",
    "Tally": "collecting",
    "Task": "task",
    "Tasks": "task",
    "Workers": "workers",
    "collect": "collecting",
    "collected": "folder",
    "entries": "index",
}


def __getattr__(name: str) -> object:
    """Import a name when it is first used: reading a folder loads no Strands."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
