"""A turn that is given up in the middle, in each of the ways in which Strands and people do it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from tito_conformance.agents import Answer, Life, listen
from tito_core.testing import moves as m

if TYPE_CHECKING:
    from tito_conformance.player import Player

TOKENS = 96
"""Tokens of an answer that is to be broken off: enough for it to be under way."""


async def cancelled(player: Player, life: Life, move: m.Cancel) -> None:
    """Break off; whether or not the answer was in by then, the ledger must be whole."""
    life.hear(move.text)
    player.choose(max_new_tokens=TOKENS, ignore_eos=True)
    before, signal = len(player.model.ledger), threading.Event()
    player.given_up += 1
    answer = await _broken_off(player.stream(life, cancel_signal=signal), signal, move)
    after = len(player.model.ledger)
    came = answer is not None and answer.reason is not None
    player.tally.hold("cancelled", after - before == int(came), f"a turn that was cancelled left {after - before}.")
    if came and answer is not None:
        player.given_up -= 1
        player.keep(life, answer, after - 1)


async def _broken_off(stream: AsyncGenerator[Any], signal: threading.Event, move: m.Cancel) -> Answer | None:
    task = asyncio.ensure_future(listen(stream))
    try:
        await asyncio.sleep(move.after_s)
        if move.how == "signal":
            signal.set()
        else:
            task.cancel()
        await asyncio.wait({task})  # unlike `await task`, raises only a cancellation that is meant for this one
        return None if task.cancelled() else task.result()
    finally:
        if not task.cancelling():
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)  # nothing of it is left behind, whoever broke off
        if move.how == "close":
            with contextlib.suppress(RuntimeError):
                await stream.aclose()
