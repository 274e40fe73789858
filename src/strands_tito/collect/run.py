"""The collection loop: runs at most `concurrency` rollouts at once and writes each one when it is finished.

`collect` asks `Workers` to run the rollouts; `InProcess` runs them in this event loop.
"""

from __future__ import annotations

import asyncio
import gc
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any, Protocol, Unpack

from strands_tito.collect.folder import FILE_BYTES, MAX_SAMPLES, Entry, RolloutFolder
from strands_tito.collect.rollout import (
    AgentCode,
    AgentError,
    CollectError,
    Factory,
    Failure,
    Rollout,
    RolloutResult,
    Run,
    RunReturn,
    Tasks,
    TooManyFailuresError,
    annotate,
)
from tito_core.backend.errors import hidden, readable
from tito_core.ledger.turn import REWARD, as_reward
from tito_core.model import Policy, TITOModel
from tito_core.settings import RolloutOptions, Settings
from tito_core.termination import Outcome, Termination, record_termination, termination_of

MAX_FAILURES = 32

BOUNDS = frozenset({Termination.TRUNCATED, Termination.CONTEXT, Termination.LIMIT})
"""Terminations by a limit. Such a rollout is finished, not failed, even if an error reported the limit."""
LONGEST_TRACEBACK = 4000
GC_THRESHOLDS = 2_000, 10, 100
"""Thresholds of the three generations (`gc.set_threshold`); Python 3.11's own are 700, 10, 10."""


class Workers(Protocol):
    """Runs rollouts, many at once."""

    @property
    def need_prompt(self) -> bool:
        """Whether each task must have a prompt, because the agent is a factory."""

    async def run(self, rollout: Rollout) -> RolloutResult:
        """Run a rollout to its end and return its result; errors are part of the result. Cancellable."""

    async def aclose(self) -> None:
        """Release the workers' resources."""


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
        rewarded: Finished rollouts with a reward, of their own or of a turn or tool call, since the start.
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

    def add(self, entry: Entry, *, rewarded: bool) -> None:
        """Count a finished rollout; `rewarded`: it, a turn or a tool call of it has a reward."""
        self.finished += 1
        self.failed_in_a_row = 0
        self.endings[Termination(entry.termination)] += 1
        self.turns += entry.turns
        self.sampled += entry.sampled
        self.rewarded += rewarded

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
        before = sum((folder.finished_samples(task) & all_samples).bit_count() for task in checked)
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
        result = result.settled()  # count the ledger that is written
        writing = asyncio.ensure_future(asyncio.to_thread(self._folder.append, result))
        try:
            await asyncio.shield(writing)
        finally:
            notes = result.ledger.annotations
            rewarded = any(note.name == REWARD and note.value is not None for note in notes)
            self.tally.add(await writing, rewarded=rewarded)

    def _reward_truncated(self, result: RolloutResult) -> None:
        """Annotate the reward of a rollout that a limit ended, such as one whose agent raised before it was scored."""
        if result.termination in BOUNDS and result.ledger.annotation(REWARD) is None:
            result.ledger.annotate(REWARD, self.truncated_reward)


def _missing(tasks: Tasks, folder: RolloutFolder, n: int) -> Iterator[Rollout]:
    """Yield the rollouts that are not finished, group by group."""
    for task in tasks:
        finished = folder.finished_samples(task)
        for sample in range(n):
            if not finished >> sample & 1:
                yield Rollout(folder.run, task, sample)


def _nothing(_: Tally) -> None:
    pass


class InProcess:
    """Runs rollouts as tasks of the running event loop.

    Args:
        policy: The policy, without a store: the collection writes finished rollouts itself.
        agent: `async def run(model, task)`, a factory of agents, or the name of either as `module:function`.
        **options: Options of each rollout's model; see `RolloutOptions`.

    Raises:
        AgentError: The agent was not found.
        ValueError: An option is invalid, or the policy has a store.
    """

    def __init__(
        self, policy: Policy, agent: AgentCode | str | Run | Factory, **options: Unpack[RolloutOptions]
    ) -> None:
        if policy.store is not None:
            raise ValueError(
                "The policy has a store: connect it without one, because the collection writes the finished rollouts."
            )
        self._settings = Settings.of(**options)
        self.policy = policy
        self.agent = agent if isinstance(agent, AgentCode) else AgentCode.of(agent)

    @property
    def need_prompt(self) -> bool:
        """Whether each task must have a prompt, because the agent is a factory."""
        return not self.agent.is_run

    async def run(self, rollout: Rollout) -> RolloutResult:
        """Run a rollout to its end."""
        return await run_rollout(self.policy, self.agent, rollout, self._settings)

    async def aclose(self) -> None:
        """Close the policy's connections."""
        await self.policy.aclose()


async def run_rollout(policy: Policy, agent: AgentCode, rollout: Rollout, settings: Settings) -> RolloutResult:
    """Run one rollout. Errors of the agent and the engine become part of the result; only a cancellation is raised.

    Args:
        policy: Makes the rollout's model.
        agent: The user's function.
        rollout: The rollout.
        settings: Settings of the model. A sampling seed is replaced by the rollout's own.
    """
    ledger = policy.ledger(group_id=rollout.group_id, task_id=rollout.task.id, user=rollout.user)
    model = TITOModel.with_settings(policy, ledger, _of_rollout(settings, rollout))
    error: BaseException | None = None
    try:
        # In a task of its own, so that an agent that cancels its task ends only itself.
        outcome, returned = await asyncio.create_task(_run(agent, model, rollout))
        if model.ledger is not ledger and len(model.ledger):
            raise AgentError(
                "The run sampled after model.reset(), into a second ledger. A rollout has one: do not reset."
            )
        termination = annotate(ledger, returned) or termination_of(outcome, ledger, context_limit=_context(model))
    except asyncio.CancelledError as cancelled:
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise  # the collection ends
        error, termination = cancelled, Termination.CANCELLED
    except Exception as raised:
        error, termination = raised, termination_of(raised, ledger, context_limit=_context(model))
    record_termination(ledger, termination)
    failed = error is not None and termination not in BOUNDS
    return RolloutResult(
        rollout, ledger.seal(), termination, failure_of(error) if failed and error is not None else None
    )


async def _run(agent: AgentCode, model: TITOModel, rollout: Rollout) -> tuple[Outcome | None, RunReturn]:
    """Run the agent on a copy of the task, since the rollouts of a group share one and agents append to prompts.

    `sys.exit()`, which would end the event loop, becomes an error of this rollout.
    """
    try:
        return await agent.run(model, rollout.task.copied())
    except (SystemExit, GeneratorExit) as error:
        raise AgentError(f"The agent's code raised {error!r}: raise an error to end a rollout, do not exit.") from error


def _of_rollout(settings: Settings, rollout: Rollout) -> Settings:
    """Return the settings with the seed, if any, replaced by the rollout's own."""
    sampling = settings.sampling
    if sampling.seed is None:
        return settings
    return replace(settings, sampling=sampling.model_copy(update={"seed": rollout.seed(sampling.seed)}))


def _context(model: TITOModel) -> int | None:
    return model.config.get("context_window_limit")


def failure_of(error: BaseException) -> Failure:
    """Return the message of an error and the end of its traceback."""
    text = "".join(traceback.format_exception(error))
    message = readable(_text(error))
    return Failure(_writable(f"{type(error).__name__}: {message}"), _writable(hidden(text)[-LONGEST_TRACEBACK:]))


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as other:  # raised by the user's own `__str__`
        return f"(its text cannot be shown: __str__ raised {type(other).__name__})"


def _writable(text: str) -> str:
    """Escape lone surrogates, which cannot be encoded as UTF-8; errors may quote them from JSON."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def tune_gc() -> None:
    """Run the garbage collector less often, and never on objects that exist now. Call it once, before the rollouts.

    With a thousand agents in memory a full collection blocks the event loop for hundreds of milliseconds, and the
    default thresholds start one every few hundred turns: a fifth of the CPU. Cycles that agents leave are still
    collected, but later.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
