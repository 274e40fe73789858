"""Random forests, two ledgers in one file, compared with an independent oracle of plain lists and dicts."""

from __future__ import annotations

import copy
import pickle
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from support.equal import expect_equal, expect_match
from support.forests import Dice, broken, digest_of, draft_of, images_of, random_turn
from support.oracle import Oracle, PlainTurn
from tito_core import store
from tito_core.ledger import Annotation, Draft, Header, Image, Ledger, Turn, check_ledger

UUIDS = ["00000000-0000-4000-8000-000000000000", "ffffffff-ffff-4fff-bfff-ffffffffffff"]
MESSAGES: list[Any] = [
    {"role": "user", "content": [{"text": "hi"}]},
    {"role": "user", "content": [{"text": "hi"}], "n": 1},
    {"role": "user", "content": [{"text": "hi"}], "n": 1.0},
    {"role": "user", "content": [{"text": "hi"}], "n": True},
    {"role": "assistant", "content": [{"text": "[blank text]"}]},
    {"role": "assistant", "content": [{"reasoningContent": {"redacted": None}}]},
]
USERS: list[dict[str, Any]] = [{}, {"a": [1, 1.0, True, None, {"ü": "\x00"}]}, {"big": 2**63, "low": -(2**63)}]
VALUES: list[Any] = [1.0, 1, True, None, "", [1, [2.5]], {"a": {"b": []}}, float("nan"), float("-inf"), -0.0]
MEMORY = Path("/dev/shm")  # a file system in memory, if there is one
FOLDER = tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None)
ROLLS = st.binary(min_size=128, max_size=128)  # one draw per rule keeps Hypothesis fast


EMPTY = {"role": "assistant", "content": []}


class Refusing:
    """A sink that raises, as on a full disk."""

    def turn(self, header: Header, turn: Turn, images: Sequence[Image]) -> None:
        raise OSError(28, "No space left on device")

    def annotation(self, header: Header, index: int, annotation: Annotation) -> None:
        raise OSError(28, "No space left on device")


class Forests(RuleBasedStateMachine):
    @initialize(roll=ROLLS)
    def begin(self, roll: bytes) -> None:
        dice = Dice(roll)
        self.whole = dice.number(2)
        self.path = Path(FOLDER.name, "rollouts.tito")
        self.path.write_bytes(b"")
        self.file = store.LedgerFile(self.path, "a")
        self.ledgers, self.oracles = [], []
        for uuid in UUIDS:
            header = {
                "uuid": uuid,
                "group_id": dice.pick([None, "g", ""]),
                "task_id": dice.pick([None, "ü"]),
                "tokenizer": dice.pick([None, "t"]),
                "user": dice.pick(USERS),
            }
            self.oracles.append(Oracle(header))
            self.ledgers.append(self.file.attach(Ledger(**header)))

    @rule(roll=ROLLS)
    def commit(self, roll: bytes) -> None:
        dice = Dice(roll)
        for _ in range(dice.pick([1, 2, 3, 4])):
            number = dice.pick([0, 0, 1])
            self._commit(dice, self.ledgers[number], self.oracles[number])

    def _commit(self, dice: Dice, ledger: Ledger, oracle: Oracle) -> None:
        parent = dice.pick([None, *range(len(oracle.turns))][::-1])
        history, match, answer = self._history(dice, oracle, parent), None, None
        before = dice.pick(["", "seal", "commit"])
        plain = random_turn(dice, oracle, parent)
        if history is None:
            plain.fingerprint = bytes([dice.number(256)] * dice.pick([16, 0, 1]))
        else:
            answer = {"role": "assistant", "content": [{"text": dice.pick(["yes", "no"])}]}
            plain.history = [*history, answer]
            plain.fingerprint = digest_of(plain.history)
            match = ledger.match(history) if dice.pick([True, True, False]) else None
            if match is not None:
                assert match.digest == digest_of(history)
        draft = self._draft(plain, oracle)
        if before == "seal":
            assert ledger.seal().retained() == []
        elif before == "commit" and dice.seldom():  # another agent commits an equal turn first
            ledger.commit(draft, images=images_of(draft))
            oracle.commit(replace(plain, branch=plain.branch))
        turn = ledger.commit(draft, match, answer, images_of(draft))
        oracle.commit(plain)
        assert turn is ledger[len(oracle.turns) - 1]

    def _history(self, dice: Dice, oracle: Oracle, parent: int | None) -> list[Any] | None:
        """Return a history that continues the parent's, another turn's or no known one; None for an unknown one."""
        known = [turn.history for turn in oracle.turns if turn.history is not None]
        if parent is not None and oracle.turns[parent].history is not None:
            known.append(oracle.turns[parent].history)
        beginning = dice.pick([[{"system": None, "tools": []}], None, [{"system": "s"}], *known[::-1]])
        if beginning is None:
            return None
        return [*beginning[: dice.pick([99, 99, 2])], *[dice.pick(MESSAGES) for _ in range(dice.pick([1, 0, 2]))]]

    def _draft(self, turn: PlainTurn, oracle: Oracle) -> Draft:
        return replace(draft_of(turn), prompt_length=oracle.length(turn.parent) + len(turn.prompt))

    @rule(roll=ROLLS)
    def fail(self, roll: bytes) -> None:
        """A broken draft, and a good one that the sink cannot write, leave no trace."""
        dice = Dice(roll)
        number = dice.number(2)
        ledger, oracle = self.ledgers[number], self.oracles[number]
        parent = dice.pick([None, *range(len(oracle.turns))][::-1])
        good = self._draft(random_turn(dice, oracle, parent), oracle)
        match = ledger.match([{"system": None, "tools": []}])
        bad, error = broken(dice, good, oracle)
        before = store.encode(ledger)
        self._expect_refused(ledger, error, lambda: ledger.commit(bad, match, EMPTY, images_of(bad)))
        self._expect_refused(ledger, IndexError, lambda: ledger.annotate("reward", 1.0, turn=len(oracle.turns)))
        self._expect_refused(ledger, IndexError, lambda: ledger.annotate("reward", 1.0, turn=-1))
        ledger.sink = Refusing()
        self._expect_refused(ledger, OSError, lambda: ledger.commit(good, match, EMPTY, images_of(good)))
        self._expect_refused(ledger, OSError, lambda: ledger.annotate("reward", 1.0))
        ledger.sink = self.file
        assert store.encode(ledger) == before

    def _expect_refused(self, ledger: Ledger, error: type[Exception], attempt: Callable[[], object]) -> None:
        def state() -> tuple[int, int, int, int, list[int]]:
            held = len(ledger), len(ledger.annotations), len(ledger.retained())
            return *held, self.path.stat().st_size, ledger.leaves()

        before = state()
        with pytest.raises(error):
            attempt()
        assert state() == before

    @rule(roll=ROLLS)
    def operate(self, roll: bytes) -> None:
        """Run one to three other operations."""
        dice = Dice(roll)
        for _ in range(dice.pick([1, 2, 3])):
            number = dice.number(2)
            operation = dice.pick([self._annotate, self._take_call_id, self._match, self._seal, self._reload])
            operation(dice, number, self.ledgers[number], self.oracles[number])

    def _annotate(self, dice: Dice, number: int, ledger: Ledger, oracle: Oracle) -> None:
        name, value, turn = dice.pick(["score", "", "ü"]), dice.pick(VALUES), dice.pick([None, *range(len(ledger))])
        ledger.annotate(name, value, turn=turn)
        oracle.annotations.append((name, value, turn))

    def _take_call_id(self, dice: Dice, number: int, ledger: Ledger, oracle: Oracle) -> None:
        oracle.call_ids += 1
        assert ledger.call_ids.next([]) == f"call_{oracle.header['uuid'][:8]}_{oracle.call_ids}"

    def _match(self, dice: Dice, number: int, ledger: Ledger, oracle: Oracle) -> None:
        history = self._history(dice, oracle, dice.pick([None, *range(len(oracle.turns))][::-1]))
        if history is not None:
            expect_match(ledger, oracle, history)

    def _seal(self, dice: Dice, number: int, ledger: Ledger, oracle: Oracle) -> None:
        assert ledger.seal().retained() == []

    def _reload(self, dice: Dice, number: int, ledger: Ledger, oracle: Oracle) -> None:
        """Replace the ledger by a copy, as another process would load it."""
        way = dice.pick(["file", "record", "bytes", "pickle", "deepcopy"])
        if way == "file" and not oracle.turns and not oracle.annotations:
            return  # nothing was written yet
        if way == "file":
            with store.LedgerFile(self.path) as stored:
                ledger = stored.load(ledger.uuid)
        elif way == "record":
            record = store.to_record(ledger)
            expect_plain(record)
            ledger = store.from_record(record)
        elif way == "pickle":
            ledger = pickle.loads(pickle.dumps(ledger))
        elif way == "deepcopy":
            ledger = copy.deepcopy(ledger)
        else:
            ledger = store.from_record(msgspec.msgpack.decode(store.encode(ledger)))
        self.ledgers[number] = self.file.attach(ledger)
        oracle.reload()
        assert ledger.call_ids.given == oracle.call_ids

    def teardown(self) -> None:
        self.file.close()
        with store.LedgerFile(self.path) as stored:
            self._compare(stored)

    def _compare(self, stored: store.LedgerFile) -> None:
        for ledger, oracle in zip(self.ledgers, self.oracles, strict=True):
            assert (ledger.uuid in stored) == bool(oracle.turns or oracle.annotations)
            again = stored.load(ledger.uuid) if ledger.uuid in stored else ledger
            assert store.encode(again) == store.encode(ledger)
            check_ledger(again)
            expect_equal((ledger, again)[self.whole], oracle)  # either one: both have the same record
            for each in (ledger, again):
                for turn in oracle.turns[-2:]:
                    if turn.history is not None:
                        expect_match(each, oracle, turn.history)


def expect_plain(value: Any) -> None:
    """Assert that a record holds only JSON's types and bytes."""
    if type(value) is dict:
        assert all(type(key) is str for key in value)
        value = list(value.values())
    if type(value) is list:
        for item in value:
            expect_plain(item)
    else:
        assert value is None or type(value) in (str, int, float, bool, bytes), type(value)


Forests.TestCase.settings = settings(
    max_examples=50, stateful_step_count=5, deadline=None, suppress_health_check=list(HealthCheck)
)
TestForests = Forests.TestCase
