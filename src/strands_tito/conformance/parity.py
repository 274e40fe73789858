"""Law 13 on two servers of the same weights: one script, played on both side by side, makes one ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from strands_tito.conformance import closing
from strands_tito.conformance.laws import Tally
from strands_tito.conformance.player import Player
from strands_tito.conformance.playing import Playing
from strands_tito.conformance.target import Connected, takes_chunks
from strands_tito.testing.moves import Move, Opening, Want
from tito_core import store
from tito_core.backend.checked import score
from tito_core.ledger import Ledger, Turn
from tito_core.ledger.header import new_uuid
from tito_core.store.records import turn_record

GREEDY = {"temperature": 0.0}
"""What two servers' random numbers have no part in."""
UNDER_A_GRAMMAR = "Under a grammar, which each engine makes a mask of by itself."
PARTED = "The two answers differ: the conversation begins anew."
OTHER_MEANING = "One server's logprobs mean something else here than the other's."


class Pair:
    """Two servers, on which each conversation is played at once.

    Moves whose outcome depends on the clock or on random numbers are left out, and every answer is greedy.
    """

    by_chance = False
    reloads = False
    wants = Want()

    def __init__(self, connected: Connected, against: Connected, tally: Tally) -> None:
        self.connected = connected
        self.against = against
        self._tally = tally

    @property
    def can_stream(self) -> bool:
        """Whether answers may be streamed."""
        return all(takes_chunks(each.policy.backend) for each in (self.connected, self.against))

    def begin(self, opening: Sequence[Opening]) -> Playing:
        """Begin a conversation that is played so."""
        lengths = [each.policy.info.max_model_len for each in (self.connected, self.against)]
        limit = min((length for length in lengths if length is not None), default=None)

        def players() -> tuple[Player, Player]:
            uuid = new_uuid()
            one, other = (
                Player(each, self._tally, opening, ledger=_ledger(uuid, each), limit=limit, always=GREEDY)
                for each in (self.connected, self.against)
            )
            return one, other

        return _Conversation(players, self._tally)


def _ledger(uuid: str, connected: Connected) -> Ledger:
    """Make a policy's own ledger, under a given name: ids of calls come from it."""
    header = connected.policy.ledger().header
    return Ledger(uuid, tokenizer=header.tokenizer, certificate=header.certificate)


class _Conversation:
    """One script on two servers.

    Args:
        players: Makes one for each server, of a new rollout.
        tally: Where checks are counted.

    Attributes:
        parted: Whether a near-tie fell one way here and another way there, after which the histories differ.
    """

    def __init__(self, players: Callable[[], tuple[Player, Player]], tally: Tally) -> None:
        self._players = players
        self._one, self._other = players()
        self._tally = tally
        self.parted = False

    async def play(self, move: Move) -> None:
        if self.parted:
            await self.close()
            self._one, self._other = self._players()
            self.parted = False
        before = len(self._one.model.ledger)
        players = (self._one, self._other)
        for result in await asyncio.gather(*(player.play(move) for player in players), return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
        ones, others = (list(player.model.ledger)[before:] for player in players)
        names = [player.connected.target.backend for player in players]
        problem = f"{type(move).__name__} made {len(ones)} turns on {names[0]} and {len(others)} on {names[1]}."
        self._tally.hold("ledgers", len(ones) == len(others), problem)
        for one, other in zip(ones, others, strict=True):
            if not self.parted:
                await self._compare(one, other)

    async def close(self) -> None:
        for player in (self._one, self._other):
            await closing.close(player)
        if not self.parted:
            headers = [store.to_json(player.model.ledger)["header"] for player in (self._one, self._other)]
            self._tally.hold("ledgers", headers[0] == headers[1], f"the headers are {headers[0]} and {headers[1]}.")

    async def _compare(self, one: Turn, other: Turn) -> None:
        ids, theirs = one.draft.output_ids, other.draft.output_ids
        n = min(len(ids), len(theirs))
        apart = np.flatnonzero(ids[:n] != theirs[:n])
        prompts = np.array_equal(one.draft.prompt_ids, other.draft.prompt_ids)
        if len(apart) and prompts:
            self._agreed(one, other, int(apart[0]))
            await self._near_tie(one, other, int(apart[0]))
            return
        if prompts:
            self._tally.hold("greedy", True, "", n)
            self._agreed(one, other, n)
        mine, others = bare(one), bare(other)
        differing = sorted(name for name in mine.keys() | others.keys() if mine.get(name) != others.get(name))
        said = "; ".join(f"{name} is {mine.get(name)} here and {others.get(name)} there" for name in differing)
        self._tally.hold("ledgers", not differing, f"turn {one.index}: {said[:600]}.")

    def _agreed(self, one: Turn, other: Turn, n: int) -> None:
        """Hold the logprobs of the first `n` tokens to each other, which are equal."""
        meanings = [turn.draft.engine.semantics for turn in (one, other)]
        if not all(meaning.comparable_with_scoring() for meaning in meanings):
            self._tally.skip("agreed", UNDER_A_GRAMMAR if one.draft.constrained else OTHER_MEANING, n)
            return
        worst = float(np.max(np.abs(one.draft.logprobs[:n] - other.draft.logprobs[:n]), initial=0.0))
        tolerance = self._one.connected.target.tolerance_nats
        problem = f"turn {one.index}: equal tokens, but logprobs {worst:.4g} nats apart, more than {tolerance:g}."
        self._tally.hold("agreed", worst <= tolerance, problem, n)
        self._tally.apart_nats = max(self._tally.apart_nats, worst)

    async def _near_tie(self, one: Turn, other: Turn, at: int) -> None:
        """Ask both servers how likely each of two tokens is; a near-tie ends the comparison, any other breaks the law.

        Where no logprob is further from the other server's than the tolerance, a margin above twice as much cannot
        fall the other way.
        """
        self.parted = True
        self._tally.skip("ledgers", PARTED)
        if one.draft.constrained:
            self._tally.skip("greedy", UNDER_A_GRAMMAR)
            return
        ledger, ids = self._one.model.ledger, (int(one.draft.output_ids[at]), int(other.draft.output_ids[at]))
        path = ledger.path_ids(one.index)[: one.path_length - one.draft.columns.output + at].tolist()
        margins = []
        for player, (own, others) in ((self._one, ids), (self._other, ids[::-1])):
            backend = player.connected.policy.backend
            scores = [float((await score(backend, [*path, token]))[-1]) for token in (own, others)]
            margins.append(scores[0] - scores[1])
        where = (
            f"turn {one.index}, token {at}: {ids[0]} here by {margins[0]:.3g} nats, {ids[1]} there by {margins[1]:.3g}"
        )
        near = 2 * self._one.connected.target.tolerance_nats
        self._tally.hold("greedy", max(margins) <= near, f"{where}, which is no near-tie.", max(at, 1))
        self._tally.notes.append(f"A near-tie fell two ways: {where}.")


def bare(turn: Turn) -> dict[str, Any]:
    """Return what two servers must make equal of a turn: all but the engine's record and the logprobs."""
    record: dict[str, Any] = turn_record(turn, engine=False)
    draft = turn.draft
    del record["columns"]
    return record | {
        "prompt_ids": draft.prompt_ids.tolist(),
        "prompt_provenance": draft.prompt_provenance.tolist(),
        "output_ids": draft.output_ids.tolist(),
    }
