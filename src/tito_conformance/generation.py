"""Random conversations from Hypothesis, until one breaks a law, and the search for a smaller one.

A smaller conversation has fewer and plainer moves and breaks the same check. Hypothesis' own shrinking would try
hundreds of conversations, which takes an hour on a real server; a few dozen are enough here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

import hypothesis
import msgspec
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tito_conformance.checks import BrokenLawError, Check, Profile
from tito_conformance.servers import Conversation, Servers, can_force
from tito_conformance.testing import strategies
from tito_conformance.testing.moves import Call, Cancel, Look, Move, Opening, Sampling, Stream, Want


@dataclass(frozen=True)
class Failure:
    """An error that ended the run, and the conversation that raised it."""

    error: BaseException
    moves: tuple[Move, ...]

    def size(self) -> tuple[bool, int]:
        """Return what makes it hard to replay: whether a move races the clock, and the number of moves."""
        return any(isinstance(move, Cancel) for move in self.moves), len(self.moves)


@dataclass
class RandomConversations:
    """Plays random conversations.

    Attributes:
        servers: The servers under test.
        profile: How many conversations, and how long.
        seed: Seed of the random moves.
        check: Runs checks to their end.
        progress: Called after each conversation with the number of conversations so far.
        keep_going: Whether to play on after a conversation that failed.
        failures: Failures so far.
        conversations: Conversations so far.
    """

    servers: Servers
    profile: Profile
    seed: int
    check: Callable[[Coroutine[Any, Any, None]], None]
    progress: Callable[[int], None]
    keep_going: bool = False
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
            return min(self.failures, key=Failure.size) if self.failures else Failure(error, ())
        return min(self.failures, key=Failure.size, default=None)


def looks() -> st.SearchStrategy[Move]:
    """Draw a move with one to three pictures out of a few, so that some are shown again."""
    return st.builds(
        Look,
        agent=st.integers(0, 1),
        text=st.sampled_from(strategies.DIFFICULT_TEXTS),
        pictures=st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple),
        form=st.sampled_from(["before", "after", "around", "alone"]),
    )


SAID = "Let me see,  at some length: what can be called, and with which arguments. \n"
"""Text that a policy is made to write before a call."""


_CALLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("add", {"a": 2**53 + 1, "b": -22}),
    ("look_up", {"word": "tree"}),
    ("nowhere", {"word": " tree \n", "a": [None, "}"]}),
    ("nowhere", {"word": "\t house", "b": 2**53 + 1}),
    ("look_up", {"word": " tree \n"}),
    ("add", {}),
)
"""Calls that a policy is made to write. The last two do not fit `TOOLS`. Different ones that fit show their order."""


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """Draw a move with up to three calls of the agents' tools. Some lack a character, or have one too many."""
    bodies = []
    for _ in range(draw(st.integers(1, 3))):
        name, arguments = draw(st.sampled_from(_CALLS))
        body = json.dumps({"name": name, "arguments": arguments})
        at = draw(st.integers(0, len(body) - 1))
        damaged = (body[:at] + body[at + 1 :], f"{body[:-2]},}}}}", body[:at])
        bodies.append(draw(st.sampled_from([*[body] * 4, *damaged])))
    before = draw(st.sampled_from(["", SAID, f"<think>\n{SAID}</think>\n\n{SAID}"]))
    return Call(agent=draw(st.integers(0, 1)), text=draw(strategies.texts()), calls=tuple(bodies), before=before)


def _openings(servers: Servers) -> list[list[Opening]]:
    """Return all openings, which conversations take in turn: Hypothesis draws most of them seldom, and some never.

    Each optional output is requested alone and with all others, whole and streamed; sampling masks only with others,
    because they need a finite top_k, under which few logprobs are comparable with a score.
    """
    offered = {
        name: value
        for name, value in msgspec.structs.asdict(servers.available_outputs()).items()
        if value and name != "agent"
    }
    wants: list[list[Opening]] = [[]]
    wants += [[Want(**{name: value})] for name, value in offered.items() if name != "sampling_mask"]
    if offered:
        wants.append([Want(**offered)])
    streams = [False, True] if servers.can_stream else [False]
    order = [(number, (number + turn) % len(streams)) for turn in range(len(streams)) for number in range(len(wants))]
    return [[*([Stream()] if streams[at] else []), *wants[number]] for number, at in order]


def _state_machine(run: RandomConversations) -> type[RuleBasedStateMachine]:
    servers = run.servers
    tokenizer = servers.server.policy.tokenizer
    moves = strategies.moves(
        [str(token) for token in tokenizer.added_tokens_decoder.values()][:64],
        lambda text: str(tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))) == text,
        can_force=can_force(servers.server),
        by_chance=servers.nondeterministic,
        reloads=servers.updates_weights,
    )
    moves = st.one_of(moves, calls())
    if servers.takes_images:
        moves = st.sampled_from((looks(), moves, moves)).flatmap(lambda chosen: chosen)  # a third of all
    openings = _openings(servers)

    class ConversationMachine(RuleBasedStateMachine):
        """One conversation: each step is one move."""

        conversation: Conversation

        def __init__(self) -> None:
            super().__init__()
            self.moves: list[Move] = []
            self.failed = False
            # Hypothesis does not count a conversation that drew too much, though it was played.
            self.enough = run.conversations >= run.profile.conversations

        @initialize()
        def begin(self) -> None:
            if self.enough:
                return
            opening = openings[run.conversations % len(openings)]
            self.moves += opening
            self.conversation = servers.begin(opening)
            if run.conversations % 3 == 1:  # some answers have a seed in every run
                self.step(Sampling(seed=run.conversations))
            elif run.conversations % 8 == 2:  # and some have other parameters
                self.step(Sampling(temperature=0.713, top_p=0.913, top_k=50, min_p=0.013, presence_penalty=0.313))

        @rule(move=moves)
        def step(self, move: Any) -> None:
            if self.enough or self.failed:
                return
            self.moves.append(move)
            self._run(self.conversation.play(move))

        def teardown(self) -> None:
            if not hasattr(self, "conversation") or (self.failed and not run.keep_going):
                return
            if not self.failed:
                self._run(self.conversation.close())
            run.conversations += 1
            run.progress(run.conversations)

        def _run(self, work: Coroutine[Any, Any, None]) -> None:
            try:
                run.check(work)
            except Exception as error:
                self.failed = True
                run.failures.append(Failure(error, tuple(self.moves)))
                if not run.keep_going:
                    raise

    return ConversationMachine


Play = Callable[[tuple[Move, ...]], BrokenLawError | None]
"""Plays a conversation, and returns the law that it breaks, or None."""
MAX_TRIES = 60
"""Default limit of conversations that `shrink_moves` plays."""


def shrink_moves(
    broken: BrokenLawError, moves: tuple[Move, ...], play: Play, tries: int = MAX_TRIES
) -> Iterator[tuple[BrokenLawError, tuple[Move, ...]]]:
    """Search for smaller and smaller conversations that break the same check.

    Yields:
        The broken law and the conversation, for each smaller one, of at most `tries`. The last one is the smallest.
    """
    improved = True
    while improved:
        improved = False
        for candidate in _candidates(moves):
            if tries == 0:
                return
            tries -= 1
            if found := _broken_twice(play, candidate, broken.check):
                moves, improved = candidate, True
                yield found, moves
                break


def _broken_twice(play: Play, moves: tuple[Move, ...], check: Check) -> BrokenLawError | None:
    """Play a conversation twice; return the error if both break the check. A replay has to break it, too.

    A server that samples may break a law by chance.
    """
    for _ in range(2):
        found = play(moves)
        if found is None or found.check is not check:
            return None
    return found


def _candidates(moves: tuple[Move, ...]) -> Iterator[tuple[Move, ...]]:
    """Yield smaller conversations: without moves that race the clock, then the smallest first."""
    timeless = tuple(move for move in moves if not isinstance(move, Cancel))
    if timeless and timeless != moves:
        yield timeless
    size = len(moves) // 2
    while size:
        for start in range(0, len(moves), size):
            yield moves[:start] + moves[start + size :]
        size //= 2
    for at, move in enumerate(moves):
        plain = type(move)()
        if move != plain:
            yield (*moves[:at], plain, *moves[at + 1 :])
