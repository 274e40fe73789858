"""The loop over made-up workers: after any failure, hang or cancellation each rollout is in the folder once."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import random
import weakref
from collections import Counter
from io import FileIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strands_tito.collect import (
    CollectError,
    Rollout,
    RolloutResult,
    Tally,
    TaskError,
    Tasks,
    TooManyFailuresError,
    collect,
    collected,
    entries,
)
from strands_tito.collect.cli import summary
from support.drafts import make_draft
from support.made_up import made_up_result
from tito_core.ledger import Ledger
from tito_core.store import LedgerFile
from tito_core.termination import Termination


class Fated:
    """Workers whose rollouts take their time, fail or hang, by chance.

    Args:
        seed: What is drawn is drawn from it.
        failing: Share of the rollouts that fail.
        hanging: Share of those that never end.
    """

    need_prompt = False

    def __init__(self, seed: int = 0, failing: float = 0.0, hanging: float = 0.0) -> None:
        self._dice = random.Random(seed)
        self.failing, self.hanging = failing, hanging
        self.running = self.most = 0
        self.played: Counter[tuple[str, int]] = Counter()
        self.cancelled = 0
        self.live: weakref.WeakSet[Any] = weakref.WeakSet()

    async def run(self, rollout: Rollout) -> RolloutResult:
        self.running += 1
        self.most = max(self.most, self.running)
        fate = self._dice.random()
        try:
            if fate < self.hanging:
                await asyncio.Event().wait()
            for _ in range(self._dice.randrange(4)):
                await asyncio.sleep(0)
            done = made_up_result(rollout, "ServerError: gone." if fate < self.hanging + self.failing else None)
            self.live.add(done.ledger)
            self.played[rollout.task.id, rollout.sample] += done.failure is None
            return done
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def aclose(self) -> None:
        """Nothing to close."""


def tasks(count: int) -> list[dict[str, Any]]:
    return [{"id": f"task {number}", "question": number} for number in range(count)]


def names(path: Path) -> list[tuple[str, int]]:
    return [(entry.task, entry.sample) for entry in entries(path)]


class Stop:
    """Cancels the running collection after so many ends."""

    def __init__(self, after: int) -> None:
        self.after = after
        self.task: asyncio.Task[Any] | None = None
        self.tally: Tally | None = None

    def __call__(self, tally: Tally) -> None:
        self.tally = tally
        if tally.finished + tally.failed >= self.after and self.task is not None:
            self.task.cancel()


@given(data=st.data(), count=st.integers(1, 12), n=st.integers(1, 4), concurrency=st.integers(1, 9))
@settings(max_examples=8)
def test_whatever_stops_it_each_rollout_is_there_once_in_the_end(
    data: st.DataObject, count: int, n: int, concurrency: int
) -> None:
    expected = {(f"task {number}", sample) for number in range(count) for sample in range(n)}

    async def sessions(path: Path) -> None:
        had: list[tuple[str, int]] = []
        played: Counter[tuple[str, int]] = Counter()
        session = 0
        while len(had) < len(expected):
            session += 1
            calm = session > 6 or data.draw(st.integers(0, 3)) == 0
            workers = Fated(data.draw(st.integers(0, 99)), failing=0 if calm else 0.3, hanging=0 if calm else 0.2)
            stop = Stop(10**6 if calm else data.draw(st.integers(0, len(expected))))
            stop.task = asyncio.ensure_future(
                collect(
                    tasks(count),
                    workers,
                    path,
                    n=n,
                    concurrency=concurrency,
                    max_failures=10**6,
                    file_bytes=data.draw(st.sampled_from([500, 4_000, 10**6])),
                    on_end=stop,
                )
            )
            if workers.hanging:  # a few rounds of the loop, and who hangs is cancelled with the rest
                asyncio.get_running_loop().call_later(0.02, stop.task.cancel)
            (outcome,) = await asyncio.gather(stop.task, return_exceptions=True)
            assert isinstance(outcome, Tally | asyncio.CancelledError), outcome
            assert workers.running == 0
            assert workers.most <= concurrency
            now = names(path)
            assert now[: len(had)] == had, "a finished rollout was lost"
            assert len(now) == len(set(now)), "a finished rollout was repeated"
            tally = stop.tally
            assert tally is not None
            assert (tally.before, tally.finished) == (len(had), len(now) - len(had))
            assert tally.missing == len(expected) - len(now)
            assert not played.keys() & (+workers.played).keys(), "a finished rollout was run again"
            had = now
            played = Counter(dict.fromkeys(had, 1))
        assert set(had) == expected
        found = [(ledger.header.task_id, ledger.header.user["sample"]) for ledger in collected(path)]
        assert found == had
        for task in {task for task, _ in expected}:
            groups = {ledger.header.group_id for ledger in collected(path) if ledger.header.task_id == task}
            assert len(groups) == 1

    with TemporaryDirectory() as folder:
        asyncio.run(sessions(Path(folder, "out")))


async def test_memory_holds_the_rollouts_that_run_and_no_others(tmp_path: Path) -> None:
    workers = Fated()
    most = 0

    def count(tally: Tally) -> None:
        nonlocal most
        if tally.finished % 40 == 20:  # a look takes the collector its time
            gc.collect()
            most = max(most, len(workers.live))

    await collect(tasks(50), workers, tmp_path, n=4, concurrency=5, on_end=count)
    assert workers.most == 5
    assert 1 <= most <= 5 + 1
    gc.collect()
    assert not workers.live


async def test_tasks_are_read_as_they_are_needed(tmp_path: Path) -> None:
    """The file is read to be checked, to count, and then no further than the rollouts are."""
    read: list[int] = []

    class Source:
        def __iter__(self) -> Any:
            for number in range(1, 1001):
                read.append(number)
                yield number, {"question": number}

    ahead: list[int] = []
    known = Tasks(Source(), "tasks")

    def look(tally: Tally) -> None:
        if tally.finished == 0 and not tally.failed:
            read.clear()
        ahead.append(len(read) - tally.finished)

    await collect(known, Fated(), tmp_path, concurrency=8, on_end=look)
    assert max(ahead) <= 8 + 1


async def test_more_samples_and_more_tasks_add_to_what_is_there(tmp_path: Path) -> None:
    await collect(tasks(3), Fated(), tmp_path, n=2)
    before = names(tmp_path)
    more = await collect(tasks(5), Fated(), tmp_path, n=3)
    assert (more.total, more.before, more.finished) == (15, 6, 9)
    assert names(tmp_path)[:6] == before
    fewer = await collect(tasks(2), Fated(), tmp_path, n=1)
    assert (fewer.total, fewer.before, fewer.finished, fewer.missing) == (2, 2, 0, 0)


async def test_groups_of_two_collections_are_never_one(tmp_path: Path) -> None:
    for name in ("one", "other"):
        await collect(tasks(1), Fated(), tmp_path / name, n=2)
    one, other = ({ledger.header.group_id for ledger in collected(tmp_path / name)} for name in ("one", "other"))
    assert len(one) == len(other) == 1
    assert one != other


async def test_it_gives_up_when_rollouts_fail_one_after_the_other(tmp_path: Path) -> None:
    workers = Fated(failing=1.0)
    with pytest.raises(TooManyFailuresError, match=r"5 rollouts .*ServerError: gone\. .*run the same command again"):
        await collect(tasks(100), workers, tmp_path, concurrency=3, max_failures=5)
    assert workers.running == 0
    assert names(tmp_path) == []
    logged = len((tmp_path / "failures.jsonl").read_text().splitlines())
    assert 5 <= logged < 5 + 3, "those that ended in the same round of the loop may still be logged"
    tally = await collect(tasks(100), Fated(), tmp_path)
    assert (tally.finished, tally.missing) == (100, 0)


async def test_failures_between_finished_rollouts_do_not_end_it(tmp_path: Path) -> None:
    tally = await collect(tasks(200), Fated(seed=3, failing=0.5), tmp_path, concurrency=4, max_failures=25)
    assert tally.failed > 50
    assert tally.failed + tally.finished == 200
    assert tally.missing == tally.failed
    assert {reason.value: count for reason, count in tally.failures.items()} == {"engine_error": tally.failed}


class EndingByLimits(Fated):
    """Workers whose rollouts end in turn as each of `endings`; only the first records a reward."""

    endings = tuple(Termination)[:5]
    assert endings[1:4] == (Termination.TRUNCATED, Termination.CONTEXT, Termination.LIMIT)

    async def run(self, rollout: Rollout) -> RolloutResult:
        ledger = Ledger(group_id=rollout.group_id, task_id=rollout.task.id, user=rollout.user)
        ended = self.endings[rollout.sample]
        if ended is self.endings[0]:
            ledger.annotate("reward", 1)
        return RolloutResult(rollout, ledger, ended)


@pytest.mark.parametrize("reward", [None, -1, np.float32(0.5), True])
async def test_a_rollout_that_a_limit_ended_is_counted_and_can_get_a_reward(reward: Any, tmp_path: Path) -> None:
    tally = await collect(tasks(1), EndingByLimits(), tmp_path, n=5, truncated_reward=reward)
    given = None if reward is None else float(reward)
    expected = [1.0, given, given, given, None]
    assert [entry.reward for entry in sorted(entries(tmp_path), key=lambda entry: entry.sample)] == expected
    ledgers = sorted(collected(tmp_path), key=lambda ledger: ledger.header.user["sample"])
    assert [ledger.annotation("reward") for ledger in ledgers] == expected
    rewarded = 1 if reward is None else 4
    assert (tally.finished, tally.rewarded) == (5, rewarded)
    assert f" {rewarded} of 5 rewarded." in summary(tally).splitlines()[1]
    with pytest.raises(ValueError, match="reward nan is not a finite number"):
        await collect(tasks(1), EndingByLimits(), tmp_path, truncated_reward=float("nan"))


class JudgedByTurn(Fated):
    async def run(self, rollout: Rollout) -> RolloutResult:
        ledger = Ledger(group_id=rollout.group_id, task_id=rollout.task.id, user=rollout.user)
        ledger.commit(make_draft(None, 0, [100], [200]))
        ledger.annotate("reward", 1.0, turn=0)
        return RolloutResult(rollout, ledger, Termination.COMPLETED)


async def test_a_rollout_with_rewards_of_its_turns_is_rewarded(tmp_path: Path) -> None:
    tally = await collect(tasks(3), JudgedByTurn(), tmp_path)
    assert [entry.reward for entry in entries(tmp_path)] == [None] * 3
    assert " 3 of 3 rewarded." in summary(tally)


async def test_a_reward_that_came_too_late_to_be_written_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledgers: list[Ledger] = []
    append = LedgerFile.append

    def append_while_a_judge_is_late(self: LedgerFile, ledger: Ledger, end: bytes | None = None) -> None:
        append(self, ledger, end)
        ledgers[-1].annotate("reward", 1.0)

    class Judged(Fated):
        async def run(self, rollout: Rollout) -> RolloutResult:
            ledgers.append(Ledger(group_id=rollout.group_id, task_id=rollout.task.id, user=rollout.user))
            return RolloutResult(rollout, ledgers[-1], Termination.COMPLETED)

    monkeypatch.setattr(LedgerFile, "append", append_while_a_judge_is_late)
    tally = await collect(tasks(2), Judged(), tmp_path, concurrency=1)
    assert [ledger.annotation("reward") for ledger in collected(tmp_path)] == [None, None]
    assert (tally.finished, tally.rewarded) == (2, 0)


async def test_nothing_is_run_when_a_task_is_invalid(tmp_path: Path) -> None:
    workers = Fated()
    (tmp_path / "tasks.jsonl").write_text('{"a": 1}\n{"a": 2\n')
    with pytest.raises(TaskError, match="line 2 is not JSON"):
        await collect(tmp_path / "tasks.jsonl", workers, tmp_path / "out")
    assert not workers.most
    assert not (tmp_path / "out").exists()
    await collect([{"a": 1}], workers, tmp_path / "out")
    with pytest.raises(TaskError, match="'line-1' has changed"):
        await collect([{"a": 2}, {"a": 3}], workers, tmp_path / "out")
    assert workers.played.total() == 1


async def test_a_disk_that_is_full_ends_it_and_leaves_what_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = LedgerFile.append

    def full(self: LedgerFile, ledger: Ledger, end: bytes | None = None) -> None:
        if len(self) == 7:
            raise OSError(28, "No space left on device")
        append(self, ledger, end)

    monkeypatch.setattr(LedgerFile, "append", full)
    with pytest.raises(OSError, match="No space left"):
        await collect(tasks(20), Fated(), tmp_path, concurrency=4)
    monkeypatch.undo()
    assert len(names(tmp_path)) == 7
    assert (await collect(tasks(20), Fated(), tmp_path)).before == 7
    assert len(list(collected(tmp_path))) == 20


@pytest.mark.parametrize("given", [{"n": 0}, {"concurrency": 0}, {"max_failures": 0}])
async def test_numbers_below_one_are_refused(given: dict[str, int], tmp_path: Path) -> None:
    with pytest.raises(CollectError, match=f"{next(iter(given))}=0.* at least 1"):
        await collect(tasks(1), Fated(), tmp_path, **given)


async def test_a_lock_of_another_process_on_its_file_does_not_stop_the_event_loop(tmp_path: Path) -> None:
    await collect(tasks(1), Fated(), tmp_path)
    workers = Fated()
    with FileIO(tmp_path / "rollouts-00001.tito") as other:  # each open file has a lock of its own
        running = asyncio.create_task(collect(tasks(1), workers, tmp_path, n=2))
        while not workers.played or workers.running:
            await asyncio.sleep(0)
            if not running.done() and not workers.running and not workers.played:
                fcntl.flock(other, fcntl.LOCK_EX)  # the folder is open by now
        for _ in range(20):
            await asyncio.sleep(0)
        assert not running.done()
    tally = await running
    assert (tally.before, tally.finished) == (1, 1)
    assert len(list(collected(tmp_path))) == 2
