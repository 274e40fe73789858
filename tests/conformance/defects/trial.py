"""Runs the suite on a scripted engine with a planted defect, or with none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from conformance.defects.defect import SERVERS, SOUND, VISION_MODEL, Defect, plant
from conformance.defects.views import EXPERTS
from support.scripted import tokenizer as load_tokenizer
from tito_conformance import suite
from tito_conformance.checks import Profile
from tito_conformance.target import Target
from tito_core.backend.errors import BackendError
from tito_engines import models

FOLDERS = ("/scripted", "/scripted-too")
"""Folders of weights that a scripted engine loads."""
SERVER_ERRORS = ("ServerError", "EngineTimeoutError", "EngineConnectionError")
"""Names of the errors of a server that fails a valid request."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The suite's result on a defect.

    Attributes:
        defect: Name of the defect.
        wire: Its wire.
        caught_by: The check that failed, "connecting" if the client refused the server, "error" if the server failed a
            valid request before or after the conversations, the type of another error, or None.
        problem: The check's sentence.
        turns: Turns until then.
        expected: Whether the defect can cause the failure; False for a crash of the suite itself.
    """

    defect: str
    wire: str
    caught_by: str | None
    problem: str
    turns: int
    expected: bool = True


def target_of(
    wire: str, defect: Defect = SOUND, *, greedily: bool = False, varied: bool = False, **options: Any
) -> Target:
    """Return a scripted engine as the suite's target; `options` are fields of `Target`."""
    loaded = load_tokenizer(VISION_MODEL) if defect.images else load_tokenizer()
    transport = plant(defect, wire, loaded, int(loaded.eos_token_id), greedily=greedily, varied=varied)
    backend = "sglang" if wire == "sglang" else "vllm"
    return Target(backend, "http://scripted", loaded, **{"transport": transport, **options})


def try_defect(defect: Defect, wire: str, tokenizer: Any, end: int, profile: Profile, seed: int = 0) -> Verdict:
    """Run the suite on a scripted engine with a defect.

    Args:
        defect: The defect, or `SOUND`.
        wire: One of its wires.
        tokenizer: The model's tokenizer, whose parser is Hermes'. Engines that read images have their own.
        end: Id that ends a turn.
        profile: How much to play.
        seed: Seed of the random conversations.
    """
    if defect.images:
        tokenizer = models.load_tokenizer(VISION_MODEL)
        end = int(tokenizer.eos_token_id)
    target = _target(defect, wire, tokenizer, end, seed, greedily=defect.needs_second_server)
    against = _sound_target(wire, tokenizer, end, seed) if defect.needs_second_server else None
    with defect.client():
        return judge(defect, wire, target, profile, against)


def try_sound_pair(wire: str, tokenizer: Any, end: int, profile: Profile, seed: int) -> Verdict:
    """Compare a sound scripted engine of a wire with one of the next wire."""
    one = _target(SOUND, wire, tokenizer, end, seed, greedily=True)
    other = _sound_target(wire, tokenizer, end, seed)
    return judge(SOUND, wire, one, profile, other)


def _sound_target(wire: str, tokenizer: Any, end: int, seed: int) -> Target:
    """Return a sound engine on the next wire."""
    return _target(SOUND, SERVERS[(SERVERS.index(wire) + 1) % len(SERVERS)], tokenizer, end, seed, greedily=True)


def _target(defect: Defect, wire: str, tokenizer: Any, end: int, seed: int, *, greedily: bool = False) -> Target:
    return Target(
        "sglang" if wire == "sglang" else "vllm",
        "http://scripted",
        tokenizer,
        transport=plant(defect, wire, tokenizer, end, greedily=greedily, varied=not greedily),
        seed=seed,
        seeds=True,
        experts=EXPERTS,
        weights=FOLDERS[: defect.weights],
        adapters=defect.adapters,
    )


def judge(defect: Defect, wire: str, target: Target, profile: Profile, against: Target | None = None) -> Verdict:
    """Run the suite on a server that has a defect."""
    try:
        outcome = suite.run(target, profile, shrink=False, against=against)
    except BackendError as error:
        return Verdict(defect.name, wire, "connecting", str(error), 0)
    if outcome.broken is not None:
        return Verdict(defect.name, wire, outcome.broken.check.name, outcome.broken.problem, outcome.turns)
    if outcome.error is not None:
        kind = outcome.error.partition(":")[0]
        if kind in SERVER_ERRORS and not outcome.moves:
            return Verdict(defect.name, wire, "error", outcome.error, outcome.turns)
        return Verdict(defect.name, wire, kind, outcome.error, outcome.turns, expected=False)
    return Verdict(defect.name, wire, None, "", outcome.turns)
