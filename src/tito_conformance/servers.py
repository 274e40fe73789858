"""Where conversations are played: on one server, or on two of the same weights at once.

Law 13 on two servers: the same moves on both must make equal ledgers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tito_conformance import final_checks
from tito_conformance.checks import Tally, checked
from tito_conformance.fixed import MAX_TOP
from tito_conformance.player import Player
from tito_conformance.target import ConnectedServer, can_stream
from tito_conformance.testing.moves import Move, Opening, Want
from tito_core import store
from tito_core.backend.generate import score
from tito_core.backend.protocol import ImageScorer
from tito_core.ledger import Ledger, Turn
from tito_core.ledger.turn import new_uuid
from tito_core.parsing.grammar import NoCallGrammarError
from tito_core.store.records import turn_record


class SingleServer:
    """One server.

    Attributes:
        server: The server whose tokenizer and template the moves are drawn for.
        nondeterministic: Whether moves may depend on the clock or on random numbers.
        updates_weights: Whether weights may change.
        can_stream: Whether answers may be streamed.
        takes_images: Whether messages and tool results may have pictures.
    """

    nondeterministic = True

    def __init__(self, server: ConnectedServer, tally: Tally) -> None:
        self.server = server
        self.updates_weights = bool(server.target.weights) and server.reports_versions
        self.can_stream = can_stream(server.backend)
        self.takes_images = takes_images(server)
        self._tally = tally

    def available_outputs(self) -> Want:
        """Return all optional outputs of the server, and count the checks of the others as skipped."""
        can = self.server.policy.info.capabilities
        absent = {
            "top": not can.top_logprobs,
            "scored": not can.prompt_logprobs,
            "routed": not can.routed_experts or (can.expert_shape is not True and self.server.target.experts is None),
            "left": not can.sampling_mask,
        }
        for check, is_absent in absent.items():
            if is_absent:
                self._tally.skip(check, NO_SHAPE if check == "routed" and can.routed_experts else NOT_AVAILABLE)
        return Want(
            top_logprobs=0 if absent["top"] else min(MAX_TOP, can.top_logprobs or 0),
            prompt_logprobs=not absent["scored"],
            routed_experts=not absent["routed"],
            sampling_mask=not absent["left"],
        )

    def begin(self, opening: Sequence[Opening]) -> Conversation:
        """Begin a conversation with the given opening moves."""
        return _SingleConversation(self.server, self._tally, opening)


class _SingleConversation(Player):
    async def close(self) -> None:
        """Run the checks of a finished conversation."""
        await final_checks.close(self)


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


GREEDY = {"temperature": 0.0}
"""Two servers have different random numbers, so every answer is greedy."""
GRAMMAR_MASKS = "Sampled under a grammar: each engine computes its own token masks."
DIVERGED = "The two answers differ at a near-tie: the conversation starts again."
GRAMMAR_REFUSED = "One server refused a grammar that it had accepted: the conversation starts again."
DIFFERENT_SEMANTICS = "The two servers' logprobs have different semantics here."


class ServerPair:
    """Two servers that play each conversation at the same time.

    Moves that depend on the clock or on random numbers are left out, and every answer is greedy.
    """

    nondeterministic = False
    updates_weights = False

    def __init__(self, server: ConnectedServer, against: ConnectedServer, tally: Tally) -> None:
        self.server = server
        self.against = against
        self.can_stream = can_stream(server.backend) and can_stream(against.backend)
        self.takes_images = takes_images(server) and takes_images(against)
        self._tally = tally

    def available_outputs(self) -> Want:
        """Return none: two servers are compared without optional outputs."""
        return Want()

    def begin(self, opening: Sequence[Opening]) -> Conversation:
        """Begin a conversation with the given opening moves."""
        lengths = [each.policy.info.max_model_len for each in (self.server, self.against)]
        limit = min((length for length in lengths if length is not None), default=None)

        def make_players() -> tuple[Player, Player]:
            uuid = new_uuid()
            one, other = (
                Player(
                    each, self._tally, opening, ledger=_ledger(uuid, each), context_limit=limit, fixed_sampling=GREEDY
                )
                for each in (self.server, self.against)
            )
            return one, other

        return _PairedConversation(make_players, self._tally)


def _ledger(uuid: str, server: ConnectedServer) -> Ledger:
    """Make a ledger with a given uuid, from which the ids of calls are derived."""
    header = server.policy.ledger().header
    return Ledger(uuid, tokenizer=header.tokenizer, certificate=header.certificate)


class _PairedConversation:
    """The same moves on two servers.

    Args:
        make_players: Makes a player for each server, both with a new rollout.
        tally: Counts the checks.

    Attributes:
        diverged: Whether a near-tie fell differently on the two servers, after which the histories differ.
    """

    def __init__(self, make_players: Callable[[], tuple[Player, Player]], tally: Tally) -> None:
        self._make_players = make_players
        self._one, self._other = make_players()
        self._tally = tally
        self.diverged = False

    async def play(self, move: Move) -> None:
        if self.diverged:
            await self.close()
            self._one, self._other = self._make_players()
            self.diverged = False
        before = len(self._one.model.ledger)
        players = (self._one, self._other)
        for result in await asyncio.gather(*(checked(player.play(move)) for player in players), return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
        ones, others = (list(player.model.ledger)[before:] for player in players)
        names = [player.server.target.backend for player in players]
        problem = f"{type(move).__name__} made {len(ones)} turns on {names[0]} and {len(others)} on {names[1]}."
        self._tally.require("ledgers", len(ones) == len(others), problem)
        for one, other in zip(ones, others, strict=True):
            if not self.diverged:
                await self._compare(one, other)

    async def close(self) -> None:
        for player in (self._one, self._other):
            await final_checks.close(player)
        if not self.diverged:
            headers = [store.to_json(player.model.ledger)["header"] for player in (self._one, self._other)]
            problem = f"the headers are {headers[0]} and {headers[1]}."
            self._tally.require("ledgers", headers[0] == headers[1], problem)

    async def _compare(self, one: Turn, other: Turn) -> None:
        if one.draft.constrained != other.draft.constrained:  # each is what its request says: see `Player.run_turn`
            self.diverged = True
            self._tally.skip("ledgers", GRAMMAR_REFUSED)
            return
        ids, other_ids = one.draft.output_ids, other.draft.output_ids
        n = min(len(ids), len(other_ids))
        different = np.flatnonzero(ids[:n] != other_ids[:n])
        same_prompt = np.array_equal(one.draft.prompt_ids, other.draft.prompt_ids)
        if len(different) and same_prompt:
            self._compare_logprobs(one, other, int(different[0]))
            await self._check_near_tie(one, other, int(different[0]))
            return
        if same_prompt:
            self._tally.require("greedy", True, "", n)
            for player, turn in ((self._one, one), (self._other, other)):
                player.server.recorder.compared("ids", "other server", turn.draft.engine.request_id)
            self._compare_logprobs(one, other, n)
        record, other_record = comparable_record(one), comparable_record(other)
        names = sorted(n for n in record.keys() | other_record.keys() if record.get(n) != other_record.get(n))
        values = "; ".join(f"{name} is {record.get(name)} here and {other_record.get(name)} there" for name in names)
        self._tally.require("ledgers", not names, f"turn {one.index}: {values[:600]}.")

    def _compare_logprobs(self, one: Turn, other: Turn, n: int) -> None:
        """Compare the logprobs of the first `n` tokens, which are equal."""
        semantics = [turn.draft.engine.semantics for turn in (one, other)]
        if not all(each.comparable_with_scoring() for each in semantics):
            self._tally.skip("agreed", GRAMMAR_MASKS if one.draft.constrained else DIFFERENT_SEMANTICS, n)
            return
        worst = float(np.max(np.abs(one.draft.logprobs[:n] - other.draft.logprobs[:n]), initial=0.0))
        tolerance = self._one.server.tolerance_nats
        problem = (
            f"turn {one.index}: the tokens are equal, but logprobs are {worst:.4g} nats apart, more than {tolerance:g}."
        )
        self._tally.require("agreed", worst <= tolerance, problem, n)
        self._tally.apart_nats = max(self._tally.apart_nats, worst)

    async def _check_near_tie(self, one: Turn, other: Turn, at: int) -> None:
        """Let both servers score both tokens. A near-tie ends the comparison; a larger margin breaks the law.

        If no logprob differs by more than the tolerance between the servers, a token that leads by more than twice the
        tolerance leads on both.
        """
        self.diverged = True
        self._tally.skip("ledgers", DIVERGED)
        if one.draft.constrained:
            self._tally.skip("greedy", GRAMMAR_MASKS)
            return
        ledger, ids = self._one.model.ledger, (int(one.draft.output_ids[at]), int(other.draft.output_ids[at]))
        path = ledger.path_ids(one.index)[: one.path_length - one.draft.columns.output + at].tolist()
        margins = []
        for player, (own, others) in ((self._one, ids), (self._other, ids[::-1])):
            backend = player.server.policy.backend
            scores = [float((await score(backend, [*path, token]))[-1]) for token in (own, others)]
            margins.append(scores[0] - scores[1])
        where = (
            f"turn {one.index}, token {at}: {ids[0]} here by {margins[0]:.3g} nats, {ids[1]} there by {margins[1]:.3g}"
        )
        near = 2 * self._one.server.tolerance_nats
        problem = f"{where}, more than a near-tie of {near:g} nats."
        self._tally.require("greedy", max(margins) <= near, problem, max(at, 1))
        self._tally.notes.append(f"Near-tie: {where}.")


Conversation = _SingleConversation | _PairedConversation
"""A conversation in progress."""
Servers = SingleServer | ServerPair
"""The server or servers under test."""


def comparable_record(turn: Turn) -> dict[str, Any]:
    """Return the part of a turn that must be equal on two servers: all but the engine's record and the logprobs."""
    record: dict[str, Any] = turn_record(turn, engine=False)
    draft = turn.draft
    del record["columns"]
    return record | {
        "prompt_ids": draft.prompt_ids.tolist(),
        "prompt_provenance": draft.prompt_provenance.tolist(),
        "output_ids": draft.output_ids.tolist(),
    }
