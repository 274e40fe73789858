"""Moves under a grammar: forced tool calls, and structured outputs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import jsonschema
from pydantic import BaseModel, Field

from strands_tito.conformance.agents import TOOLS, SimulatedAgent, tool_uses
from strands_tito.testing import moves as m
from tito_core.backend.errors import BadRequestError
from tito_core.ledger import Finish
from tito_core.turn.inputs import UnsupportedToolChoiceError

if TYPE_CHECKING:
    from strands_tito.conformance.player import Player

MAX_TOKENS = 200
"""Limit of an answer under a grammar, which ends by itself."""


class Shaped(BaseModel):
    """The structured output that is requested. Its name is part of the request."""

    word: str = Field(pattern="^[a-z]{1,8}$")
    count: int = Field(ge=0, le=99)


async def play_forced_call(player: Player, agent: SimulatedAgent, move: m.Force) -> None:
    """Force a call, and check it against the tool's schema."""
    tally = player.tally
    agent.add_input(move.text)
    tool = TOOLS[len(move.text) % len(TOOLS)]
    choice: Any = {"tool": {"name": tool["name"]}} if move.named else {"any": {}}
    player.set_sampling(max_new_tokens=MAX_TOKENS, temperature=1.0)
    try:
        answer = await player.run_turn(agent, tool_choice=choice)
    except (UnsupportedToolChoiceError, BadRequestError) as error:
        tally.skip("forced", _first_line(error))
        agent.messages.pop()
        return
    draft = player.model.ledger[-1].draft
    if answer is None or draft.finish == Finish.LENGTH:
        tally.skip("forced", "The call was longer than the token limit.")
        return
    uses = tool_uses(answer.message)
    names = [each["name"] for each in TOOLS]
    index = len(player.model.ledger) - 1
    problem = f"turn {index} was forced to call {choice}, but its content is {answer.message['content']}."
    tally.require("forced", bool(uses) and all(use["name"] in names for use in uses), problem)
    if move.named:
        tally.require("forced", {use["name"] for use in uses} == {tool["name"]}, problem)
    for use in uses:
        schema = TOOLS[names.index(use["name"])]["inputSchema"]["json"]
        valid = jsonschema.Draft202012Validator(schema).is_valid(use["input"])
        tally.require("forced", valid, problem)


async def play_structured_output(player: Player, agent: SimulatedAgent, move: m.Shape) -> None:
    """Request a structured output, and validate it."""
    tally = player.tally
    agent.add_input(move.text)
    player.set_sampling(max_new_tokens=MAX_TOKENS, temperature=1.0)
    try:
        answer = await player.run_turn(agent, structured_output_model=Shaped)
    except BadRequestError as error:
        tally.skip("shaped", _first_line(error))
        agent.messages.pop()
        return
    if answer is None or player.model.ledger[-1].draft.finish == Finish.LENGTH:
        tally.skip("shaped", "The answer was longer than the token limit.")
        return
    text = "".join(block.get("text", "") for block in answer.message["content"])
    try:
        Shaped.model_validate_json(text)
        valid = True
    except ValueError:
        valid = False
    tally.require("shaped", valid, f"{text!r} does not match the schema {json.dumps(Shaped.model_json_schema())}.")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
