"""A rollout that is to be had, and how it ended."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from strands_tito.collect.task import Task
from tito_core.ledger.ledger import Ledger
from tito_core.termination import Termination


@dataclass(frozen=True, slots=True)
class Rollout:
    """One of a task's rollouts.

    Attributes:
        run: Identity of the collection, a UUID.
        task: What is tried.
        sample: Which one of the group, from 0.
    """

    run: str
    task: Task
    sample: int

    @property
    def group_id(self) -> str:
        """Name of its group in ledgers: those of two collections are never one group."""
        return f"{self.run[:8]}/{self.task.id}"

    @property
    def user(self) -> dict[str, Any]:
        """What its ledger's header says of it."""
        return {"run": self.run, "sample": self.sample, "task_digest": self.task.digest}

    def seed(self, given: int) -> int:
        """Return its own sampling seed: with the given one for all, the rollouts of a group would be equal."""
        told = hashlib.sha256(f"{given}/{self.sample}/{self.task.id}".encode()).digest()
        return int.from_bytes(told[:4], "big") >> 1


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a rollout is not finished.

    Attributes:
        error: The error's type and sentence.
        traceback: Its end, at most 4,000 characters.
    """

    error: str
    traceback: str


@dataclass(frozen=True, slots=True)
class Ended:
    """A rollout that ended.

    Attributes:
        rollout: Which.
        ledger: Its ledger, with its reward and termination as annotations.
        termination: Why it ended.
        failure: None where it is finished. Otherwise an error ended it that says nothing of the policy.
    """

    rollout: Rollout
    ledger: Ledger
    termination: Termination
    failure: Failure | None = None
