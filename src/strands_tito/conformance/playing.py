"""Where a conversation is played: on one server, or on two at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from strands_tito.conformance import closing
from strands_tito.conformance.fixed import MOST_TOP
from strands_tito.conformance.laws import Tally
from strands_tito.conformance.player import Player
from strands_tito.conformance.target import Connected, takes_chunks
from strands_tito.testing.moves import Move, Opening, Want
from tito_core.parsing.grammar import NoCallGrammarError


class Playing(Protocol):
    """A conversation under way."""

    async def play(self, move: Move) -> None:
        """Play a move, and check what came of it."""

    async def close(self) -> None:
        """Check all of it, now that it is over."""


class Stage(Protocol):
    """Where conversations are played.

    Attributes:
        connected: The server whose tokenizer and template are looked at.
        by_chance: Whether a move's outcome may depend on the clock or on random numbers.
        reloads: Whether weights may change.
    """

    connected: Connected
    by_chance: bool

    @property
    def reloads(self) -> bool:
        """Whether weights may change."""

    @property
    def can_stream(self) -> bool:
        """Whether answers may be streamed."""

    @property
    def wants(self) -> Want:
        """All that may be wanted beside."""

    def begin(self, opening: Sequence[Opening]) -> Playing:
        """Begin a conversation that is played so."""


class Alone:
    """One server."""

    by_chance = True

    def __init__(self, connected: Connected, tally: Tally) -> None:
        self.connected = connected
        self._tally = tally

    @property
    def reloads(self) -> bool:
        """Whether weights may change."""
        return self.connected.target.weights is not None and self.connected.names_versions

    @property
    def can_stream(self) -> bool:
        """Whether answers may be streamed."""
        return takes_chunks(self.connected.backend)

    @property
    def wants(self) -> Want:
        """All that may be wanted beside."""
        return wants(self.connected, self._tally)

    def begin(self, opening: Sequence[Opening]) -> Playing:
        """Begin a conversation that is played so."""
        return _Conversation(Player(self.connected, self._tally, opening))


class _Conversation:
    def __init__(self, player: Player) -> None:
        self._player = player

    async def play(self, move: Move) -> None:
        await self._player.play(move)

    async def close(self) -> None:
        await closing.close(self._player)


def wants(connected: Connected, tally: Tally) -> Want:
    """Return all that a server can give beside, and say of the rest why it is not asked for."""
    can = connected.policy.info.capabilities
    absent = {
        "top": not can.top_logprobs,
        "scored": not can.prompt_logprobs,
        "routed": not can.routed_experts or (can.expert_shape is not True and connected.target.experts is None),
        "left": not can.sampling_mask,
    }
    for check, is_absent in absent.items():
        if is_absent:
            tally.skip(check, NO_SHAPE if check == "routed" and can.routed_experts else NOT_GIVEN)
    return Want(
        top_logprobs=0 if absent["top"] else min(MOST_TOP, can.top_logprobs or 0),
        prompt_logprobs=not absent["scored"],
        routed_experts=not absent["routed"],
        sampling_mask=not absent["left"],
    )


NOT_GIVEN = "The server does not give it."
NO_SHAPE = "The server does not say of how many layers its experts are: --experts LAYERS,EXPERTS."


def can_force(connected: Connected) -> bool:
    """Return whether a call can be forced in the model's format."""
    try:
        connected.policy.parser.call_grammar({"add": {"type": "object"}}, "add", ())
    except NoCallGrammarError:
        return False
    return True
