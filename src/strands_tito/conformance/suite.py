"""The whole run: connect, ask what is fixed, play what is drawn, and tell what held."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from strands_tito.conformance import aborting, fixed, lengths, reloading, sampler
from strands_tito.conformance.generation import Drawn, Found, refused_as_law, shrink_moves
from strands_tito.conformance.laws import OF_ONE, OF_PARITY, OF_WEIGHTS, BrokenLawError, Tally
from strands_tito.conformance.parity import Pair
from strands_tito.conformance.playing import Alone, Playing, Stage
from strands_tito.conformance.profiles import Profile
from strands_tito.conformance.target import Connected, Target, connect
from strands_tito.testing.moves import Move, Opening
from tito_core.backend.errors import BackendError
from tito_core.interrupt import StoppableRunner, in_thread

Ask = Callable[[Connected, Tally, int], Coroutine[Any, Any, None]]
"""Asks a server the same in each run; the number says how often."""
Progress = Callable[[int], None]
"""Told after each conversation how many there were."""
NO_SECOND = "It takes a second server: --against-backend and --against-url."
ONE_AT_A_TIME = "It is asked of one server at a time, without --against-url."
NO_WEIGHTS = "Weights are changed only on request: --weights."


@dataclass
class Outcome:
    """What a run found.

    Attributes:
        connected: The server, with what it said of itself.
        profile: How much was to be played.
        tally: The checks.
        against: The second server, or None.
        broken: The law that does not hold, or None.
        moves: The smallest conversation that shows it; empty when a fixed question showed it.
        error: Something else that ended the run, as a sentence.
        conversations: How many were played.
        seconds: How long it took.
        interrupted: Whether it was stopped before it was over.
    """

    connected: Connected
    profile: Profile
    tally: Tally
    against: Connected | None = None
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


class Run:
    """One run of the suite.

    Args:
        target: The server.
        profile: How much is played.
        progress: Called after each conversation.
        shrink: Whether the smallest conversation that breaks a law is looked for.
        against: A second server of the same weights, which is to say the same; None tests one.
        moves: The only conversation to play, as a report gives it; None draws many.

    Attributes:
        outcome: What is known so far; None until the server is connected to. It is whole once `play` has returned.
    """

    def __init__(
        self,
        target: Target,
        profile: Profile,
        progress: Progress = lambda count: None,
        *,
        shrink: bool = True,
        against: Target | None = None,
        moves: Sequence[Move] | None = None,
    ) -> None:
        self._target, self._profile, self._progress = target, profile, progress
        self._shrink, self._against, self._moves = shrink, against, moves
        self._runner = StoppableRunner()
        self._started = time.monotonic()
        self.outcome: Outcome | None = None

    def play(self) -> Outcome:
        """Connect and play.

        Raises:
            BackendError, TemplateError, TokenizerError: A server cannot be connected to at all.
            KeyboardInterrupt: It was stopped.
        """
        with self._runner as runner:
            outcome = self.outcome = runner.run(_connected(self._target, self._against, self._profile))
            try:
                if self._moves is not None:
                    _replayed(outcome, runner, self._moves)
                else:
                    alone = self._against is None
                    if alone:
                        _fixed(outcome, runner, _ask_first)
                    if outcome.broken is None:
                        _drawn(outcome, runner, self._progress, shrink=self._shrink)
                    if alone and outcome.sound:
                        _fixed(outcome, runner, _ask_last)
            finally:
                outcome.seconds = time.monotonic() - self._started
                runner.close(_closed(outcome))
        return outcome

    def stop(self) -> None:
        """End it soon, and abort what is in flight. Any thread may call it."""
        self._runner.stop()

    def interrupted(self) -> Outcome | None:
        """Return what is known of a run that was stopped; None where no server was connected to."""
        if self.outcome is None:
            return None
        return replace(self.outcome, interrupted=True, seconds=time.monotonic() - self._started)


def run(
    target: Target,
    profile: Profile,
    progress: Progress = lambda count: None,
    *,
    shrink: bool = True,
    against: Target | None = None,
) -> Outcome:
    """Test a server, or two against each other; see `Run`."""
    return _in_thread(Run(target, profile, progress, shrink=shrink, against=against))


def replay(target: Target, profile: Profile, moves: Sequence[Move], *, against: Target | None = None) -> Outcome:
    """Play one conversation, as a report gives it; see `Run`."""
    return _in_thread(Run(target, profile, against=against, moves=moves))


def _in_thread(whole_run: Run) -> Outcome:
    return in_thread(whole_run.play, whole_run.stop)


async def whole(stage: Stage, moves: Sequence[Move]) -> None:
    """Play a whole conversation, and check it at its end."""
    playing: Playing = stage.begin([move for move in moves if isinstance(move, Opening)])
    for move in moves:
        await playing.play(move)
    await playing.close()


async def _connected(target: Target, against: Target | None, profile: Profile) -> Outcome:
    outcome = Outcome(await connect(target), profile, Tally())
    if against is not None:
        outcome.against = await connect(against)
        for check in OF_ONE:
            outcome.tally.skip(check, ONE_AT_A_TIME)
    else:
        for check in OF_PARITY:
            outcome.tally.skip(check, NO_SECOND)
    if target.weights is None and against is None:
        for check in OF_WEIGHTS:
            outcome.tally.skip(check, NO_WEIGHTS)
    return outcome


async def _closed(outcome: Outcome) -> None:
    for connected in (outcome.connected, outcome.against):
        if connected is not None:
            await connected.policy.backend.aclose()


def _stage(outcome: Outcome) -> Stage:
    if outcome.against is None:
        return Alone(outcome.connected, outcome.tally)
    return Pair(outcome.connected, outcome.against, outcome.tally)


def _replayed(outcome: Outcome, runner: StoppableRunner, moves: Sequence[Move]) -> None:
    try:
        runner.run(whole(_stage(outcome), moves))
        outcome.conversations = 1
    except (BrokenLawError, BackendError) as error:
        _found(outcome, Found(refused_as_law(error), tuple(moves)))


async def _ask_first(connected: Connected, tally: Tally, repeats: int) -> None:
    await fixed.ask(connected, tally, repeats)
    if connected.target.weights is not None:
        await reloading.change(connected, tally)


async def _ask_last(connected: Connected, tally: Tally, repeats: int) -> None:
    """Ask what takes many samples or long prompts; last, since what conversations show is found sooner."""
    await lengths.check(connected, tally)
    await aborting.check(connected, tally)
    await sampler.check(connected, tally, repeats)


def _fixed(outcome: Outcome, runner: StoppableRunner, ask: Ask) -> None:
    try:
        runner.run(ask(outcome.connected, outcome.tally, outcome.profile.repeats))
    except (BrokenLawError, BackendError) as error:
        broken = refused_as_law(error)
        if not isinstance(broken, BrokenLawError):
            raise
        outcome.broken = broken


def _drawn(outcome: Outcome, runner: StoppableRunner, progress: Progress, *, shrink: bool) -> None:
    def told(count: int) -> None:
        outcome.conversations = count
        progress(count)

    stage = _stage(outcome)
    found = Drawn(stage, outcome.profile, outcome.connected.target.seed, runner, told).play()
    if found is None:
        return
    _found(outcome, found)
    if shrink and outcome.broken is not None:
        found_smaller = shrink_moves(outcome.broken, outcome.moves, lambda moves: _played_again(stage, runner, moves))
        for outcome.broken, outcome.moves in found_smaller:
            pass  # each is kept at once: the search may be interrupted


def _found(outcome: Outcome, found: Found) -> None:
    outcome.moves = found.moves
    if isinstance(found.error, BrokenLawError):
        outcome.broken = found.error
    else:
        outcome.error = f"{type(found.error).__name__}: {found.error}"


def _played_again(stage: Stage, runner: StoppableRunner, moves: Sequence[Move]) -> BrokenLawError | None:
    try:
        runner.run(whole(stage, moves))
    except BrokenLawError as broken:
        return broken
    except Exception as error:  # another way to fail shows nothing smaller of this one
        law = refused_as_law(error)
        return law if isinstance(law, BrokenLawError) else None
    return None
