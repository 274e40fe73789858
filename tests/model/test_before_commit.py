"""Every check of a turn runs before its commit (law 5): a failure at any step leaves everything unchanged."""

from __future__ import annotations

import asyncio
import copy
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from support.conversations import user
from support.drafts import make_draft
from support.interrupts import Boom
from support.scripted import Says, call, model_of
from tito_core import store
from tito_core.ledger import Ledger

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
