"""The loop that collects: tasks in, at most so many rollouts at once, each written when it is finished."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

from strands_tito.collect.entry import MAX_SAMPLES, Entry
from strands_tito.collect.errors import CollectError, TooManyFailuresError
from strands_tito.collect.folder import FILE_BYTES, RolloutFolder
from strands_tito.collect.rollout import Ended, Rollout
from strands_tito.collect.task import Tasks
from strands_tito.collect.workers import Workers
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


MAX_FAILURES = 32
OnEnd = Callable[[Tally], None]


async def collect(
    tasks: str | PathLike[str] | Iterable[Mapping[str, Any]] | Tasks,
    workers: Workers,
    out: str | PathLike[str],
    *,
    n: int = 1,
    concurrency: int = 256,
    about: Mapping[str, Any] | None = None,
    max_failures: int = MAX_FAILURES,
    file_bytes: int = FILE_BYTES,
    on_end: OnEnd | None = None,
) -> Tally:
    """Collect `n` rollouts of each task that the folder does not have yet.

    A rollout is finished once it is written, whatever happens afterwards, and is never run again. One that failed (the
    engine, a tool or the agent's own code raised) is not finished: the next call runs it again. So does one that was
    cut off when this was cancelled. Memory holds `concurrency` rollouts and some 200 bytes a task.

    Args:
        tasks: A JSONL file, or JSON objects.
        workers: What runs the rollouts; it is the caller's to close.
        out: The folder.
        n: Rollouts of each task: its group.
        concurrency: How many run at once.
        about: What is collected, as JSON; a folder that was begun with something else is refused.
        max_failures: How many may fail one after the other before this gives up.
        file_bytes: Size from which on a file of the folder takes no more rollouts.
        on_end: Called whenever a rollout ended, and once before the first, with counts.

    Raises:
        CollectError: A number is out of range.
        TaskError: A task is not sound; nothing was run.
        FolderError, SchemaError: The folder cannot be gone on with.
        TooManyFailuresError: Too many failed in a row. What is finished is kept.
    """
    if n < 1 or concurrency < 1 or max_failures < 1:
        raise CollectError(f"n={n}, concurrency={concurrency} and max_failures={max_failures} must be at least 1.")
    if n > MAX_SAMPLES:
        raise CollectError(f"n={n} must be at most {MAX_SAMPLES}: write the task several times, each with its own id.")
    known = Tasks.of(tasks, need_prompt=workers.need_prompt)
    with RolloutFolder(out, about or {}, file_bytes=file_bytes) as folder:
        every = (1 << n) - 1
        before = sum((folder.index.done(task) & every).bit_count() for task in known)
        collecting = _Collecting(workers, folder, Tally(len(known) * n, before), max_failures, on_end or _nothing)
        try:
            await collecting.run(_missing(known, folder, n), concurrency)
        except BaseExceptionGroup as group:  # such as a full disk; the other rollouts were cancelled for it
            raise group.exceptions[0] from None
        return collecting.tally


class _Collecting:
    def __init__(self, workers: Workers, folder: RolloutFolder, tally: Tally, max_failures: int, on_end: OnEnd) -> None:
        self._workers, self._folder, self.tally = workers, folder, tally
        self._max_failures, self._on_end = max_failures, on_end

    async def run(self, rollouts: Iterator[Rollout], concurrency: int) -> None:
        """Run them all, the next one whenever one has ended."""
        self._on_end(self.tally)
        slots = asyncio.Semaphore(concurrency)
        async with asyncio.TaskGroup() as group:
            for rollout in rollouts:
                await slots.acquire()
                group.create_task(self._one(rollout)).add_done_callback(lambda _: slots.release())

    async def _one(self, rollout: Rollout) -> None:
        ended = await self._workers.play(rollout)
        if ended.failure is None:
            self.tally.add(self._folder.keep(ended))
        else:
            self._folder.fail(ended)
            self.tally.fail(ended)
        self._on_end(self.tally)
        if self.tally.failed_in_a_row >= self._max_failures:
            raise TooManyFailuresError(
                f"{self.tally.failed_in_a_row} rollouts failed one after the other, the last with "
                f"{self.tally.last_error} Mend that, and run the same again: what is finished is kept."
            )


def _missing(tasks: Tasks, folder: RolloutFolder, n: int) -> Iterator[Rollout]:
    """Yield the rollouts that are not there, group by group."""
    for task in tasks:
        done = folder.index.done(task)
        for sample in range(n):
            if not done >> sample & 1:
                yield Rollout(folder.index.run, task, sample)


def _nothing(_: Tally) -> None:
    pass
