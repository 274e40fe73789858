"""Agents with the examples' calculator, as trainers make them, and the ledgers of their rollouts."""

from __future__ import annotations

from typing import Any

from strands import Agent

from calculator import calculator
from support.multiplying import editing
from tito_core.ledger import Ledger

QUESTION = "What is 25 * 17?"
ledgers: list[Ledger] = []
"""Of every agent that was made here, in order."""


def make_agent(model: Any, row: Any) -> Agent:
    ledgers.append(model.ledger)
    return Agent(model=model, tools=[calculator], callback_handler=None)


def make_editing_agent(model: Any, row: Any) -> Agent:
    return editing(make_agent(model, row))


def called(found: list[Ledger]) -> int:
    """Count the calls that were run."""
    return sum(call.status == "ok" for ledger in found for turn in ledger for call in turn.draft.calls)
