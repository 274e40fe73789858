"""The collection loop: runs at most `concurrency` rollouts at once and writes each one when it is finished."""

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
from strands_tito.collect.rollout import Rollout, RolloutResult
from strands_tito.collect.task import Tasks
from strands_tito.collect.workers import BOUNDS, Workers
from tito_core.ledger.header import REWARD, as_reward
from tito_core.termination import Termination


@dataclass(slots=True)
class Tally:
    """Counts of one collection, updated as rollouts end.

    Attributes:
        total: Number of rollouts of all tasks.
        before: Rollouts that were already finished at the start.
        finished: Rollouts finished since the start.
        endings: Number of finished rollouts by termination.
        failures: Number of failed rollouts by termination.
        failed_in_a_row: Failures since the last finished rollout.
        turns: Turns of the finished rollouts.
        sampled: Sampled tokens of the finished rollouts.
        rewarded: Finished rollouts with a reward, since the start.
        last_error: Error of the last failure.
        began: Start time, by `time.monotonic`.
    """

    total: int
    before: int = 0
    finished: int = 0
    endings: Counter[Termination] = field(default_factory=Counter)
    failures: Counter[Termination] = field(default_factory=Counter)
    failed_in_a_row: int = 0
    turns: int = 0
    sampled: int = 0
    rewarded: int = 0
    last_error: str = ""
    began: float = field(default_factory=time.monotonic)

    def add(self, entry: Entry) -> None:
        """Count a finished rollout."""
        self.finished += 1
        self.failed_in_a_row = 0
        self.endings[Termination(entry.termination)] += 1
        self.turns += entry.turns
        self.sampled += entry.sampled
        self.rewarded += entry.reward is not None

    def add_failure(self, result: RolloutResult) -> None:
        """Count a failed rollout."""
        self.failed_in_a_row += 1
        self.failures[result.termination] += 1
        self.last_error = result.failure.error if result.failure else ""

    @property
    def failed(self) -> int:
        """Number of failed rollouts."""
        return self.failures.total()

    @property
    def missing(self) -> int:
        """Number of rollouts that are not finished."""
        return self.total - self.before - self.finished

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens of the finished rollouts per second since the start."""
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
    truncated_reward: float | None = None,
    file_bytes: int = FILE_BYTES,
    on_end: OnEnd | None = None,
) -> Tally:
    """Collect up to `n` rollouts of each task; rollouts that the folder already has are not run again.

    A rollout is finished when it is written. A rollout that failed (the engine, a tool or the agent's code raised) or
    was cancelled is not written; the next call runs it again. Memory holds `concurrency` rollouts and about 200 bytes
    for each task.

    Args:
        tasks: A JSONL file, or JSON objects.
        workers: Runs the rollouts; the caller closes it.
        out: The folder.
        n: Rollouts for each task, its group.
        concurrency: Rollouts at once.
        about: Description of the collection, as JSON. A folder with another one is refused.
        max_failures: Failures in a row after which the collection ends.
        truncated_reward: Reward of a rollout that a limit ended (`truncated`, `context`, `limit`) before it got one;
            None leaves it without.
        file_bytes: A file of this size or more takes no further rollouts.
        on_end: Called with the counts once at the start and after each rollout.

    Raises:
        CollectError: A number is out of range.
        ValueError: `truncated_reward` is not a finite number.
        TaskError: A task is invalid; nothing was run.
        FolderError, SchemaError: The folder cannot be resumed.
        TooManyFailuresError: Too many rollouts failed in a row. Finished ones are kept.
    """
    if n < 1 or concurrency < 1 or max_failures < 1:
        raise CollectError(f"n={n}, concurrency={concurrency} and max_failures={max_failures} must be at least 1.")
    if n > MAX_SAMPLES:
        raise CollectError(f"n={n} must be at most {MAX_SAMPLES}: repeat the task in the file under different ids.")
    if truncated_reward is not None:
        truncated_reward = as_reward(truncated_reward)
    checked = Tasks.of(tasks, need_prompt=workers.need_prompt)
    with RolloutFolder(out, about or {}, file_bytes=file_bytes) as folder:
        all_samples = (1 << n) - 1
        before = sum((folder.index.finished_samples(task) & all_samples).bit_count() for task in checked)
        collector = _Collector(workers, folder, Tally(len(checked) * n, before), max_failures, on_end or _nothing)
        collector.truncated_reward = truncated_reward
        try:
            await collector.run(_missing(checked, folder, n), concurrency)
        except BaseExceptionGroup as group:  # such as a full disk; the task group cancelled the other rollouts
            raise group.exceptions[0] from None
        return collector.tally


class _Collector:
    def __init__(self, workers: Workers, folder: RolloutFolder, tally: Tally, max_failures: int, on_end: OnEnd) -> None:
        self._workers, self._folder, self.tally = workers, folder, tally
        self._max_failures, self._on_end = max_failures, on_end
        self.truncated_reward: float | None = None

    async def run(self, rollouts: Iterator[Rollout], concurrency: int) -> None:
        """Run all rollouts, at most `concurrency` at once."""
        self._on_end(self.tally)
        slots = asyncio.Semaphore(concurrency)
        async with asyncio.TaskGroup() as group:
            for rollout in rollouts:
                await slots.acquire()
                group.create_task(self._one(rollout)).add_done_callback(lambda _: slots.release())

    async def _one(self, rollout: Rollout) -> None:
        result = await self._workers.run(rollout)
        if result.failure is None:
            if self.truncated_reward is not None:
                self._reward_truncated(result)
            await self._write(result)
        else:
            await asyncio.to_thread(self._folder.log_failure, result)
            self.tally.add_failure(result)
        self._on_end(self.tally)
        if self.tally.failed_in_a_row >= self._max_failures:
            raise TooManyFailuresError(
                f"{self.tally.failed_in_a_row} rollouts failed in a row, the last with: {self.tally.last_error} "
                "Fix the cause and run the same command again; finished rollouts are kept."
            )

    async def _write(self, result: RolloutResult) -> None:
        """Write a finished rollout in a thread, since disks and locks block. A cancellation waits for its end."""
        writing = asyncio.ensure_future(asyncio.to_thread(self._folder.append, result))
        try:
            await asyncio.shield(writing)
        finally:
            self.tally.add(await writing)

    def _reward_truncated(self, result: RolloutResult) -> None:
        """Annotate the reward of a rollout that a limit ended, such as one whose agent raised before it was scored."""
        if result.termination in BOUNDS and result.ledger.annotation(REWARD) is None:
            result.ledger.annotate(REWARD, self.truncated_reward)


def _missing(tasks: Tasks, folder: RolloutFolder, n: int) -> Iterator[Rollout]:
    """Yield the rollouts that are not finished, group by group."""
    for task in tasks:
        finished = folder.index.finished_samples(task)
        for sample in range(n):
            if not finished >> sample & 1:
                yield Rollout(folder.index.run, task, sample)


def _nothing(_: Tally) -> None:
    pass
