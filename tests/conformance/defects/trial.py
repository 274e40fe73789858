"""The suite on trial: does it notice a planted defect, and is it silent where there is none?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from conformance.defects.column_views import EXPERTS
from conformance.defects.defect import SERVERS, SOUND, Defect, planted
from strands_tito.conformance import suite
from strands_tito.conformance.profiles import Profile
from strands_tito.conformance.target import Target
from tito_core.backend.errors import BackendError


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the suite made of a defect.

    Attributes:
        defect: Name of what was planted.
        wire: Where.
        caught_by: The check that noticed, "connecting" where the client refused the server, or None.
        problem: What it said.
        turns: Turns that were played until then.
        expected: Whether what was noticed can come of the defect: no crash of the suite's own.
    """

    defect: str
    wire: str
    caught_by: str | None
    problem: str
    turns: int
    expected: bool = True


def tried(defect: Defect, wire: str, tokenizer: Any, end: int, profile: Profile, seed: int = 0) -> Verdict:
    """Run the suite on a scripted engine with a defect.

    Args:
        defect: The defect, or `SOUND`.
        wire: One of its wires.
        tokenizer: The model's, whose parser is Hermes'.
        end: Id that ends a turn.
        profile: How much is played.
        seed: What is drawn is drawn from it.
    """
    target = _target(defect, wire, tokenizer, end, seed, greedily=defect.beside)
    against = _other(wire, tokenizer, end, seed) if defect.beside else None
    with defect.client():
        try:
            outcome = suite.run(target, profile, shrink=False, against=against)
        except BackendError as error:
            return Verdict(defect.name, wire, "connecting", str(error), 0)
    return _verdict(defect, wire, outcome)


def tried_beside(wire: str, tokenizer: Any, end: int, profile: Profile, seed: int) -> Verdict:
    """Run one script on a scripted engine of a wire and on one of the next wire, neither with a defect."""
    one = _target(SOUND, wire, tokenizer, end, seed, greedily=True)
    return _verdict(SOUND, wire, suite.run(one, profile, shrink=False, against=_other(wire, tokenizer, end, seed)))


def _other(wire: str, tokenizer: Any, end: int, seed: int) -> Target:
    """Give an engine without a defect, on the next wire."""
    return _target(SOUND, SERVERS[(SERVERS.index(wire) + 1) % len(SERVERS)], tokenizer, end, seed, greedily=True)


def _target(defect: Defect, wire: str, tokenizer: Any, end: int, seed: int, *, greedily: bool = False) -> Target:
    return Target(
        "sglang" if wire == "sglang" else "vllm",
        "http://scripted",
        tokenizer,
        transport=planted(defect, wire, tokenizer, end, greedily=greedily),
        seed=seed,
        seeds=True,
        experts=EXPERTS,
        weights="/scripted" if defect.weights else None,
    )


def _verdict(defect: Defect, wire: str, outcome: suite.Outcome) -> Verdict:
    if outcome.broken is not None:
        return Verdict(defect.name, wire, outcome.broken.check.name, outcome.broken.problem, outcome.turns)
    if outcome.error is not None:
        return Verdict(defect.name, wire, outcome.error.partition(":")[0], outcome.error, outcome.turns, expected=False)
    return Verdict(defect.name, wire, None, "", outcome.turns)
