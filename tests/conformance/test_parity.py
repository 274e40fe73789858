"""Two servers compared: the suite passes equal ones, and notices a difference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from conformance.defects.answers import ANSWERS
from conformance.defects.column_views import EXPERTS
from conformance.defects.defect import SOUND, Defect
from conformance.defects.scripted_policy import ConformancePolicy
from support.scripted import tokenizer
from tito_conformance import suite
from tito_conformance.checks import PROFILES, SINGLE_SERVER_CHECKS, Profile
from tito_conformance.report import rows
from tito_conformance.target import Target
from tito_conformance.testing import Completion, HashPolicy, InProcessTransport, ScriptedRequest, scripted_engine

QUICK = PROFILES["quick"]
LONGER = Profile("longer", 12, 8, 1)


def alphabet() -> list[int]:
    return sorted(set(tokenizer().encode("".join(map(chr, range(32, 127))), add_special_tokens=False)))


def end() -> int:
    return int(tokenizer().eos_token_id)


def model(**settings: Any) -> HashPolicy:
    return HashPolicy(len(tokenizer()), alphabet=alphabet(), eos_ids=[end()], **settings)


def target(wire: str, script: Any = None, defect: Defect = SOUND) -> Target:
    kind = "sglang" if wire == "sglang" else "vllm"
    engine = scripted_engine(
        kind,
        script or ConformancePolicy(tokenizer(), end(), greedily=True),
        vocab_size=len(tokenizer()),
        eos_ids=[end()],
        decode=lambda ids: str(tokenizer().decode(list(ids))),
        scale_out=wire == "vllm",
        fault=defect.fault(wire),
        experts=EXPERTS,
    )
    return Target(kind, "http://scripted", tokenizer(), transport=lambda: InProcessTransport(engine))


class SecondBest:
    """A greedy policy that takes the second token where its distance to the first is in [least, margin) nats."""

    def __init__(self, least: float = 0.0, margin: float = 0.0) -> None:
        self._policy = model()
        self._least, self._margin = least, margin
        self.score, self.top = self._policy.score, self._policy.top

    def __call__(self, request: ScriptedRequest) -> Completion:
        if request.temperature > 0 or request.scoring:
            return self._policy(request)
        ids = list(request.prompt_ids)
        while len(ids) - len(request.prompt_ids) < request.max_new_tokens:
            (best, most), (second, less) = self.top([*ids, 0], len(ids), 2, 1.0)
            ids.append(second if self._least <= most - less < self._margin else best)
            if ids[-1] in request.stop_ids:
                break
        return Completion(ids[len(request.prompt_ids) :])


@pytest.mark.parametrize(
    ("one", "other"), [("vllm", "sglang"), pytest.param("sglang", "vllm-completions", marks=pytest.mark.suite)]
)
def test_one_policy_on_two_wires_makes_equal_ledgers(one: str, other: str) -> None:
    outcome = suite.run(target(one), LONGER, against=target(other))
    assert outcome.sound, (str(outcome.broken), outcome.error, outcome.moves)
    assert outcome.tally.apart_nats == 0.0
    assert not outcome.tally.notes
    assert outcome.tally.passed["ledgers"] > 60
    assert outcome.tally.passed["greedy"] > 400
    assert outcome.tally.passed["agreed"] > 200
    assert not set(outcome.tally.not_applicable.get("greedy", ())), "every greedy answer was compared"
    assert outcome.tally.passed["forced"]
    verdicts = {row.check: row.verdict for row in rows(outcome)}
    assert {verdicts[name] for name in SINGLE_SERVER_CHECKS} == {"not applicable"}


@pytest.mark.suite
def test_a_near_tie_may_differ_and_is_reported_with_its_margin() -> None:
    noisy = replace(target("vllm", SecondBest()), tolerance_nats=0.05)
    outcome = suite.run(noisy, QUICK, against=target("sglang", SecondBest(0.0, 0.095)))
    assert outcome.sound, (str(outcome.broken), outcome.error)
    assert outcome.tally.notes
    assert all("Near-tie: turn" in note and "nats" in note for note in outcome.tally.notes)
    parted = outcome.tally.not_applicable["ledgers"].total()
    assert parted == len(outcome.tally.notes) + outcome.tally.not_applicable["greedy"].total()
    assert outcome.tally.passed["ledgers"], "and the run continues"


OTHERS: dict[str, tuple[Callable[[], Any], str]] = {
    "other answers": (lambda: model(eos_weight=200.0), "greedy"),
    "no near-tie": (lambda: SecondBest(0.2, 0.9), "greedy"),
    "flatter": (lambda: model(tail=5.0), "agreed"),
}


@pytest.mark.suite
@pytest.mark.parametrize("name", OTHERS)
def test_other_weights_are_noticed_though_each_server_alone_passes(name: str) -> None:
    make, check = OTHERS[name]
    alone = suite.run(replace(target("sglang", make()), seed=1), QUICK)
    # A `HashPolicy` with a small alphabet never samples all of its tail, which the sampler's check sees if it is large.
    assert alone.broken is None or alone.broken.check.name in ("obeyed", "forced", "shaped", "sampler"), alone.broken
    outcome = suite.run(target("vllm", SecondBest()), QUICK, against=target("sglang", make()))
    assert outcome.broken is not None
    assert outcome.broken.check.name == check, str(outcome.broken)
    assert outcome.moves, "and shrunk"
    assert len(outcome.moves) <= 2


PLANTED = {
    "length-called-stop": ("ledgers",),
    "logprobs-of-another-token": ("agreed",),
    "stop-token-doubled": ("refused", "ledgers"),
    "text-of-others": ("text",),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_defect_of_the_second_server_is_noticed(name: str) -> None:
    defect = next(each for each in ANSWERS if each.name == name)
    outcome = suite.run(target("vllm"), LONGER, against=target("sglang", defect=defect), shrink=False)
    assert outcome.broken is not None, outcome.error
    assert outcome.broken.check.name in PLANTED[name], str(outcome.broken)


def test_a_broken_law_is_replayed_on_both_servers() -> None:
    one, other = target("vllm", SecondBest()), target("sglang", SecondBest(0.2, 0.9))
    outcome = suite.run(one, QUICK, against=other)
    again = suite.replay(one, QUICK, outcome.moves, against=other)
    assert again.broken is not None
    assert outcome.broken is not None
    assert again.broken.check == outcome.broken.check
    same = suite.replay(one, QUICK, outcome.moves, against=target("sglang", SecondBest()))
    assert same.sound
