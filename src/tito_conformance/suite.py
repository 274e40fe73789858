"""The whole run: connect, ask what is fixed, play what is drawn, and tell what held."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tito_conformance import closing, drawing, fixed
from tito_conformance.laws import BrokenLawError, Tally
from tito_conformance.moves import Move, Stream
from tito_conformance.player import Player
from tito_conformance.profiles import Profile
from tito_conformance.target import Connected, Target, connect, takes_chunks
from tito_core.backend.errors import BackendError
from tito_core.ledger import LawViolationError
from tito_core.parsing.grammar import NoCallGrammarError

Progress = Callable[[int], None]
"""Told after each conversation how many there were."""


@dataclass
class Outcome:
    """What a run found.

    Attributes:
        connected: The server, with what it said of itself.
        profile: How much was to be played.
        tally: The checks.
        broken: The law that does not hold, or None.
        moves: The smallest conversation that shows it; empty when a fixed question showed it.
        error: Something else that ended the run, as a sentence.
        conversations: How many were played.
        seconds: How long it took.
    """

    connected: Connected
    profile: Profile
    tally: Tally
    broken: BrokenLawError | None = None
    moves: tuple[Move, ...] = ()
    error: str | None = None
    conversations: int = 0
    seconds: float = 0.0
    interrupted: bool = False

    @property
    def turns(self) -> int:
        """How many turns were played, those of smaller conversations that were tried included."""
        return self.tally.turns

    @property
    def sound(self) -> bool:
        """Whether everything that was asked for was done, and held."""
        return self.broken is None and self.error is None and not self.interrupted


@dataclass
class Run:
    """A run in progress, in an event loop of its own."""

    outcome: Outcome
    runner: asyncio.Runner
    progress: Progress
    shrink: bool = True
    found: list[tuple[BaseException, tuple[Move, ...]]] = field(default_factory=list)


def run(target: Target, profile: Profile, progress: Progress = lambda count: None, *, shrink: bool = True) -> Outcome:
    """Test a server.

    Args:
        target: Which.
        profile: How much.
        progress: Told after each conversation.
        shrink: Whether the smallest conversation that breaks a law is looked for.

    Raises:
        BackendError, TemplateError, TokenizerError: The server cannot be connected to at all.
    """
    started = time.monotonic()
    with asyncio.Runner() as runner:
        connected = runner.run(connect(target))
        outcome = Outcome(connected, profile, Tally())
        try:
            _fixed(outcome, runner)
            if outcome.broken is None:
                _drawn(Run(outcome, runner, progress, shrink))
        except KeyboardInterrupt:
            outcome.interrupted = True
        finally:
            runner.run(connected.policy.backend.aclose())
    outcome.seconds = time.monotonic() - started
    return outcome


def replay(target: Target, profile: Profile, moves: list[Move]) -> Outcome:
    """Play one conversation, as a report gives it."""
    with asyncio.Runner() as runner:
        outcome = Outcome(runner.run(connect(target)), profile, Tally())
        try:
            runner.run(_whole(outcome, moves))
        except BrokenLawError as broken:
            outcome.broken, outcome.moves = broken, tuple(moves)
        finally:
            runner.run(outcome.connected.policy.backend.aclose())
    return outcome


async def _whole(outcome: Outcome, moves: list[Move]) -> None:
    first = len(outcome.connected.log.exchanges) if outcome.connected.log else 0
    player = Player(outcome.connected, outcome.tally, any(isinstance(move, Stream) for move in moves))
    for move in moves:
        await player.play(move)
    await closing.close(player, first)


def _fixed(outcome: Outcome, runner: asyncio.Runner) -> None:
    try:
        runner.run(fixed.ask(outcome.connected, outcome.tally, outcome.profile.repeats))
    except (BrokenLawError, BackendError) as error:
        broken = _as_law(error)
        if not isinstance(broken, BrokenLawError):
            raise
        outcome.broken = broken


def _as_law(error: Exception) -> BrokenLawError | Exception:
    """Give what the client refused, in a server's answer or in its own ledger, as the law that it breaks."""
    refused = isinstance(error, BackendError | LawViolationError) and str(error).startswith("Law ")
    return BrokenLawError("refused", str(error)) if refused else error


def _drawn(running: Run) -> None:
    outcome = running.outcome
    machine = _machine(running)
    chosen = settings(
        max_examples=outcome.profile.conversations,
        stateful_step_count=outcome.profile.moves,
        deadline=None,
        database=None,
        phases=[Phase.generate, *([Phase.shrink] if running.shrink else [])],
        suppress_health_check=list(HealthCheck),
        print_blob=False,
        report_multiple_bugs=False,
    )
    try:
        run_state_machine_as_test(hypothesis.seed(outcome.connected.target.seed)(machine), settings=chosen)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        shown, moves = min(running.found, key=lambda pair: len(pair[1])) if running.found else (error, ())
        outcome.moves = moves
        if isinstance(shown, BrokenLawError):
            outcome.broken = shown
            if running.shrink:
                _leave_out(running)
        else:
            outcome.error = f"{type(shown).__name__}: {shown}"


def _leave_out(running: Run) -> None:
    """Leave out each move without which the same check still fails: drawing anew does not always get there."""
    outcome = running.outcome
    assert outcome.broken is not None  # who calls has seen it
    for move in outcome.moves:
        fewer = [each for each in outcome.moves if each is not move]
        try:
            running.runner.run(_whole(outcome, fewer))
        except BrokenLawError as broken:
            if broken.check is outcome.broken.check:
                outcome.broken, outcome.moves = broken, tuple(fewer)
        except Exception:  # another way to fail shows nothing smaller of this one
            continue


def _machine(running: Run) -> type[RuleBasedStateMachine]:
    outcome = running.outcome
    connected = outcome.connected
    own = closing.controls_of(connected.policy.tokenizer)
    tokenizer = connected.policy.tokenizer
    drawn = drawing.moves(
        own,
        lambda text: str(tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))) == text,
        can_force=_can_force(connected),
    )

    can_stream = takes_chunks(connected.policy.backend)

    class Conversation(RuleBasedStateMachine):
        """One conversation: each step is one move."""

        def __init__(self) -> None:
            super().__init__()
            self.first = len(connected.log.exchanges) if connected.log else 0
            self.player = Player(connected, outcome.tally)
            self.moves: list[Move] = []
            self.failed = False

        @initialize(streams=st.booleans())
        def begin(self, streams: bool) -> None:
            if streams and can_stream:
                self.moves.append(Stream())
                self.player = Player(connected, outcome.tally, stream=True)

        @rule(move=drawn)
        def step(self, move: Any) -> None:
            self.moves.append(move)
            self._held(self.player.play(move))

        def teardown(self) -> None:
            if self.failed:
                return
            self._held(closing.close(self.player, self.first))
            if connected.log is not None:
                del connected.log.exchanges[self.first :]
            outcome.conversations += 1
            running.progress(outcome.conversations)

        def _held(self, work: Any) -> None:
            try:
                running.runner.run(work)
            except Exception as error:
                self.failed = True
                broken = _as_law(error)
                running.found.append((broken, tuple(self.moves)))
                if broken is error:
                    raise
                raise broken from error

    return Conversation


def _can_force(connected: Connected) -> bool:
    try:
        connected.policy.parser.call_grammar({"add": {"type": "object"}}, "add", ())
    except NoCallGrammarError:
        return False
    return True
