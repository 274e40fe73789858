"""A failed turn leaves no trace in the ledger, in the store or on the engine (law 5)."""

from __future__ import annotations

import asyncio
import copy
import errno
import fcntl
import os
import sys
import threading
from collections import Counter
from io import FileIO
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from strands import Agent

from support.backends import TRIES
from support.conversations import user
from support.drafts import make_draft
from support.interrupts import Boom
from support.scripted import Says, call, engine_of, model_of, tokenizer
from tito_conformance.testing import ScriptedServer
from tito_core import TITOModel, store
from tito_core.backend import (
    EngineConnectionError,
)
from tito_core.ledger import Ledger
from tito_core.store import LedgerFile
from tito_core.turn.inputs import TurnInput
from tito_core.turn.recording import Recording, TurnNotStoredError, lock_wait_s

HELLO: Any = [{"role": "user", "content": [{"text": "Hello?"}]}]


def snapshot(model: TITOModel) -> bytes:
    return store.encode(model.ledger)


async def test_an_engine_that_dies_in_mid_rollout_is_named_and_can_return() -> None:
    server = ScriptedServer(engine_of("sglang", Says("One.", "Two.")))
    with server:
        model = _model_at(server.base_url, "sglang", patience_s=TRIES[2])
        agent = Agent(model=model, callback_handler=None)
        await agent.invoke_async("Hello?")
        before = snapshot(model)
    with pytest.raises(EngineConnectionError, match="server is running"):
        await agent.invoke_async("Still there?")
    assert snapshot(model) == before
    with ScriptedServer(engine_of("sglang", Says("Back.")), port=int(server.base_url.rsplit(":", 1)[1])):
        await agent.invoke_async("And now?")
    assert [turn.parent for turn in model.ledger] == [None, 0]


class FullDisk:
    """A store's file on a full disk: it accepts `room` more bytes.

    Args:
        file: The real one.
        room: Bytes that it still accepts; the write is cut off there.
        also: Other operations that fail then.
    """

    def __init__(self, file: Any, room: int, also: tuple[str, ...] = ()) -> None:
        self.file = file
        self.room = room
        self.also = also

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = self.file.write(data[: self.room])
        self.room -= taken
        return int(taken)

    def __getattr__(self, name: str) -> Any:
        if name in self.also and not self.room:
            raise OSError(errno.EIO, "Input/output error")
        return getattr(self.file, name)


@pytest.mark.parametrize("also", [(), ("truncate",)])
@pytest.mark.parametrize(("kind", "room"), [("vllm", 0), ("sglang", 1), ("vllm", 40), ("sglang", 200)])
async def test_a_turn_that_the_disk_refuses_is_in_neither_file_nor_ledger(
    kind: str, room: int, also: tuple[str, ...], tmp_path: Path
) -> None:
    with LedgerFile(tmp_path / "rollouts", "a") as file:
        model = model_of(kind, Says("One.", "Lost.", "Two."), store=file)
        agent = Agent(model=model, callback_handler=None)
        await agent.invoke_async("Hello?")
        before, retained = snapshot(model), model.ledger.retained()
        real, file._file = file._file, FullDisk(file._file, room, also)  # type: ignore[assignment]
        why = "Input/output error" if also and room else "No space left on device"
        words = rf"Law 5: {file.path} could not write turn 1 of ledger {model.ledger.uuid} \(.*{why}.*disk space"
        with pytest.raises(TurnNotStoredError, match=words) as caught:
            await agent.invoke_async("And?")
        assert caught.value.errno == (errno.EIO if also and room else errno.ENOSPC)
        file._file = real
        assert snapshot(model) == before
        assert model.ledger.retained() == retained
        assert [message["role"] for message in agent.messages] == ["user", "assistant", "user"]
        assert [store.encode(found) for found in store.read(file.path)] == [before]
        await agent.invoke_async("And now?")
        assert [turn.parent for turn in model.ledger] == [None, 0]
        assert [store.encode(found) for found in store.read(file.path)] == [snapshot(model)]


async def test_a_reset_whose_disk_fails_changes_nothing(tmp_path: Path) -> None:
    with LedgerFile(tmp_path / "rollouts", "a") as file:
        model = model_of("vllm", Says("One.", "Two."), store=file)
        agent = Agent(model=model, callback_handler=None)
        await agent.invoke_async("Hello?")
        before = model.ledger
        real, file._file = file._file, FullDisk(file._file, 0, ("fileno",))  # type: ignore[assignment]
        with pytest.raises(OSError, match="Input/output error"):
            model.reset()
        file._file = real
        assert model.ledger is before
        await agent.invoke_async("And?")
        assert len(model.reset()) == 2


async def test_an_agent_that_was_cancelled_before_its_turn_sends_nothing() -> None:
    model = model_of("vllm", Says("One."))
    cancelled = threading.Event()
    cancelled.set()
    assert [event async for event in model.stream(HELLO, cancel_signal=cancelled)] == []
    assert model.scripted.requests == []  # type: ignore[attr-defined]
    assert len(model.ledger) == 0


def _model_at(url: str, kind: str, **options: Any) -> TITOModel:
    return TITOModel(backend=kind, base_url=url, tokenizer=tokenizer(), **options)


# Every check of a turn runs before its commit (law 5): a failure at any step leaves everything unchanged.


LOOK: Any = {"name": "look", "description": "Look.", "inputSchema": {"json": {"type": "object", "properties": {}}}}
STEPS = tuple(f"/tito_core/{name}/" for name in ("turn", "chat", "parsing", "ledger", "store"))
"""Folders of a turn's steps; test_transactions.py interrupts backends."""


async def stream(model: Any, messages: list[Any], state: dict[str, Any]) -> None:
    async for _ in model.stream(messages, [LOOK], "Be brief.", model_state=state):
        pass


def test_an_answer_that_is_nested_too_deeply_is_refused_before_the_commit(tmp_path: Path) -> None:
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    history = [{"system": None}, user("Well?")]
    with store.LedgerFile(tmp_path / "a.tito", "a") as file:
        ledger = file.attach(Ledger())
        match = ledger.match(history)
        with pytest.raises(RecursionError):
            ledger.commit(make_draft(None, 0, [100], [200]), match, {"role": "assistant", "content": deep})
        assert (len(ledger), ledger.retained(), ledger.uuid in file) == (0, [], False)
        assert ledger.commit(make_draft(None, 0, [100], [200]), match, user("Yes.")).index == 0


class Failing:
    """A profiler that raises at the first call of our function `number`; records whether the commit had begun."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.seen: Counter[str] = Counter()
        self.at = ""
        self.in_commit = False

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or self.at:
            return
        self.in_commit |= code is Ledger.commit.__code__
        # The event loop logs errors of its callback `_next_round`, which calls `_Round.end`.
        skipped = ("__del__", "<lambda>", "_next_round", "_Round.end")
        if not any(step in code.co_filename for step in STEPS) or code.co_qualname.endswith(skipped):
            return
        where = f"{code.co_filename}:{code.co_qualname}"
        if where not in self.seen and len(self.seen) == self.number:
            self.at = where
            raise Boom
        self.seen[where] += 1


async def test_an_error_in_any_function_of_a_turn_leaves_ledger_store_and_state_unchanged(tmp_path: Path) -> None:
    kept = whole = number = 0
    while True:
        path = tmp_path / f"{number}.tito"
        with store.LedgerFile(path, "a") as file:
            model = model_of("vllm", Says(call("look", "{}")), store=file)
            history, state = [user("Well?")], dict[str, Any]()
            await stream(model, history, state)
            before, state_before = store.encode(model.ledger), copy.deepcopy(state)
            other = [*history, {"role": "assistant", "content": [{"text": "Another."}]}, user("And now?")]
            failing, failed = Failing(number), False
            sys.setprofile(failing)
            try:
                async with asyncio.timeout(10):
                    await stream(model, other, state)
            except Exception:  # Boom, or an error that it caused
                failed = True
            finally:
                sys.setprofile(None)
            if not failing.at:
                break
            after = store.encode(model.ledger)
            assert (after == before) == (len(model.ledger) == 1), failing.at
            if failed and not failing.in_commit:
                assert (len(model.ledger), state) == (1, state_before), failing.at
                file.sync()
                assert [store.encode(found) for found in store.read(path)] == [before], failing.at
                kept += 1
            else:
                whole += 1
        number += 1
    assert kept > 100
    assert whole < kept


# A turn and the store that it is written to: the lock of another process, and a file that was truncated.


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


async def test_call_ids_of_a_failed_turn_are_reused() -> None:
    ledgers = []
    for lose in (False, True):
        model = model_of("vllm", Says(call("add", "{}")), ledger=Ledger("00000000-0000-4000-8000-000000000000"))
        if lose:
            lost = model.stream(HELLO)
            await anext(lost)
            await lost.aclose()
        async for _ in model.stream(HELLO):
            pass
        ledgers.append(store.encode(model.ledger, engine=False))
    assert ledgers[0] == ledgers[1]
