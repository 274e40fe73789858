"""The ledger of a turn: given, restored, or new after a reset; and a full disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.drafts import make_draft
from tito_core.ledger import Ledger
from tito_core.store import LedgerFile
from tito_core.turn.commit import Recording, TurnNotStoredError


class Owner:
    """The parts of a policy that a recording uses."""

    def __init__(self, store: LedgerFile | None = None) -> None:
        self.store = store

    def ledger(self) -> Ledger:
        return Ledger() if self.store is None else self.store.attach(Ledger())


def recording_of(store: LedgerFile | None = None, ledger: Ledger | None = None) -> Recording:
    policy: Any = Owner(store)
    return Recording(policy, ledger)


def committed(record: Recording, ledger: Ledger, number: int = 0) -> Any:
    history: list[Any] = [{"system": None}, {"role": "user", "content": [{"text": f"{number}?"}]}]
    answer: Any = {"role": "assistant", "content": [{"text": "Yes."}]}
    return record.commit(ledger, make_draft(None, 0, [100], [200]), ledger.match(history), answer)


def test_a_ledger_that_is_given_is_kept_and_streamed(tmp_path: Path) -> None:
    with LedgerFile(tmp_path / "a.tito", "a") as store:
        own = Ledger()
        record = recording_of(store, own)
        assert record.ledger is own
        assert own.sink is not None
        committed(record, own)
        assert own.uuid in store
        assert recording_of(store, own).ledger is own, "a ledger that is attached stays as it is"
    assert recording_of(None, own).ledger is own


def test_the_first_turn_of_a_restored_agent_restores_its_ledger(tmp_path: Path) -> None:
    with LedgerFile(tmp_path / "a.tito", "a") as store:
        old = recording_of(store)
        committed(old, old.ledger)
        key = {"tito": {"ledger": old.ledger.uuid, "turn": 0}}
        fresh = recording_of(store)
        restored = fresh.begin(key)
        assert (restored.uuid, len(restored)) == (old.ledger.uuid, 1)
        assert fresh.begin({"tito": {"ledger": "another", "turn": 0}}) is restored
        for state in (None, {}, {"tito": {"ledger": "unknown", "turn": 0}}):
            late = recording_of(store)
            began = late.begin(state)
            assert began.uuid != old.ledger.uuid
            assert late.begin(key) is began, "other turns may use it"
        given = Ledger()
        assert recording_of(store, given).begin(key) is given
        assert recording_of(None).begin(key).uuid != old.ledger.uuid


def test_a_reset_returns_the_ledger_which_is_not_restored_later(tmp_path: Path) -> None:
    with LedgerFile(tmp_path / "a.tito", "a") as store:
        record = recording_of(store)
        first = record.begin(None)
        committed(record, first)
        assert record.next() is first
        assert record.ledger is not first
        assert first.retained() == []
        key = {"tito": {"ledger": first.uuid, "turn": 0}}
        assert record.begin(key) is record.ledger
        assert record.ledger.uuid != first.uuid
        record.next()
        other = recording_of(store)
        committed(other, other.ledger)
        assert len(record.begin({"tito": {"ledger": other.ledger.uuid, "turn": 0}})) == 1, (
            "another rollout's ledger is restored"
        )
    alone = recording_of(None)
    before = alone.ledger
    assert alone.next() is before
    assert alone.ledger is not before


@pytest.mark.parametrize("stored", [False, True])
def test_a_turn_that_cannot_be_stored_is_not_committed(
    stored: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LedgerFile(tmp_path / "a.tito", "a") as store:
        record = recording_of(store if stored else None)

        def fails(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Ledger, "commit", fails)
        with pytest.raises(TurnNotStoredError) as caught:
            committed(record, record.ledger)
        where = str(store.path) if stored else "the store"
        assert caught.value.errno == 28
        parts = (f"Law 5: {where} ", "turn 0", record.ledger.uuid, "No space left on device", "disk space")
        assert [part for part in parts if part not in str(caught.value.strerror)] == []
    assert issubclass(TurnNotStoredError, OSError)
