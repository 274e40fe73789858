"""A failed turn leaves no trace in the ledger or on the engine (law 5)."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import pytest
from strands import Agent

from support.backends import TRIES
from support.scripted import Says, engine_of, model_of, tokenizer
from tito_conformance.testing import ScriptedServer
from tito_core import TITOModel, store
from tito_core.backend import (
    EngineConnectionError,
)
from tito_core.store import LedgerFile
from tito_core.turn.recording import TurnNotStoredError

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
