"""Random conversations from Hypothesis, until one breaks a law, and the search for a smaller one.

A smaller conversation has fewer and plainer moves and breaks the same check. Hypothesis' own shrinking would try
hundreds of conversations, which takes an hour on a real server; a few dozen are enough here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from strands_tito.conformance import final_checks
from strands_tito.conformance.laws import BrokenLawError
from strands_tito.conformance.profiles import Profile
from strands_tito.conformance.servers import Conversation, Servers, can_force
from strands_tito.testing import strategies
from strands_tito.testing.moves import Move, Opening
from tito_core.backend.errors import BackendError
from tito_core.interrupt import StoppableRunner
from tito_core.ledger import LawViolationError


@dataclass(frozen=True)
class Failure:
    """An error that ended the run, and the conversation that raised it."""

    error: BaseException
    moves: tuple[Move, ...]


@dataclass
class RandomConversations:
    """Plays random conversations.

    Attributes:
        servers: The servers under test.
        profile: How many conversations, and how long.
        seed: Seed of the random moves.
        runner: Runs the event loop.
        progress: Called after each conversation with the number of conversations so far.
        failures: Failures so far.
        conversations: Conversations so far.
    """

    servers: Servers
    profile: Profile
    seed: int
    runner: StoppableRunner
    progress: Callable[[int], None]
    failures: list[Failure] = field(default_factory=list)
    conversations: int = 0

    def play(self) -> Failure | None:
        """Play all conversations. Return the shortest one that failed, or None."""
        chosen = settings(
            max_examples=self.profile.conversations,
            stateful_step_count=self.profile.moves,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
            print_blob=False,
            report_multiple_bugs=False,
        )
        try:
            run_state_machine_as_test(hypothesis.seed(self.seed)(_state_machine(self)), settings=chosen)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            return min(self.failures, key=lambda each: len(each.moves)) if self.failures else Failure(error, ())
        return None


def _state_machine(run: RandomConversations) -> type[RuleBasedStateMachine]:
    servers = run.servers
    tokenizer = servers.server.policy.tokenizer
    moves = strategies.moves(
        final_checks.control_strings(tokenizer),
        lambda text: str(tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))) == text,
        can_force=can_force(servers.server),
        by_chance=servers.nondeterministic,
        reloads=servers.updates_weights,
    )
    openings = strategies.openings(streams=servers.can_stream, wants=servers.available_outputs)

    class ConversationMachine(RuleBasedStateMachine):
        """One conversation: each step is one move."""

        conversation: Conversation

        def __init__(self) -> None:
            super().__init__()
            self.moves: list[Move] = []
            self.failed = False

        @initialize(opening=openings)
        def begin(self, opening: list[Opening]) -> None:
            self.moves += opening
            self.conversation = servers.begin(opening)

        @rule(move=moves)
        def step(self, move: Any) -> None:
            self.moves.append(move)
            self._run(self.conversation.play(move))

        def teardown(self) -> None:
            if self.failed or not hasattr(self, "conversation"):
                return
            self._run(self.conversation.close())
            run.conversations += 1
            run.progress(run.conversations)

        def _run(self, work: Any) -> None:
            try:
                run.runner.run(work)
            except Exception as error:
                self.failed = True
                broken = as_broken_law(error)
                run.failures.append(Failure(broken, tuple(self.moves)))
                if broken is error:
                    raise
                raise broken from error

    return ConversationMachine


def as_broken_law(error: Exception) -> Exception:
    """Convert an error that names a law, because the client refused a response or its ledger, to `BrokenLawError`."""
    refused = isinstance(error, BackendError | LawViolationError) and str(error).startswith("Law ")
    return BrokenLawError("refused", str(error)) if refused else error


Play = Callable[[tuple[Move, ...]], BrokenLawError | None]
"""Plays a conversation, and returns the law that it breaks, or None."""
MAX_TRIES = 60
"""Default limit of conversations that `shrink_moves` plays."""


def shrink_moves(
    broken: BrokenLawError, moves: tuple[Move, ...], play: Play, tries: int = MAX_TRIES
) -> Iterator[tuple[BrokenLawError, tuple[Move, ...]]]:
    """Search for smaller and smaller conversations that break the same check.

    Args:
        broken: The law that was broken.
        moves: The conversation that breaks it.
        play: Plays another conversation.
        tries: Largest number of conversations to play.

    Yields:
        The broken law and the conversation, for each smaller one. The last one is the smallest.
    """
    improved = True
    while improved:
        improved = False
        for candidate in _candidates(moves):
            if tries == 0:
                return
            tries -= 1
            found = play(candidate)
            if found is not None and found.check is broken.check:
                moves, improved = candidate, True
                yield found, moves
                break


def _candidates(moves: tuple[Move, ...]) -> Iterator[tuple[Move, ...]]:
    """Yield smaller conversations, the smallest first."""
    size = len(moves) // 2
    while size:
        for start in range(0, len(moves), size):
            yield moves[:start] + moves[start + size :]
        size //= 2
    for at, move in enumerate(moves):
        plain = type(move)()
        if move != plain:
            yield (*moves[:at], plain, *moves[at + 1 :])
