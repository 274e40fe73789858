"""What a collection has come to: counts, failures by reason, speed."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from tito_core.collect.entry import Entry
from tito_core.collect.rollout import Ended
from tito_core.termination import Termination


@dataclass(slots=True)
class Tally:
    """Counts of one collection, which changes them as rollouts end.

    Attributes:
        wanted: Rollouts of all tasks.
        before: Rollouts that were finished when it began.
        finished: Rollouts finished since.
        endings: Why those ended.
        failures: Why others failed, which are not finished.
        failed_in_a_row: Failures since the last finished rollout.
        turns: Turns of the rollouts finished since.
        sampled: Tokens that the policy sampled in them.
        last_error: Of the last failure.
        began: When it began, by `time.monotonic`.
    """

    wanted: int
    before: int = 0
    finished: int = 0
    endings: Counter[Termination] = field(default_factory=Counter)
    failures: Counter[Termination] = field(default_factory=Counter)
    failed_in_a_row: int = 0
    turns: int = 0
    sampled: int = 0
    last_error: str = ""
    began: float = field(default_factory=time.monotonic)

    def add(self, entry: Entry) -> None:
        """Count a finished rollout."""
        self.finished += 1
        self.failed_in_a_row = 0
        self.endings[Termination(entry.termination)] += 1
        self.turns += entry.turns
        self.sampled += entry.sampled

    def fail(self, ended: Ended) -> None:
        """Count one that failed."""
        self.failed_in_a_row += 1
        self.failures[ended.termination] += 1
        self.last_error = ended.failure.error if ended.failure else ""

    @property
    def failed(self) -> int:
        """Rollouts that failed."""
        return self.failures.total()

    @property
    def missing(self) -> int:
        """Rollouts that are not finished."""
        return self.wanted - self.before - self.finished

    @property
    def seconds(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.began

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens a second, of the rollouts finished since it began."""
        return self.sampled / self.seconds if self.seconds else 0.0
