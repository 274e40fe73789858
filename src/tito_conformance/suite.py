"""A whole run: connect, send the fixed prompts, play random conversations, and report the result."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tito_conformance import fields, fixed, sampler, semantics, weights
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
from tito_conformance.connection import connect
from tito_conformance.generation import Failure, RandomConversations, shrink_moves
from tito_conformance.servers import Conversation, ServerPair, Servers, SingleServer, takes_images
from tito_conformance.target import ConnectedServer, Target
from tito_conformance.testing.moves import Move, Opening
from tito_core.backend.errors import BackendError
from tito_core.interrupt import StoppableRunner, in_thread

Checks = Callable[[], Coroutine[Any, Any, Any]]
"""Runs some checks."""
Progress = Callable[[int, int], None]
"""Called at each request and after each conversation, with the number of conversations and of requests so far."""
NEEDS_SECOND_SERVER = "Needs a second server: pass --against-backend and --against-url."
NEEDS_SINGLE_SERVER = "Runs on one server at a time: omit --against-url."
NO_IMAGES = "The server takes no images, the template shows none, or the backend cannot score prompts with images."
NEEDS_ADAPTERS = "Needs LoRA adapters that the server has loaded: pass --adapter."
NEEDS_WEIGHTS = "Weights change only on request: pass --weights."


@dataclass
class Outcome:
    """The result of a run.

    Attributes:
        server: The server, connected.
        profile: The profile of the run.
        tally: The checks.
        against: The second server, or None.
        findings: Every broken law; one at most, unless the run kept going.
        moves: The smallest conversation found that breaks the first; empty if a fixed prompt broke it.
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
    findings: list[BrokenLawError] = field(default_factory=list)
    moves: tuple[Move, ...] = ()
    error: str | None = None
    conversations: int = 0
    seconds: float = 0.0
    interrupted: bool = False
    required: tuple[str, ...] = ()

    @property
    def broken(self) -> BrokenLawError | None:
        """The law that was found broken first, or None."""
        return self.findings[0] if self.findings else None

    @property
    def servers(self) -> list[ConnectedServer]:
        """The server, and the second one if there is one."""
        return [self.server] if self.against is None else [self.server, self.against]

    @property
    def turns(self) -> int:
        """Turns that were played, including those of the search for a smaller conversation."""
        return self.tally.turns

    @property
    def requests(self) -> int:
        """Generations and scores that were requested, except those of measurements at the connection."""
        return sum(server.recorder.requests for server in self.servers)

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
        shrink: Whether to search for a smaller conversation that breaks the same law, if the profile does.
        against: A second server of the same weights, to compare with; None tests one server.
        moves: The only conversation to play, as a report writes it; None plays random ones.
        required: Names of the checks that must run; see `Outcome.not_reached`.
        keep_going: Whether to go on after a broken law, with the next check or conversation.

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
        keep_going: bool = False,
    ) -> None:
        self._keep_going = keep_going
        self._target, self._profile, self._progress = target, profile, progress
        self._shrink, self._against = shrink and profile.shrinks, against
        self._moves, self._required = moves, tuple(required)
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
                for server in outcome.servers:
                    server.recorder.on_request = self._show
                if self._moves is not None:
                    _replay(outcome, runner, self._moves)
                else:
                    single = self._against is None
                    if single:
                        self._run_checks(outcome, runner, _first_checks(outcome))
                    if self._goes_on(outcome):
                        _play_random(outcome, runner, self._show, shrink=self._shrink, keep_going=self._keep_going)
                    if single and self._goes_on(outcome):
                        self._run_checks(outcome, runner, _last_checks(outcome))
            finally:
                outcome.seconds = time.monotonic() - self._started
                runner.close(_disconnect(outcome))
        return outcome

    def _goes_on(self, outcome: Outcome) -> bool:
        return outcome.sound or (self._keep_going and outcome.error is None)

    def _run_checks(self, outcome: Outcome, runner: StoppableRunner, steps: Sequence[Checks]) -> None:
        for step in steps:
            if self._goes_on(outcome):
                try:
                    _check(outcome, runner, step())
                    _check(outcome, runner, fixed.check_unscored(outcome.server, outcome.tally))
                except (BrokenLawError, BackendError) as error:
                    _record_failure(outcome, Failure(error, ()))
                outcome.server.unscored.clear()
                outcome.server.recorder.clear()

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
    server = await connect(target)
    outcome = Outcome(server, profile, server.tally)
    if against is not None:
        outcome.against = await connect(against)
        for check in SINGLE_SERVER_CHECKS:
            outcome.tally.skip(check, NEEDS_SINGLE_SERVER)
    else:
        for check in PARITY_CHECKS:
            outcome.tally.skip(check, NEEDS_SECOND_SERVER)
    if profile.at_once is not None:
        for each in outcome.servers:
            each.recorder.gate = asyncio.Semaphore(profile.at_once)
    if not all(map(takes_images, outcome.servers)):
        for check in IMAGE_CHECKS:
            outcome.tally.skip(check, NO_IMAGES)
    if not target.weights and against is None:
        for check in WEIGHT_CHECKS:
            outcome.tally.skip(check, NEEDS_WEIGHTS)
    if not target.adapters and against is None:
        outcome.tally.skip("adapted", NEEDS_ADAPTERS)
    return outcome


async def _disconnect(outcome: Outcome) -> None:
    for server in outcome.servers:
        await server.policy.backend.aclose()


def _servers(outcome: Outcome) -> Servers:
    if outcome.against is None:
        return SingleServer(outcome.server, outcome.tally)
    return ServerPair(outcome.server, outcome.against, outcome.tally)


def _check(outcome: Outcome, runner: StoppableRunner, work: Coroutine[Any, Any, None]) -> None:
    """Run checks; a finding takes its bodies from the logs, which the next ones cut.

    Raises:
        ServerChangedError: A law seems broken, but another client loaded weights meanwhile.
    """
    try:
        runner.run(checked(work))
    except BrokenLawError as broken:
        for server in outcome.servers:
            runner.run(server.expect_same_weights(broken))
            broken.bodies |= server.recorder.log.bodies(broken.where.request_id)
        raise


def _replay(outcome: Outcome, runner: StoppableRunner, moves: Sequence[Move]) -> None:
    try:
        _check(outcome, runner, play_conversation(_servers(outcome), moves))
        outcome.conversations = 1
    except (BrokenLawError, BackendError) as error:
        _record_failure(outcome, Failure(error, tuple(moves)))


def _first_checks(outcome: Outcome) -> list[Checks]:
    server, tally, repeats = outcome.server, outcome.tally, outcome.profile.repeats
    steps: list[Checks] = [lambda: fields.check(server, tally, repeats)]
    images = takes_images(server)
    if images:
        steps.append(lambda: fixed.check_pictures(server, tally))
    if server.target.adapters:
        steps.append(lambda: fixed.check_adapters(server, tally))
    if server.target.weights:
        steps += [lambda: weights.check_pause(server, tally), lambda: weights.update_weights(server, tally)]
        if images:
            steps.append(lambda: fixed.check_after_update(server, tally))
        steps.append(lambda: weights.check_folders(server, tally))
    return steps


def _last_checks(outcome: Outcome) -> list[Checks]:
    """Return the checks that need many samples or long prompts; conversations find most errors sooner."""
    server, tally = outcome.server, outcome.tally
    long: list[sampler.Draw] = []
    penalised: list[bool | None] = []

    async def lengths() -> None:
        long.extend(await semantics.check_lengths(server, tally))

    async def penalties() -> None:
        penalised.append(await semantics.check_penalties(server, tally))
        await fields.check_greedy(server, tally, penalised[0])

    def samples() -> Coroutine[Any, Any, None]:
        known = penalised[0] if penalised else None
        return sampler.check(server, tally, outcome.profile.repeats, penalised=known, long=long)

    return [
        lambda: weights.load_first_again(server),
        lengths,
        lambda: fixed.check_abort(server, tally),
        penalties,
        samples,
    ]


def _play_random(
    outcome: Outcome, runner: StoppableRunner, show: Callable[[], None], *, shrink: bool, keep_going: bool
) -> None:
    def count(conversations: int) -> None:
        outcome.conversations = conversations
        show()

    def check(work: Coroutine[Any, Any, None]) -> None:
        _check(outcome, runner, work)

    servers = _servers(outcome)
    conversations = RandomConversations(servers, outcome.profile, outcome.server.target.seed, check, count, keep_going)
    failure = conversations.play()
    for each in conversations.failures if keep_going else filter(None, [failure]):
        _record_failure(outcome, each)
    if shrink and outcome.broken is not None and failure is not None and failure.error is outcome.broken:
        smaller = shrink_moves(outcome.broken, outcome.moves, lambda moves: _broken_by(servers, check, moves))
        for outcome.findings[0], outcome.moves in smaller:
            pass  # keep each at once: the search may be interrupted


def _record_failure(outcome: Outcome, failure: Failure) -> None:
    if isinstance(failure.error, BrokenLawError):
        outcome.moves = outcome.moves if outcome.findings else failure.moves
        outcome.findings.append(failure.error)
    else:
        outcome.moves = outcome.moves or failure.moves
        outcome.error = f"{type(failure.error).__name__}: {failure.error}"


def _broken_by(
    servers: Servers, check: Callable[[Coroutine[Any, Any, None]], None], moves: Sequence[Move]
) -> BrokenLawError | None:
    """Play a conversation; return the law that it breaks, or None."""
    try:
        check(play_conversation(servers, moves))
    except BrokenLawError as broken:
        return broken
    except Exception:  # an unrelated failure is not a smaller example of this one
        return None
    return None
