"""Conversations that Hypothesis draws, until one breaks a law, and that one made smaller.

Smaller means fewer moves, and plainer ones, that break the same check. Hypothesis would try hundreds of conversations,
which a real server takes an hour for; a few dozen show a person enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from strands_tito.conformance import closing
from strands_tito.conformance.laws import BrokenLawError
from strands_tito.conformance.playing import Playing, Stage, can_force
from strands_tito.conformance.profiles import Profile
from strands_tito.testing import strategies
from strands_tito.testing.moves import Move, Opening
from tito_core.backend.errors import BackendError
from tito_core.interrupt import StoppableRunner
from tito_core.ledger import LawViolationError


@dataclass(frozen=True)
class Found:
    """What ended the play, and the conversation that shows it."""

    error: BaseException
    moves: tuple[Move, ...]


@dataclass
class Drawn:
    """A play of drawn conversations.

    Attributes:
        stage: Where.
        profile: How much.
        seed: What is drawn is drawn from it.
        runner: The event loop.
        progress: Told after each conversation how many there were.
        found: Whatever went wrong.
    """

    stage: Stage
    profile: Profile
    seed: int
    runner: StoppableRunner
    progress: Callable[[int], None]
    found: list[Found] = field(default_factory=list)
    conversations: int = 0

    def play(self) -> Found | None:
        """Play all; return a conversation that went wrong, or None."""
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
            run_state_machine_as_test(hypothesis.seed(self.seed)(_machine(self)), settings=chosen)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            return min(self.found, key=lambda each: len(each.moves)) if self.found else Found(error, ())
        return None


def _machine(drawn: Drawn) -> type[RuleBasedStateMachine]:
    stage = drawn.stage
    tokenizer = stage.connected.policy.tokenizer
    moves = strategies.moves(
        closing.controls_of(tokenizer),
        lambda text: str(tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))) == text,
        can_force=can_force(stage.connected),
        by_chance=stage.by_chance,
        reloads=stage.reloads,
    )
    openings = strategies.openings(streams=stage.can_stream, wants=stage.wants)

    class Conversation(RuleBasedStateMachine):
        """One conversation: each step is one move."""

        playing: Playing

        def __init__(self) -> None:
            super().__init__()
            self.moves: list[Move] = []
            self.failed = False

        @initialize(opening=openings)
        def begin(self, opening: list[Opening]) -> None:
            self.moves += opening
            self.playing = stage.begin(opening)

        @rule(move=moves)
        def step(self, move: Any) -> None:
            self.moves.append(move)
            self._held(self.playing.play(move))

        def teardown(self) -> None:
            if self.failed or not hasattr(self, "playing"):
                return
            self._held(self.playing.close())
            drawn.conversations += 1
            drawn.progress(drawn.conversations)

        def _held(self, work: Any) -> None:
            try:
                drawn.runner.run(work)
            except Exception as error:
                self.failed = True
                broken = refused_as_law(error)
                drawn.found.append(Found(broken, tuple(self.moves)))
                if broken is error:
                    raise
                raise broken from error

    return Conversation


def refused_as_law(error: Exception) -> Exception:
    """Return what the client refused, in a server's answer or in its own ledger, as the law that it breaks."""
    refused = isinstance(error, BackendError | LawViolationError) and str(error).startswith("Law ")
    return BrokenLawError("refused", str(error)) if refused else error


Play = Callable[[tuple[Move, ...]], BrokenLawError | None]
"""Plays a conversation; returns the law that it breaks, or None."""
MOST_TRIES = 60
"""Conversations that are tried at most."""


def shrink_moves(
    broken: BrokenLawError, moves: tuple[Move, ...], play: Play, tries: int = MOST_TRIES
) -> Iterator[tuple[BrokenLawError, tuple[Move, ...]]]:
    """Look for smaller and smaller conversations that break the same check.

    Args:
        broken: What was found.
        moves: The conversation that shows it.
        play: Plays another one.
        tries: How many are tried at most.

    Yields:
        What each that is found breaks, and that conversation; the last one is the smallest.
    """
    going = True
    while going:
        going = False
        for candidate in _candidates(moves):
            if tries == 0:
                return
            tries -= 1
            found = play(candidate)
            if found is not None and found.check is broken.check:
                moves, going = candidate, True
                yield found, moves
                break


def _candidates(moves: tuple[Move, ...]) -> Iterator[tuple[Move, ...]]:
    """Yield what is smaller, that which leaves out most first."""
    size = len(moves) // 2
    while size:
        for start in range(0, len(moves), size):
            yield moves[:start] + moves[start + size :]
        size //= 2
    for at, move in enumerate(moves):
        plain = type(move)()
        if move != plain:
            yield (*moves[:at], plain, *moves[at + 1 :])
