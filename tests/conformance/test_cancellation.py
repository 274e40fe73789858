"""A move that cancels a turn does not swallow another cancellation, and leaves no task behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from typing import Any, Literal

import pytest

from tito_conformance.player import _cancelled_answer
from tito_conformance.testing import moves as m


@pytest.mark.parametrize("how", ["task", "close", "signal"])
@pytest.mark.parametrize("when", ["before the move cancels", "during the abort"])
def test_a_run_that_is_stopped_during_a_cancel_stops(how: Literal["task", "close", "signal"], when: str) -> None:
    async def play() -> None:
        begun, aborting, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def stream() -> AsyncGenerator[Any]:
            try:
                begun.set()
                await asyncio.Event().wait()
                yield {}
            finally:
                aborting.set()
                for _ in range(5):
                    await asyncio.sleep(0)
                ended.set()

        after_s = 600.0 if when.startswith("before") else 0.0
        signal = threading.Event()
        move = asyncio.create_task(_cancelled_answer(stream(), signal, m.Cancel(how=how, after_s=after_s)))
        await begun.wait()
        if when.startswith("before") or how == "signal":  # nobody reads the signal here, so the stream waits on
            for _ in range(5):
                await asyncio.sleep(0)
        else:
            await aborting.wait()
        move.cancel()
        await asyncio.wait({move})
        assert move.cancelled()
        assert ended.is_set()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(play())
