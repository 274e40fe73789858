"""The checks: which law each belongs to, and how often it passed, failed or could not run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from tito_core.backend.errors import BackendError, task_group
from tito_core.ledger import LawViolationError
from tito_core.ledger.errors import TITOError

T = TypeVar("T")
LAWS = {
    1: "Prefix",
    2: "Alignment",
    3: "Mask",
    4: "Truth",
    5: "Transaction",
    6: "Content is inert",
    7: "Delta",
    8: "History is content",
    9: "Strict parsing",
    10: "Versions",
    11: "Semantics travel",
    12: "Round trip",
    13: "Parity",
    14: "Linear cost",
}
"""The laws by number."""


@dataclass(frozen=True, slots=True)
class Check:
    """One property that a law demands.

    Attributes:
        name: Short and unique.
        law: The law's number.
        what: What is checked, as a sentence.
    """

    name: str
    law: int
    what: str


_ALL = (
    Check("prompt", 1, "Each prompt is its parent's prompt and completion, then the delta, as sent."),
    Check("mask", 3, "A trajectory is its path with the reported logprobs, and each sampled token is trained once."),
    Check("answers", 4, "Each turn is one complete response: the prompt that the server read, and its ids."),
    Check("logprobs", 4, "The ledger holds the response's logprobs, each of its own token."),
    Check("images", 4, "Each picture's bytes, name and placeholders are the ledger's, on the wire and in the echo."),
    Check("looked", 4, "Scores depend on the pixels of each picture before a token, and on nothing else about it."),
    Check("cached", 4, "Fewer tokens are cached than the prompt has, since the last one must be computed."),
    Check("finish", 4, "The end agrees with the last tokens, the stop strings and the request."),
    Check("top", 4, "The top logprobs are the response's and contain the sampled token, unless it is less likely."),
    Check("scored", 4, "Prompt logprobs are the response's, of the prompt's tokens, and equal the server's score."),
    Check("routed", 4, "Each token but the last has the response's experts, and the same ones on a second read."),
    Check("left", 4, "A sampling mask is the response's, at most top_k large, and contains the sampled token."),
    Check("requested", 4, "Sampling parameters are sent and recorded as the agent requested them."),
    Check("text", 4, "The response's text is what its ids decode to."),
    Check("refused", 4, "The client refuses no response of the server."),
    Check("seeded", 4, "The same seed gives the same tokens, up to a near-tie."),
    Check(
        "obeyed",
        4,
        "The server obeys each parameter, also in a batch, and keeps none: answers follow from a plain one.",
    ),
    Check("sampler", 4, "Sampled tokens follow the reported distribution, also under sampling parameters."),
    Check("rescored", 4, "The server's score of the sampled tokens equals the reported logprobs."),
    Check("long", 4, "Long prompts, long answers and a full context are scored as they were reported."),
    Check("adapted", 4, "Answers of LoRA adapters at the same time have their own adapter's scores, and no other's."),
    Check("paused", 5, "A paused server answers nothing, and after it resumes what waited."),
    Check("lost", 5, "Every answer is a turn, unless it was cancelled, which leaves no trace."),
    Check("aborted", 5, "An abort ends the request that it names, and nothing else does."),
    Check("inert", 6, "No control token comes from message content."),
    Check("rendering", 7, "The delta ends the template's own rendering of the history, in the tokenizer's own ids."),
    Check("parent", 8, "A turn's parent is the latest turn whose history its own history starts with."),
    Check("branch", 8, "A branch has the reason that the agent's move gives it."),
    Check("calls", 9, "The agent executes exactly the calls that the policy sampled, unrepaired and in order."),
    Check("constrained", 9, "A turn under a grammar is marked so, and what was demanded matches its schema."),
    Check("versions", 10, "Weight versions tile each completion as the server reports them."),
    Check("changed", 10, "After a weight update each token has its own version, and scores are the new weights'."),
    Check("live", 10, "After a weight update, new answers report the new version alone."),
    Check("fresh", 10, "After a weight update, pictures that the server saw before are read by the new weights."),
    Check("semantics", 11, "The meaning of the logprobs was measured."),
    Check("ledgers", 13, "Two servers give equal ledgers, except the engine's record and the logprobs' last digits."),
    Check("greedy", 13, "Two servers give the same greedy ids, up to a near-tie."),
    Check("agreed", 13, "Two servers give equal tokens the same logprobs, within the tolerance."),
)
PARITY_CHECKS = ("ledgers", "greedy", "agreed")
"""Checks that need a second server."""
WEIGHT_CHECKS = ("changed", "live", "fresh", "paused")
"""Checks that need permission to change the server's weights."""
IMAGE_CHECKS = ("images", "looked", "fresh")
"""Checks that need a server and a template that take images."""
COLUMN_CHECKS = {
    "top": "top_logprobs",
    "scored": "prompt_logprobs",
    "routed": "routed_experts",
    "left": "sampling_mask",
}
"""Checks of optional outputs, each with the output that it needs."""
SINGLE_SERVER_CHECKS = (
    *("semantics", "looked", "sampler", "long", "aborted", "obeyed", "seeded"),
    *COLUMN_CHECKS,
    *WEIGHT_CHECKS,
    "adapted",
)
"""Checks that run only when one server is tested alone."""
REQUIRED = ("prompt", "answers", "logprobs", "rescored", "rendering", "parent", "mask", "sampler")
"""Checks that a run on one server must have made to be called conformant, unless the user says otherwise."""
CHECKS = {check.name: check for check in _ALL}
"""Every check, by name."""


@dataclass(frozen=True, slots=True)
class Where:
    """The place of a finding. What does not apply is None.

    Attributes:
        turn: Index of the turn in the ledger.
        position: Index of the token in the output.
        token: Its id.
        sampling: Sampling parameters of the request.
        streamed: Whether the answer was streamed.
        request_id: The request's id; the report has its bodies.
        differences: (position, expected, found) of each token that differs.
    """

    turn: int | None = None
    position: int | None = None
    token: int | None = None
    sampling: Mapping[str, Any] | None = None
    streamed: bool | None = None
    request_id: str | None = None
    differences: tuple[tuple[int, Any, Any], ...] | None = None

    def within(self, place: Where) -> Where:
        """Return it with what it lacks taken from a larger place."""
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        return replace(place, **{name: value for name, value in own.items() if value is not None})

    def __str__(self) -> str:
        """Return it as it begins a sentence; an empty text if nothing applies."""
        given = {name: value for name, value in (self.sampling or {}).items() if value not in (None, [], ())}
        parts = (
            None if self.turn is None else f"turn {self.turn}",
            None if self.position is None else f"output token {self.position}",
            None if self.token is None else f"id {self.token}",
            None if self.sampling is None else f"sampled with {given or 'the defaults'}",
            None if self.streamed is None else "streamed" if self.streamed else "not streamed",
        )
        return ", ".join(part for part in parts if part is not None)


NOWHERE = Where()
_PLACE: ContextVar[Where] = ContextVar("place", default=NOWHERE)


def place() -> Where:
    """Return where this task is."""
    return _PLACE.get()


def set_place(**changes: Any) -> None:
    """Set where this task is from now on: fields of `Where`. Without any, it is nowhere.

    Findings of this task take from it what they do not name themselves.
    """
    _PLACE.set(replace(_PLACE.get(), **changes) if changes else NOWHERE)


async def checked(work: Awaitable[None]) -> None:
    """Run checks, from no place on.

    Raises:
        BrokenLawError: Also if the client refused a response or its ledger by a law.
    """
    set_place()
    with refusing():
        await work


@contextmanager
def refusing() -> Iterator[None]:
    """Make what the client refuses by a law a finding, at the place of this task: another task's is another request.

    Raises:
        BrokenLawError: The client refused a response or its ledger.
    """
    try:
        yield
    except (BackendError, LawViolationError) as error:
        if not str(error).startswith("Law "):
            raise
        raise BrokenLawError("refused", str(error)) from error


async def together(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run works at once and return their results, in order. The first error ends the others, and is raised."""
    async with task_group() as group:
        tasks = [group.create_task(work) for work in works]
    return [task.result() for task in tasks]


class BrokenLawError(TITOError, AssertionError):
    """A check failed.

    Attributes:
        check: The check.
        problem: What was expected and found, as a sentence.
        where: The place, as far as it is known.
        bodies: What was sent and answered in the place's request; empty if unknown.
    """

    def __init__(self, check: str, problem: str, where: Where = NOWHERE) -> None:
        self.check = CHECKS[check]
        self.bodies: dict[str, Any] = {}
        self.where = where = where.within(_PLACE.get())
        self.problem = f"{where}: {problem}" if str(where) else problem
        super().__init__(f"Law {self.check.law} ({LAWS[self.check.law]}), {check}: {self.problem}")


NOTHING = "nothing"
"""What a column of an answer was compared with, where no law binds it and no second source was asked."""


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer of a run.

    Attributes:
        kind: How it was sampled, and whether it was streamed.
        columns: Against what each of its columns was compared: a second source, "law" or `NOTHING`.
    """

    kind: str
    columns: dict[str, str]


@dataclass
class Tally:
    """Counts of the checks that ran, and of the cases that could not be checked.

    Attributes:
        passed: Cases that passed, by check.
        failed: Cases that failed, by check.
        not_applicable: Cases that could not be checked, by check and reason.
        turns: Turns that were played.
        apart_nats: Largest difference between two servers' logprobs of one token, in nats.
        scored_nats: Largest difference between a reported logprob and the server's own score, in nats.
        notes: Sentences for the report's reader, such as near-ties.
    """

    passed: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    not_applicable: dict[str, Counter[str]] = field(default_factory=dict)
    turns: int = 0
    apart_nats: float = 0.0
    scored_nats: float = 0.0
    notes: list[str] = field(default_factory=list)

    def require(self, check: str, condition: bool, problem: str, cases: int = 1, where: Where = NOWHERE) -> None:
        """Count a check as passed, or raise.

        Raises:
            BrokenLawError: The condition is False.
        """
        if not condition:
            self.failed[check] += 1
            raise BrokenLawError(check, problem, where)
        self.passed[check] += cases

    def skip(self, check: str, reason: str | Exception, cases: int = 1) -> None:
        """Count cases that could not be checked, by the first line of the reason."""
        self.not_applicable.setdefault(check, Counter())[str(reason).partition("\n")[0]] += cases


@dataclass(frozen=True, slots=True)
class Profile:
    """The size of a run.

    Attributes:
        name: Value of `--profile`.
        conversations: Number of random conversations.
        moves: Largest number of moves in each.
        repeats: Number of fixed prompts; the number of samples grows with it, too.
        at_once: Most requests in progress at a time; None for no limit.
    """

    name: str
    conversations: int
    moves: int
    repeats: int
    at_once: int | None = None

    @property
    def shrinks(self) -> bool:
        """Whether a conversation that fails is shrunk, which takes requests beyond `most_requests`."""
        return self.name != PRODUCTION

    def most_requests(self, *, weights: bool = False, both: bool = False, adapters: int = 0) -> int:
        """Return how many generations and scores a run sends at most; see `describe`."""
        playing = self.conversations * self.moves * REQUESTS_OF_A_MOVE
        if both:
            return 2 * playing
        more = (adapters + 1) * (adapters + 2) if adapters else 0
        return playing + REQUESTS_OF_A_REPEAT * self.repeats + OTHER_REQUESTS + WEIGHT_REQUESTS * weights + more

    def describe(self, tokens: int, *, weights: bool = False, both: bool = False, adapters: int = 0) -> str:
        """Return a sentence that says how much will be sent, with answers of so many tokens."""
        requests = self.most_requests(weights=weights, both=both, adapters=adapters)
        longest = "" if both else ", and a few long prompts of up to 4,096 tokens"
        return (
            f"Profile {self.name}: up to {self.conversations} conversations of up to {self.moves} moves, at most "
            f"{requests:,} requests{' on both servers together' if both else ''}: generations of up to {tokens} tokens "
            f"(96 where calls may come, 200 under a grammar), scores of them{longest}."
            + (" The search for a smaller conversation after a failure comes on top." if self.shrinks else "")
            + (" The server's weights are changed, and are not restored." if weights else "")
        )


REQUESTS_OF_A_MOVE = 2
"""Generations and scores of a move: the mean is 1.3, so no run of dozens of moves has more."""
REQUESTS_OF_A_REPEAT = 200
"""Of a fixed prompt in all its ways, and of the samples that are judged."""
OTHER_REQUESTS = 230
"""Of the connection, of the checks that no profile repeats, and of the scores of each stage."""
WEIGHT_REQUESTS = 40
"""Of weight updates between fixed prompts."""
PRODUCTION = "production"
"""Name of the profile for a server that others use: small, and refused together with weights."""
PROFILES = {
    profile.name: profile
    for profile in (
        Profile("quick", 8, 6, 2),
        Profile("standard", 40, 10, 4),
        Profile("deep", 400, 16, 8),
        Profile(PRODUCTION, 4, 6, 1, at_once=16),
    )
}
"""The profiles by name."""
