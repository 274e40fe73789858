"""A turn and the store that it is written to: the lock of another process, and a file that was truncated."""

from __future__ import annotations

import asyncio
import fcntl
import os
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from support.drafts import make_draft
from tito_core.ledger import Ledger
from tito_core.store import LedgerFile
from tito_core.turn.inputs import TurnInput
from tito_core.turn.recording import Recording, TurnNotStoredError, lock_wait_s


class Owner:
    """The parts of a policy that a recording uses."""

    def __init__(self, store: LedgerFile) -> None:
        self.store = store

    def ledger(self) -> Ledger:
        return self.store.attach(Ledger())


def recording_of(store: LedgerFile) -> Recording:
    policy: Any = Owner(store)
    return Recording(policy, None)


async def committed(record: Recording, ledger: Ledger, number: int = 0, **wait: float) -> Any:
    history: list[Any] = [{"system": None}, {"role": "user", "content": [{"text": f"{number}?"}]}]
    answer: Any = {"role": "assistant", "content": [{"text": "Yes."}]}
    return await record.commit(ledger, make_draft(None, 0, [100], [200]), ledger.match(history), answer, **wait)


def held(path: Path) -> FileIO:
    """Lock a file as another process would: each open file has a lock of its own."""
    other = FileIO(path, "r")
    fcntl.flock(other, fcntl.LOCK_EX)
    return other


async def test_a_lock_of_another_process_does_not_stop_the_event_loop(tmp_path: Path) -> None:
    with LedgerFile(tmp_path / "a.tito", "a") as store:
        record = recording_of(store)
        with held(store.path):
            waiting = asyncio.create_task(committed(record, record.ledger))
            for _ in range(20):  # the loop runs
                await asyncio.sleep(0)
            assert not waiting.done()
        assert (await waiting).index == 0
        assert [len(ledger) for ledger in store] == [1]


@pytest.mark.parametrize("how", ["time", "cancelled"])
async def test_nothing_remains_of_a_turn_whose_wait_for_the_lock_ends(how: str, tmp_path: Path) -> None:
    with LedgerFile(tmp_path / "a.tito", "a") as store:
        record = recording_of(store)
        await committed(record, record.ledger)
        before = store.path.read_bytes()
        with held(store.path):
            if how == "time":
                with pytest.raises(TurnNotStoredError, match=r"another process has held the file's lock for .*lslocks"):
                    await committed(record, record.ledger, within_s=0.05)
            else:
                waiting = asyncio.create_task(committed(record, record.ledger))
                await asyncio.sleep(0)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
        assert (len(record.ledger), store.path.read_bytes()) == (1, before)
        await committed(record, record.ledger)
        assert [len(ledger) for ledger in store] == [2]


@pytest.mark.parametrize(("timeout_s", "elapsed_s", "wait_s"), [(None, 9, 30), (600, 9, 30), (20, 9, 11), (20, 25, 1)])
def test_a_turns_timeout_bounds_the_wait_for_the_lock(timeout_s: float | None, elapsed_s: float, wait_s: float) -> None:
    assert lock_wait_s(timeout_s, elapsed_s) == wait_s


async def test_a_turn_is_refused_before_its_request_where_the_store_was_truncated(tmp_path: Path) -> None:
    with LedgerFile(tmp_path / "a.tito", "a") as store:
        record = recording_of(store)
        await committed(record, record.ledger)
        os.truncate(store.path, 0)
        with pytest.raises(TurnNotStoredError, match=r"truncated .*0 bytes.*store\.append"):
            await record.begin(TurnInput([]))
        with pytest.raises(TurnNotStoredError, match="truncated"):
            await committed(record, record.ledger)
        assert (len(record.ledger), store.path.read_bytes()) == (1, b"")


async def test_the_ledger_that_a_key_names_may_be_the_current_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with LedgerFile(tmp_path / "a.tito", "a") as store:
        record = recording_of(store)
        await record.begin(TurnInput([], model_state={"tito": {"ledger": record.ledger.uuid, "turn": 0}}))
    assert caplog.records == []
