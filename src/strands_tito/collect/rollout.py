"""A rollout to run, and its result."""

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
        run: UUID of the collection.
        task: The task.
        sample: Number within the task's group, from 0.
    """

    run: str
    task: Task
    sample: int

    @property
    def group_id(self) -> str:
        """The group's name in ledgers; it differs between collections."""
        return f"{self.run[:8]}/{self.task.id}"

    @property
    def user(self) -> dict[str, Any]:
        """The `user` field of the ledger's header."""
        return {"run": self.run, "sample": self.sample, "task_digest": self.task.digest}

    def seed(self, base: int) -> int:
        """Return a sampling seed derived from `base`. With one seed for all, the rollouts of a group would be equal."""
        digest = hashlib.sha256(f"{base}/{self.sample}/{self.task.id}".encode()).digest()
        return int.from_bytes(digest[:4], "big") >> 1


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a rollout failed.

    Attributes:
        error: The error's type and message.
        traceback: The end of the traceback, at most 4,000 characters.
    """

    error: str
    traceback: str


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """The result of a rollout.

    Attributes:
        rollout: The rollout.
        ledger: Its ledger, with reward and termination as annotations.
        termination: Why it ended.
        failure: None if the rollout is finished, otherwise the error that ended it.
    """

    rollout: Rollout
    ledger: Ledger
    termination: Termination
    failure: Failure | None = None
