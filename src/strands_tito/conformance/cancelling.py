"""Moves that cancel a turn: the ledger must be whole, and nothing may run on."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from strands.types.exceptions import ContextWindowOverflowException

from strands_tito.conformance.agents import Answer, SimulatedAgent, collect_answer
from strands_tito.testing import moves as m

if TYPE_CHECKING:
    from strands_tito.conformance.player import Player

CANCELLED_TOKENS = 96
"""Limit of an answer that will be cancelled: enough that it is still in progress."""


async def play_cancel(player: Player, agent: SimulatedAgent, move: m.Cancel) -> None:
    """Cancel a turn. The ledger must be whole, whether or not the answer was complete by then."""
    agent.add_input(move.text)
    player.set_sampling(max_new_tokens=CANCELLED_TOKENS, ignore_eos=True)
    before, signal = len(player.model.ledger), threading.Event()
    player.abandoned += 1
    try:
        answer = await _cancel(player.stream(agent, cancel_signal=signal), signal, move)
    except ContextWindowOverflowException:
        player.abandoned -= 1
        agent.clear()
        return
    after = len(player.model.ledger)
    completed = answer is not None and answer.stop_reason is not None
    player.tally.require(
        "cancelled",
        after - before == int(completed),
        f"a turn that was {'complete' if completed else 'cancelled'} left {after - before} turns in the ledger.",
    )
    if completed and answer is not None:
        player.abandoned -= 1
        player.keep_answer(agent, answer, after - 1)


async def _cancel(stream: AsyncGenerator[Any], signal: threading.Event, move: m.Cancel) -> Answer | None:
    task = asyncio.ensure_future(collect_answer(stream))
    try:
        await asyncio.sleep(move.after_s)
        if move.how == "signal":
            signal.set()
        else:
            task.cancel()
        await asyncio.wait({task})  # unlike `await task`, this raises only if this coroutine itself is cancelled
        return None if task.cancelled() else task.result()
    finally:
        if not task.cancelling():
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)  # leave no task behind
        if move.how == "close":
            with contextlib.suppress(RuntimeError):
                await stream.aclose()
