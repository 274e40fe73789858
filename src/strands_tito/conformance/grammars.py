"""Moves under a grammar: forced tool calls, several calls in one answer, and structured outputs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import jsonschema
from pydantic import BaseModel, Field

from strands_tito.conformance.agents import TOOLS, SimulatedAgent, tool_uses
from strands_tito.testing import moves as m
from tito_core.backend.errors import BadRequestError, GenerationAbortedError, ServerError
from tito_core.backend.sampling import Grammar
from tito_core.ledger import Finish
from tito_core.turn.inputs import UnsupportedToolChoiceError

if TYPE_CHECKING:
    from strands_tito.conformance.player import Player

MAX_TOKENS = 200
"""Limit of an answer under a grammar, which ends by itself."""
REFUSALS = (ServerError, GenerationAbortedError)
"""XGrammar 0.2.7 and 0.2.8 sometimes refuse a control token that their own mask allowed. Both engines then answer 500,
and SGLang ends a stream as aborted."""


class Shaped(BaseModel):
    """The structured output that is requested. Its name is part of the request."""

    word: str = Field(pattern="^[a-z]{1,8}$")
    count: int = Field(ge=0, le=99)


async def play_forced_call(player: Player, agent: SimulatedAgent, move: m.Force) -> None:
    """Force a call, and check it against the tool's schema."""
    tally = player.tally
    if not player.server.tools:
        tally.skip("forced", "The context is too short for tools.")
        return
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
    except REFUSALS as error:
        await _sample_without(player, agent, "forced", error)
        return
    if answer is None or player.model.ledger[-1].draft.finish == Finish.LENGTH:
        tally.skip("forced", "The call was longer than the token limit.")
        return
    uses = tool_uses(answer.message)
    names = [each["name"] for each in TOOLS]
    where = player.where(len(player.model.ledger) - 1)
    problem = f"the turn was forced to call {choice}, but its content is {answer.message['content']}."
    tally.require("forced", bool(uses) and all(use["name"] in names for use in uses), problem, 1, where)
    if move.named:
        tally.require("forced", {use["name"] for use in uses} == {tool["name"]}, problem, 1, where)
    for use in uses:
        schema = TOOLS[names.index(use["name"])]["inputSchema"]["json"]
        valid = jsonschema.Draft202012Validator(schema).is_valid(use["input"])
        tally.require("forced", valid, problem, 1, where)


async def play_calls(player: Player, agent: SimulatedAgent, move: m.Call) -> None:
    """Make the policy write calls, some of them malformed; `Player.run_turn` checks the result.

    The grammar is a sampling parameter here, so the client reads the answer like any other.
    """
    tags = player.calls.tags
    agent.add_input(move.text)
    if tags is None or not player.server.tools:
        player.tally.skip("calls", "The format is not a JSON object between two tags, or there are no tools.")
        await player.sample(agent)
        return
    added = player.server.policy.tokenizer.get_added_vocab()
    elements: list[dict[str, Any]] = []
    for call in move.calls:
        parts = (tags[0], f"\n{call}\n", tags[1])
        elements += [
            {"type": "token", "token": added[part]} if part in added else {"type": "const_string", "value": part}
            for part in parts
        ]
    form = {"type": "structural_tag", "format": {"type": "sequence", "elements": elements}}
    grammar = Grammar(kind="structural_tag", value=json.dumps(form))
    try:
        await player.sample(agent, max_new_tokens=MAX_TOKENS, ignore_eos=False, grammar=grammar)
    except (BadRequestError, *REFUSALS) as error:
        await _sample_without(player, agent, "calls", error)


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
    except REFUSALS as error:
        await _sample_without(player, agent, "shaped", error)
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
    problem = f"{text!r} does not match the schema {json.dumps(Shaped.model_json_schema())}."
    tally.require("shaped", valid, problem, 1, player.where(len(player.model.ledger) - 1))


async def _sample_without(player: Player, agent: SimulatedAgent, check: str, error: Exception) -> None:
    """Sample a turn without its grammar, and count the check as skipped. Raise again if the fault was another one."""
    player.abandoned += isinstance(error, GenerationAbortedError)
    await player.sample(agent)
    player.tally.skip(check, _first_line(error))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
