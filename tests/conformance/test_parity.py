"""Two servers compared: equal ones pass, a difference is noticed, and a refused grammar is skipped with its reason."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from conformance.defects.answers import ANSWERS
from conformance.defects.defect import SOUND, Defect, plant
from conformance.defects.scripted_policy import ConformancePolicy
from conformance.defects.trial import target_of
from conformance.defects.views import EXPERTS
from support.scripted import tokenizer
from tito_conformance import suite
from tito_conformance.checks import PROFILES, SINGLE_SERVER_CHECKS, Profile
from tito_conformance.connection import connect
from tito_conformance.report import rows
from tito_conformance.servers import GRAMMAR_REFUSED, ServerPair
from tito_conformance.target import Target
from tito_conformance.testing import Completion, Fault, HashPolicy, InProcessTransport, ScriptedRequest, scripted_engine
from tito_conformance.testing import moves as m
from tito_core.backend.http.client import HttpResponse, HttpTransport

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


@pytest.mark.suite
@pytest.mark.parametrize(("one", "other"), [("vllm", "sglang"), ("sglang", "vllm-completions")])
def test_one_policy_on_two_wires_makes_equal_ledgers(one: str, other: str) -> None:
    outcome = suite.run(target(one), LONGER, against=target(other))
    assert outcome.sound, (str(outcome.broken), outcome.error, outcome.moves)
    assert outcome.tally.apart_nats == 0.0
    assert not outcome.tally.notes
    assert outcome.tally.passed["ledgers"] > 60
    assert outcome.tally.passed["greedy"] > 400
    assert outcome.tally.passed["agreed"] > 200
    assert not set(outcome.tally.not_applicable.get("greedy", ())), "every greedy answer was compared"
    # Which moves a seed draws depends on what else the process has imported (Hypothesis draws modules' constants).
    moves = [
        m.Force(text=f"{'Add' if named else 'Look for'} {n}.", named=named) for n in range(4) for named in (True, False)
    ]
    forced = suite.replay(target(one), LONGER, moves, against=target(other))
    assert forced.sound, (str(forced.broken), forced.error)
    assert forced.tally.passed["constrained"] >= 4 * len(moves), "each is checked on both servers"
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
    "stop-token-dropped": ("refused", "ledgers"),
    "text-halved": ("text",),
}


@pytest.mark.suite
@pytest.mark.parametrize("name", PLANTED)
def test_a_defect_of_the_second_server_is_noticed(name: str) -> None:
    defect = next(each for each in ANSWERS if each.name == name)
    outcome = suite.run(target("vllm"), LONGER, against=target("sglang", defect=defect), shrink=False)
    assert outcome.broken is not None, outcome.error
    assert outcome.broken.check.name in PLANTED[name], str(outcome.broken)


@pytest.mark.suite
def test_a_broken_law_is_replayed_on_both_servers() -> None:
    one, other = target("vllm", SecondBest()), target("sglang", SecondBest(0.2, 0.9))
    outcome = suite.run(one, QUICK, against=other)
    again = suite.replay(one, QUICK, outcome.moves, against=other)
    assert again.broken is not None
    assert outcome.broken is not None
    assert again.broken.check == outcome.broken.check
    same = suite.replay(one, QUICK, outcome.moves, against=target("sglang", SecondBest()))
    assert same.sound


REFUSED = "Grammar accept_token failed: Tokens not accepted: 151658"
"""What SGLang 0.5.23 says when XGrammar 0.2.7 refuses a token that its mask allowed."""


class Refusing:
    """A transport of a server that answers 500 to structural tags, or to everything after the first of them."""

    def __init__(self, inner: HttpTransport, *, for_good: bool) -> None:
        self._inner, self._for_good, self._down = inner, for_good, False

    async def send(self, method: str, url: str, headers: Mapping[str, str], body: Any) -> HttpResponse:
        if b'"structural_tag":"' in body or self._down:
            self._down = self._for_good
            return HttpResponse(500, {"content-type": "application/json"}, _refusal(), _nothing)
        return await self._inner.send(method, url, headers, body)

    async def aclose(self) -> None:
        await self._inner.aclose()


async def _refusal() -> AsyncIterator[bytes]:
    yield json.dumps({"error": {"message": REFUSED}}).encode()


async def _nothing() -> None:
    return


@pytest.mark.suite
@pytest.mark.parametrize(
    ("wire", "for_good"),
    [
        ("vllm", False),
        ("vllm-completions", True),
        ("sglang", False),
    ],
)
def test_only_a_refusal_of_the_grammar_is_skipped(wire: str, for_good: bool) -> None:
    make = plant(SOUND, wire, tokenizer(), end())
    refusing = target_of(wire, transport=lambda: Refusing(make(), for_good=for_good))
    moves = [m.Call(calls=('{"name": "add", "arguments": {}}',)), m.Call(text="And now?", calls=("{}",))]
    outcome = suite.replay(refusing, QUICK, moves)
    assert outcome.broken is None
    reasons: Mapping[str, int] = outcome.tally.not_applicable.get("calls", {})
    assert (REFUSED in str(outcome.error)) == for_good
    assert any(REFUSED in reason for reason in reasons) == (not for_good)
    assert outcome.tally.turns >= 2 or for_good


def _abort_under_a_grammar(_: int, request: ScriptedRequest) -> Fault | None:
    """Do what SGLang does in a stream: its last event says that the generation was aborted."""

    def edit(answer: Any) -> None:
        if isinstance(answer, list):
            del answer[2:]
            answer[-1]["meta_info"]["finish_reason"] = {"type": "abort", "message": REFUSED, "status_code": 500}

    return Fault(edit=edit) if request.grammar is not None else None


@pytest.mark.suite
def test_a_stream_that_ends_in_a_refusal_is_skipped_and_two_servers_begin_anew() -> None:
    refusing = replace(SOUND, options={"fault": _abort_under_a_grammar})
    one, other = (target_of(*each, greedily=True) for each in (("vllm", SOUND), ("sglang", refusing)))
    moves = [m.Stream(), m.Ask(), m.Call(calls=("{}",)), m.Force(), m.Shape(), m.Ask(text="And now?")]
    outcome = suite.replay(one, QUICK, moves, against=other)
    assert outcome.sound, (str(outcome.broken), outcome.error)
    assert outcome.tally.not_applicable["ledgers"] == {GRAMMAR_REFUSED: 3}
    for check in ("calls", "constrained"):
        assert any(REFUSED in reason for reason in outcome.tally.not_applicable[check])
    assert outcome.tally.turns == 10


@pytest.mark.suite
async def test_two_servers_stream_only_if_both_backends_can() -> None:
    one, other = await connect(target_of("vllm")), await connect(target_of("sglang"))
    assert ServerPair(one, other, one.tally).can_stream
    whole: Any = SimpleNamespace(generate=lambda request: None)
    backend, other.recorder.inner = other.recorder.inner, whole
    assert not ServerPair(one, other, one.tally).can_stream
    for each in (one.backend, backend):
        await each.aclose()
