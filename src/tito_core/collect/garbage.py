"""Python's garbage collector in a process that does nothing but collect rollouts."""

from __future__ import annotations

import gc

ROUNDS = 2_000, 10, 100
"""Thresholds of the three generations (`gc.set_threshold`); Python 3.11's own are 700, 10, 10."""


def fewer_rounds() -> None:
    """Look for garbage less often, and never again in what is loaded by now. Call it once, before the rollouts.

    With a thousand agents in memory a full round holds the event loop up for hundreds of milliseconds, and the usual
    thresholds start one every few hundred turns: in all a fifth of the CPU. What agents leave behind in cycles is still
    found, later.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*ROUNDS)
