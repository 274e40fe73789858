"""A finding names its place: the turn, the token, the sampling parameters and whether the answer was streamed."""

from __future__ import annotations

import asyncio
import json

import pytest

from conformance.defects import all_defects
from conformance.defects.trial import target_of
from tito_conformance import suite
from tito_conformance.checks import PROFILES, BrokenLawError, Where, checked, set_place
from tito_conformance.testing.moves import Ask, Move, Sampling, Stream, Together
from tito_core.backend.errors import ProtocolViolationError

pytestmark = pytest.mark.suite


def test_a_place_names_what_applies_only() -> None:
    where = Where(3, 5, 77, {"temperature": 0.5, "seed": None}, streamed=True)
    assert str(where) == "turn 3, output token 5, id 77, sampled with {'temperature': 0.5}, streamed"
    assert str(Where()) == ""
    broken = BrokenLawError("answers", "it differs.", where)
    assert (broken.where, broken.check.name) == (where, "answers")
    assert broken.problem == f"{where}: it differs."
    assert BrokenLawError("answers", "it differs.").problem == "it differs."


@pytest.mark.parametrize(
    ("name", "check", "streamed"),
    [
        ("text-halved", "text", False),
        ("logprobs-shifted", "rescored", False),
        ("client-shifts-logprobs", "logprobs", False),
        ("client-shifts-logprobs", "logprobs", True),
        ("client-records-no-seed", "requested", True),
        ("client-forgets-history", "parent", True),
    ],
)
def test_a_finding_of_a_conversation_has_its_place(name: str, check: str, streamed: bool) -> None:
    defect = next(defect for defect, _ in all_defects() if defect.name == name)
    wire = "sglang" if name == "text-halved" else "vllm"
    opening = [Stream()] if streamed else []
    moves = [*opening, Sampling(seed=7), *(Ask(text=text) for text in ("Hi", "Ho", "Hm", "Ha"))]
    with defect.client():
        outcome = suite.replay(target_of(wire, defect), PROFILES["quick"], moves)
    assert outcome.broken is not None
    where = outcome.broken.where
    assert outcome.broken.check.name == check
    assert where.streamed is streamed
    assert where.turn in range(4)
    assert where.sampling is not None
    assert where.sampling["seed"] == (None if name == "client-records-no-seed" else 7)
    of_a_token = check in ("rescored", "logprobs")
    assert (where.position is not None, where.token is not None) == (of_a_token, of_a_token)


def test_a_refused_response_has_the_place_of_its_request() -> None:
    async def refuse() -> None:
        set_place(turn=2, sampling={"temperature": 0.5}, streamed=True)
        raise ProtocolViolationError("Law 4: the answer is empty.", backend="vllm")

    with pytest.raises(BrokenLawError) as raised:
        asyncio.run(checked(refuse()))
    assert (raised.value.check.name, raised.value.where) == (
        "refused",
        Where(2, None, None, {"temperature": 0.5}, True),
    )


@pytest.mark.parametrize(
    ("name", "moves"),
    [
        ("min-tokens-ignored", None),
        ("stop-token-dropped", [Together(texts=("Hi", "Ho", "Hm"))]),
        ("stop-token-dropped", [Ask(text="Hi")]),
    ],
    ids=["in a batch", "of several agents", "of one"],
)
def test_a_refused_response_among_others_has_its_own_place(name: str, moves: list[Move] | None) -> None:
    """Its request id, parameters and bodies, not those of a request before or beside it."""
    defect = next(defect for defect, _ in all_defects() if defect.name == name)
    target, profile = target_of("sglang" if moves is None else "vllm", defect, varied=True), PROFILES["production"]
    outcome = suite.run(target, profile) if moves is None else suite.replay(target, profile, moves)
    assert outcome.broken is not None
    assert outcome.broken.check.name == "refused"
    where, [body] = outcome.broken.where, outcome.broken.bodies.values()
    assert where.request_id is not None
    assert where.request_id in body["sent"] + body["got"]
    assert where.sampling is not None
    if moves is None:
        assert json.loads(body["sent"])["sampling_params"]["min_new_tokens"] == where.sampling["min_new_tokens"] > 0


@pytest.mark.parametrize("profile", ["quick", "production"])
def test_a_finding_has_the_bodies_of_its_own_request(profile: str) -> None:
    """Also after the search for a smaller conversation, which the profile for others' servers leaves out."""
    defect = next(defect for defect, _ in all_defects() if defect.name == "cached-whole")
    found = [
        suite.run(target_of("sglang", defect, varied=True), PROFILES[profile], shrink=shrink)
        for shrink in (False, True)
    ]
    assert (found[0].moves == found[1].moves) == (profile == "production")
    for outcome in found:
        assert outcome.broken is not None
        assert outcome.broken.where.request_id is not None
        [body] = outcome.broken.bodies.values()
        assert outcome.broken.where.request_id in body["sent"]
