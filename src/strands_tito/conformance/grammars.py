"""Moves under a grammar: a call that is forced, and an answer of a given shape."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import jsonschema
from pydantic import BaseModel, Field

from strands_tito.conformance.agents import TOOLS, Life, uses_of
from strands_tito.testing import moves as m
from tito_core.backend.errors import BadRequestError
from tito_core.ledger import Finish
from tito_core.turn.inputs import UnsupportedToolChoiceError

if TYPE_CHECKING:
    from strands_tito.conformance.player import Player

TOKENS = 200
"""Most tokens of an answer under a grammar, which ends by itself."""


class Shaped(BaseModel):
    """What an answer of a given shape holds."""

    word: str = Field(pattern="^[a-z]{1,8}$")
    count: int = Field(ge=0, le=99)


async def forced(player: Player, life: Life, move: m.Force) -> None:
    """Force a call, and hold it to the tool's schema."""
    tally = player.tally
    life.hear(move.text)
    tool = TOOLS[len(move.text) % len(TOOLS)]
    choice: Any = {"tool": {"name": tool["name"]}} if move.named else {"any": {}}
    player.choose(max_new_tokens=TOKENS, temperature=1.0)
    try:
        answer = await player.turn(life, tool_choice=choice)
    except (UnsupportedToolChoiceError, BadRequestError) as error:
        tally.skip("forced", _first_line(error))
        life.messages.pop()
        return
    draft = player.model.ledger[-1].draft
    if answer is None or draft.finish == Finish.LENGTH:
        tally.skip("forced", "The call was longer than the tokens allowed.")
        return
    uses = uses_of(answer.message)
    names = [each["name"] for each in TOOLS]
    problem = f"turn {len(player.model.ledger) - 1} was forced to call {choice}, and says {answer.message['content']}."
    tally.hold("forced", bool(uses) and all(use["name"] in names for use in uses), problem)
    if move.named:
        tally.hold("forced", {use["name"] for use in uses} == {tool["name"]}, problem)
    for use in uses:
        schema = TOOLS[names.index(use["name"])]["inputSchema"]["json"]
        sound = jsonschema.Draft202012Validator(schema).is_valid(use["input"])
        tally.hold("forced", sound, problem)


async def shaped(player: Player, life: Life, move: m.Shape) -> None:
    """Give an answer a shape, and read it."""
    tally = player.tally
    life.hear(move.text)
    player.choose(max_new_tokens=TOKENS, temperature=1.0)
    try:
        answer = await player.turn(life, structured_output_model=Shaped)
    except BadRequestError as error:
        tally.skip("shaped", _first_line(error))
        life.messages.pop()
        return
    if answer is None or player.model.ledger[-1].draft.finish == Finish.LENGTH:
        tally.skip("shaped", "The answer was longer than the tokens allowed.")
        return
    text = "".join(block.get("text", "") for block in answer.message["content"])
    try:
        Shaped.model_validate_json(text)
        sound = True
    except ValueError:
        sound = False
    tally.hold("shaped", sound, f"{text!r} has not the shape {json.dumps(Shaped.model_json_schema())}.")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
