"""A whole run: connect, send the fixed prompts, play random conversations, and report the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tito_conformance import fixed, sampler, semantics, weights
from tito_conformance.checks import (
    IMAGE_CHECKS,
    PARITY_CHECKS,
    SINGLE_SERVER_CHECKS,
    WEIGHT_CHECKS,
    BrokenLawError,
    Profile,
    Tally,
    checked,
)
from tito_conformance.generation import Failure, RandomConversations, shrink_moves
from tito_conformance.servers import Conversation, ServerPair, Servers, SingleServer, takes_images
from tito_conformance.target import ConnectedServer, Target, connect
from tito_conformance.testing.moves import Move, Opening
from tito_core.backend.errors import BackendError
from tito_core.interrupt import StoppableRunner, in_thread

Checks = Callable[[ConnectedServer, Tally, int], Coroutine[Any, Any, None]]
"""Runs checks on a server; the number says how often each request is repeated."""
Progress = Callable[[int, int], None]
"""Called at each request and after each conversation, with the number of conversations and of requests so far."""
NEEDS_SECOND_SERVER = "Needs a second server: pass --against-backend and --against-url."
NEEDS_SINGLE_SERVER = "Runs on one server at a time: omit --against-url."
NO_IMAGES = "The server takes no images, the template shows none, or the backend cannot score prompts with images."
NEEDS_WEIGHTS = "Weights change only on request: pass --weights."


@dataclass
class Outcome:
    """The result of a run.

    Attributes:
        server: The server, connected.
        profile: The profile of the run.
        tally: The checks.
        against: The second server, or None.
        broken: The law that is broken, or None.
        moves: The smallest conversation that breaks it; empty if a fixed prompt broke it.
        error: Another error that ended the run, as a sentence, or None.
        conversations: Conversations that were played.
        seconds: Duration of the run.
        interrupted: Whether the run was stopped before its end.
        required: Names of the checks that must have run.
    """

    server: ConnectedServer
    profile: Profile
    tally: Tally
    against: ConnectedServer | None = None
    broken: BrokenLawError | None = None
    moves: tuple[Move, ...] = ()
    error: str | None = None
    conversations: int = 0
    seconds: float = 0.0
    interrupted: bool = False
    required: tuple[str, ...] = ()

    @property
    def turns(self) -> int:
        """Turns that were played, including those of the search for a smaller conversation."""
        return self.tally.turns

    @property
    def requests(self) -> int:
        """Generations and scores that were requested, except those of measurements at the connection."""
        return sum(server.recorder.requests for server in (self.server, self.against) if server is not None)

    @property
    def sound(self) -> bool:
        """Whether the run is complete and no law is broken."""
        return self.broken is None and self.error is None and not self.interrupted

    @property
    def not_reached(self) -> list[str]:
        """Required checks that did not run even once."""
        return [name for name in self.required if not self.tally.passed[name] and not self.tally.failed[name]]


class Run:
    """One run of the suite.

    Args:
        target: The server.
        profile: How much to play.
        progress: Called at each request and after each conversation.
        shrink: Whether to search for a smaller conversation that breaks the same law.
        against: A second server of the same weights, to compare with; None tests one server.
        moves: The only conversation to play, as a report writes it; None plays random ones.
        required: Names of the checks that must run; see `Outcome.not_reached`.

    Attributes:
        outcome: The result so far; None until the server is connected. It is complete once `play` has returned.
    """

    def __init__(
        self,
        target: Target,
        profile: Profile,
        progress: Progress = lambda conversations, requests: None,
        *,
        shrink: bool = True,
        against: Target | None = None,
        moves: Sequence[Move] | None = None,
        required: Sequence[str] = (),
    ) -> None:
        self._target, self._profile, self._progress = target, profile, progress
        self._shrink, self._against, self._moves, self._required = shrink, against, moves, tuple(required)
        self._runner = StoppableRunner()
        self._started = time.monotonic()
        self.outcome: Outcome | None = None

    def play(self) -> Outcome:
        """Connect and play.

        Raises:
            BackendError, TemplateError, TokenizerError: The connection to a server failed.
            KeyboardInterrupt: The run was stopped.
        """
        with self._runner as runner:
            outcome = self.outcome = runner.run(_connect(self._target, self._against, self._profile))
            outcome.required = self._required
            try:
                for server in filter(None, (outcome.server, outcome.against)):
                    server.recorder.on_request = self._show
                if self._moves is not None:
                    _replay(outcome, runner, self._moves)
                else:
                    single = self._against is None
                    if single:
                        _run_checks(outcome, runner, _first_checks)
                    if outcome.sound:
                        _play_random(outcome, runner, self._show, shrink=self._shrink)
                    if single and outcome.sound:
                        _run_checks(outcome, runner, _last_checks)
            finally:
                outcome.seconds = time.monotonic() - self._started
                runner.close(_disconnect(outcome))
        return outcome

    def _show(self) -> None:
        if self.outcome is not None:
            self._progress(self.outcome.conversations, self.outcome.requests)

    def stop(self) -> None:
        """End the run soon, and abort requests in flight. Any thread may call this."""
        self._runner.stop()

    def interrupted(self) -> Outcome | None:
        """Return the result so far of a stopped run; None if no server was connected."""
        if self.outcome is None:
            return None
        return replace(self.outcome, interrupted=True, seconds=time.monotonic() - self._started)


def run(
    target: Target,
    profile: Profile,
    progress: Progress = lambda conversations, requests: None,
    *,
    shrink: bool = True,
    against: Target | None = None,
) -> Outcome:
    """Test a server, or two against each other; see `Run`."""
    return _in_thread(Run(target, profile, progress, shrink=shrink, against=against))


def replay(target: Target, profile: Profile, moves: Sequence[Move], *, against: Target | None = None) -> Outcome:
    """Play one conversation, as a report writes it; see `Run`."""
    return _in_thread(Run(target, profile, against=against, moves=moves))


def _in_thread(run: Run) -> Outcome:
    return in_thread(run.play, run.stop)


async def play_conversation(servers: Servers, moves: Sequence[Move]) -> None:
    """Play a whole conversation, and check it at its end."""
    conversation: Conversation = servers.begin([move for move in moves if isinstance(move, Opening)])
    for move in moves:
        await conversation.play(move)
    await conversation.close()


async def _connect(target: Target, against: Target | None, profile: Profile) -> Outcome:
    outcome = Outcome(await connect(target), profile, Tally())
    if against is not None:
        outcome.against = await connect(against)
        for check in SINGLE_SERVER_CHECKS:
            outcome.tally.skip(check, NEEDS_SINGLE_SERVER)
    else:
        for check in PARITY_CHECKS:
            outcome.tally.skip(check, NEEDS_SECOND_SERVER)
    if not all(takes_images(each) for each in (outcome.server, outcome.against) if each is not None):
        for check in IMAGE_CHECKS:
            outcome.tally.skip(check, NO_IMAGES)
    if not target.weights and against is None:
        for check in WEIGHT_CHECKS:
            outcome.tally.skip(check, NEEDS_WEIGHTS)
    return outcome


async def _disconnect(outcome: Outcome) -> None:
    for server in (outcome.server, outcome.against):
        if server is not None:
            await server.policy.backend.aclose()


def _servers(outcome: Outcome) -> Servers:
    if outcome.against is None:
        return SingleServer(outcome.server, outcome.tally)
    return ServerPair(outcome.server, outcome.against, outcome.tally)


def _replay(outcome: Outcome, runner: StoppableRunner, moves: Sequence[Move]) -> None:
    try:
        runner.run(checked(play_conversation(_servers(outcome), moves)))
        outcome.conversations = 1
    except (BrokenLawError, BackendError) as error:
        _record_failure(outcome, Failure(error, tuple(moves)))


async def _first_checks(server: ConnectedServer, tally: Tally, repeats: int) -> None:
    await fixed.check_fixed_prompts(server, tally, repeats)
    if takes_images(server):
        await fixed.check_pictures(server, tally)
    if server.target.weights:
        await weights.check_pause(server, tally)
        await weights.update_weights(server, tally)
        if takes_images(server):
            await fixed.check_after_update(server, tally)
        await weights.check_folders(server, tally)


async def _last_checks(server: ConnectedServer, tally: Tally, repeats: int) -> None:
    """Run the checks that need many samples or long prompts; conversations find most errors sooner."""
    await weights.load_first_again(server)
    long = await semantics.check_lengths(server, tally)
    await fixed.check_abort(server, tally)
    await semantics.check_transforms(server, tally)
    penalised = await semantics.check_penalties(server, tally)
    await sampler.check(server, tally, repeats, penalised=penalised, long=long)


def _run_checks(outcome: Outcome, runner: StoppableRunner, checks: Checks) -> None:
    try:
        runner.run(checked(checks(outcome.server, outcome.tally, outcome.profile.repeats)))
    except (BrokenLawError, BackendError) as error:
        _record_failure(outcome, Failure(error, ()))


def _play_random(outcome: Outcome, runner: StoppableRunner, show: Callable[[], None], *, shrink: bool) -> None:
    def count(conversations: int) -> None:
        outcome.conversations = conversations
        show()

    servers = _servers(outcome)
    failure = RandomConversations(servers, outcome.profile, outcome.server.target.seed, runner, count).play()
    if failure is None:
        return
    _record_failure(outcome, failure)
    if shrink and outcome.broken is not None:
        smaller = shrink_moves(outcome.broken, outcome.moves, lambda moves: _broken_by(servers, runner, moves))
        for outcome.broken, outcome.moves in smaller:
            pass  # keep each at once: the search may be interrupted


def _record_failure(outcome: Outcome, failure: Failure) -> None:
    outcome.moves = failure.moves
    if isinstance(failure.error, BrokenLawError):
        outcome.broken = failure.error
    else:
        outcome.error = f"{type(failure.error).__name__}: {failure.error}"


def _broken_by(servers: Servers, runner: StoppableRunner, moves: Sequence[Move]) -> BrokenLawError | None:
    """Play a conversation; return the law that it breaks, or None."""
    try:
        runner.run(checked(play_conversation(servers, moves)))
    except BrokenLawError as broken:
        return broken
    except Exception:  # an unrelated failure is not a smaller example of this one
        return None
    return None
