"""Agents with the examples' calculator, as trainers make them, and the ledgers of their rollouts."""

from __future__ import annotations

from typing import Any

from strands import Agent
from strands.hooks import AfterToolCallEvent

from calculator import calculator
from tito_core.ledger import Ledger

QUESTION = "What is 25 * 17?"
ledgers: list[Ledger] = []
"""Of every agent that was made here, in order."""


def make_agent(model: Any, row: Any) -> Agent:
    ledgers.append(model.ledger)
    return Agent(model=model, tools=[calculator], callback_handler=None)


def make_editing_agent(model: Any, row: Any) -> Agent:
    """Make an agent whose history is edited once a tool was called, so that its rollout has two trajectories."""
    agent = make_agent(model, row)

    def edit(event: AfterToolCallEvent) -> None:
        event.agent.messages[0]["content"][0]["text"] = "What is 25 * 17, exactly?"

    agent.hooks.add_callback(AfterToolCallEvent, edit)
    return agent


def called(found: list[Ledger]) -> int:
    """Count the calls that were run."""
    return sum(call.status == "ok" for ledger in found for turn in ledger for call in turn.draft.calls)
