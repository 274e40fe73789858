"""Where conversations are played: on one server, or on two at once (see `parity`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from strands_tito.conformance import final_checks
from strands_tito.conformance.fixed_prompts import MAX_TOP
from strands_tito.conformance.laws import Tally
from strands_tito.conformance.player import Player
from strands_tito.conformance.target import ConnectedServer, can_stream
from strands_tito.testing.moves import Move, Opening, Want
from tito_core.backend.protocol import ImageScorer
from tito_core.parsing.grammar import NoCallGrammarError


class Conversation(Protocol):
    """A conversation in progress."""

    async def play(self, move: Move) -> None:
        """Play a move, and check its result."""

    async def close(self) -> None:
        """Run the checks of a finished conversation."""


class Servers(Protocol):
    """The server or servers under test.

    Attributes:
        server: The server whose tokenizer and template the moves are drawn for.
        nondeterministic: Whether moves may depend on the clock or on random numbers.
    """

    server: ConnectedServer
    nondeterministic: bool

    @property
    def updates_weights(self) -> bool:
        """Whether weights may change."""

    @property
    def can_stream(self) -> bool:
        """Whether answers may be streamed."""

    @property
    def takes_images(self) -> bool:
        """Whether messages and tool results may have pictures."""

    @property
    def available_outputs(self) -> Want:
        """All optional outputs that a conversation may request."""

    def begin(self, opening: Sequence[Opening]) -> Conversation:
        """Begin a conversation with the given opening moves."""


class SingleServer:
    """One server."""

    nondeterministic = True

    def __init__(self, server: ConnectedServer, tally: Tally) -> None:
        self.server = server
        self._tally = tally

    @property
    def updates_weights(self) -> bool:
        """Whether weights may change."""
        return bool(self.server.target.weights) and self.server.reports_versions

    @property
    def can_stream(self) -> bool:
        """Whether answers may be streamed."""
        return can_stream(self.server.backend)

    @property
    def takes_images(self) -> bool:
        """Whether messages and tool results may have pictures."""
        return takes_images(self.server)

    @property
    def available_outputs(self) -> Want:
        """All optional outputs that a conversation may request."""
        return available_outputs(self.server, self._tally)

    def begin(self, opening: Sequence[Opening]) -> Conversation:
        """Begin a conversation with the given opening moves."""
        return _SingleConversation(Player(self.server, self._tally, opening))


class _SingleConversation:
    def __init__(self, player: Player) -> None:
        self._player = player

    async def play(self, move: Move) -> None:
        await self._player.play(move)

    async def close(self) -> None:
        await final_checks.close(self._player)


def available_outputs(server: ConnectedServer, tally: Tally) -> Want:
    """Return all optional outputs of a server, and count the checks of the others as skipped."""
    can = server.policy.info.capabilities
    absent = {
        "top": not can.top_logprobs,
        "scored": not can.prompt_logprobs,
        "routed": not can.routed_experts or (can.expert_shape is not True and server.target.experts is None),
        "left": not can.sampling_mask,
    }
    for check, is_absent in absent.items():
        if is_absent:
            tally.skip(check, NO_SHAPE if check == "routed" and can.routed_experts else NOT_AVAILABLE)
    return Want(
        top_logprobs=0 if absent["top"] else min(MAX_TOP, can.top_logprobs or 0),
        prompt_logprobs=not absent["scored"],
        routed_experts=not absent["routed"],
        sampling_mask=not absent["left"],
    )


def takes_images(server: ConnectedServer) -> bool:
    """Return whether the server takes images and scores prompts that have some, and the template shows them."""
    accepted = server.policy.info.images.accepted and isinstance(server.backend, ImageScorer)
    return accepted and "user messages" in server.policy.template.certificate.images


NOT_AVAILABLE = "The server does not offer this output."
NO_SHAPE = "The server does not report the shape of its experts: pass --experts LAYERS,EXPERTS."


def can_force(server: ConnectedServer) -> bool:
    """Return whether a call can be forced in the model's tool-call format."""
    try:
        server.policy.parser.call_grammar({"add": {"type": "object"}}, "add", ())
    except NoCallGrammarError:
        return False
    return True
