"""The checks: which law each stands for, and how often it was made, held, or could not be made."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

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
    """One thing that is held to a law.

    Attributes:
        name: Short and unique.
        law: The law's number.
        what: What is checked, as a sentence.
    """

    name: str
    law: int
    what: str


_ALL = (
    Check("prompt", 1, "Each prompt is its parent's prompt and completion and then the delta, as sent."),
    Check("ledger", 2, "All that a ledger alone can answer holds: `check_ledger`."),
    Check("alignment", 2, "A trajectory has a logprob exactly on the tokens of answers, the one that was reported."),
    Check("trajectory", 3, "A trajectory is the path of its last turn, token for token."),
    Check("mask", 3, "Each sampled token is trained once over all trajectories, and no other token is."),
    Check("answers", 4, "Each turn comes from exactly one whole answer."),
    Check("echo", 4, "The server read the prompt that was sent."),
    Check("output", 4, "The ledger holds the ids of the answer."),
    Check("logprobs", 4, "The ledger holds the answer's logprobs, each of its own token."),
    Check("usage", 4, "The server counts the tokens that there are."),
    Check("cached", 4, "Cached tokens are tokens of the prompt."),
    Check("finish", 4, "Why an answer ended agrees with its last tokens and with what was asked for."),
    Check("top", 4, "The likeliest tokens are the answer's; the sampled one is among them, or less likely than all."),
    Check(
        "scored", 4, "Logprobs of the prompt are the answer's, of the prompt's own tokens, and as the server scores."
    ),
    Check("routed", 4, "Each token but the last has the experts that the answer tells, and tells again."),
    Check("left", 4, "A sampling mask is the answer's, no larger than top_k, and holds the sampled token."),
    Check("text", 4, "The ids spell the text beside them."),
    Check("refused", 4, "The client refuses no answer of the server."),
    Check("stopped", 4, "An answer ends with the stop string that was asked for, and holds none before."),
    Check("seeded", 4, "The same seed gives the same tokens, up to a near-tie."),
    Check("obeyed", 4, "The server obeys top_k, ignore_eos, min_new_tokens and stop ids."),
    Check("sampler", 4, "Sampled tokens follow the distribution that the server states, also under its parameters."),
    Check("rescored", 4, "The server scores the sampled tokens as it reported them."),
    Check("long", 4, "Long prompts, long answers and a full context are scored as they were reported."),
    Check("repeatable", 4, "The same greedy request gives the same tokens, up to a near-tie."),
    Check("alone", 4, "A greedy answer is the same beside other requests, up to a near-tie."),
    Check("lost", 5, "Every answer is a turn, unless it was cancelled."),
    Check("cancelled", 5, "A turn that was cancelled leaves no trace, and the next one is sound."),
    Check("aborted", 5, "An abort ends the request that it names, and no other."),
    Check("inert", 6, "No control token comes from what messages say."),
    Check("rendering", 7, "What a turn adds to the prompt is how the template's own rendering of the history ends."),
    Check("tokens", 7, "It is encoded as the tokenizer encodes it, where messages spell no control token."),
    Check("parent", 8, "A turn follows the latest turn whose history its own begins with."),
    Check("forced", 9, "A call that a grammar forces is sound, of that tool, and valid by its schema."),
    Check("shaped", 9, "An answer of a given shape has it."),
    Check("constrained", 9, "What was sampled under a grammar is marked so, and nothing else."),
    Check("versions", 10, "Weight versions tile each completion as the server says them."),
    Check("changed", 10, "Weights that change under an answer are named for the tokens that each sampled."),
    Check("live", 10, "After a change of weights an answer names the new ones alone."),
    Check("semantics", 11, "What the logprobs mean was measured."),
    Check("saved", 12, "A ledger comes back from JSON and from a file as it was."),
    Check("ledgers", 13, "Two servers give one ledger, apart from the engine's record and the logprobs' last digits."),
    Check("greedy", 13, "Two servers give the same greedy ids, up to a near-tie."),
    Check("agreed", 13, "Two servers give equal tokens the same logprobs, within the tolerance."),
)
OF_PARITY = ("ledgers", "greedy", "agreed")
"""Checks that need a second server."""
OF_WEIGHTS = ("changed", "live")
"""Checks that need leave to change weights."""
OF_COLUMNS = {
    "top": "top_logprobs",
    "scored": "prompt_logprobs",
    "routed": "routed_experts",
    "left": "sampling_mask",
}
"""Checks of what is wanted beside, with what is wanted."""
OF_ONE = (
    "semantics",
    "sampler",
    "long",
    "aborted",
    "obeyed",
    "seeded",
    "repeatable",
    "alone",
    "cancelled",
    *OF_COLUMNS,
    *OF_WEIGHTS,
)
"""Checks that are made where one server is tested."""
CHECKS = {check.name: check for check in _ALL}
"""Every check, by name."""


class BrokenLawError(AssertionError):
    """A check failed.

    Attributes:
        check: Which.
        problem: What was expected and found, as a sentence.
    """

    def __init__(self, check: str, problem: str) -> None:
        self.check = CHECKS[check]
        self.problem = problem
        super().__init__(f"Law {self.check.law} ({LAWS[self.check.law]}), {check}: {problem}")


@dataclass
class Tally:
    """How often each check was made, and what could not be checked, with why.

    Attributes:
        passed: Cases that held, by check.
        failed: Cases that did not.
        not_applicable: Cases that could not be checked, by check and why.
        turns: How many turns were played.
        apart_nats: The furthest that two servers' logprobs of one token were apart.
        notes: What a reader of the report should know besides, as sentences: near-ties.
    """

    passed: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    not_applicable: dict[str, Counter[str]] = field(default_factory=dict)
    turns: int = 0
    apart_nats: float = 0.0
    notes: list[str] = field(default_factory=list)

    def hold(self, check: str, sound: bool, problem: str, cases: int = 1) -> None:
        """Count a check; raise what is broken."""
        if not sound:
            self.failed[check] += 1
            raise BrokenLawError(check, problem)
        self.passed[check] += cases

    def skip(self, check: str, why: str, cases: int = 1) -> None:
        """Count what could not be checked."""
        self.not_applicable.setdefault(check, Counter())[why] += cases
