"""Checks with fixed requests: near-ties, late aborts, truncated logprobs, and how many requests are sent."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from conformance.defects.defect import SERVERS, SOUND, Defect, plant
from conformance.defects.requests import Scoring
from conformance.defects.sampling import Changed
from conformance.defects.trial import FOLDERS, target_of, try_defect
from conformance.defects.views import EXPERTS, View
from support.scripted import tokenizer
from tito_conformance import fields, fixed, suite
from tito_conformance.checks import NOWHERE, PROFILES, BrokenLawError, Tally
from tito_conformance.connection import connect
from tito_conformance.final_checks import NOT_REPORTED
from tito_conformance.fixed import NEAR_TIE_NATS, check_abort
from tito_conformance.testing import HashPolicy, ScriptedEngine, ScriptedRequest
from tito_conformance.testing.moves import Ask
from tito_core.backend.http.client import HttpResponse, HttpTransport

pytestmark = pytest.mark.suite


def answer(*tokens: tuple[int, float]) -> Any:
    ids, logprobs = zip(*tokens, strict=True)
    return SimpleNamespace(output_ids=np.array(ids, np.int32), logprobs=np.array(logprobs, np.float32))


def again(one: Any, other: Any, tolerance: float) -> Tally:
    """Judge a greedy answer by an equal request's, on a server without likely tokens."""
    tally, near = Tally(), max(NEAR_TIE_NATS, 2 * tolerance)
    plain = fields.Plain(fields._bare(one), frozenset(), str, near)
    fields._require_expected(tally, plain, {}, other, NOWHERE)
    return tally


@pytest.mark.parametrize(
    ("apart", "tolerance", "holds"),
    [
        (0.015, 0.001, True),
        (0.06, 0.001, False),  # in float32
        (0.06, 0.25, True),  # in bfloat16
        (0.49, 0.25, True),
        (0.51, 0.25, False),
    ],
)
def test_tokens_may_differ_only_at_a_near_tie(apart: float, tolerance: float, holds: bool) -> None:
    one, other = answer((5, -0.5), (7, -1.0), (8, -1.0)), answer((5, -0.5), (9, -1.0 - apart), (1, -3.0), (2, -4.0))
    if holds:
        assert again(one, other, tolerance).notes
    else:
        with pytest.raises(BrokenLawError, match=r"\(1, 7, 9\)"):
            again(one, other, tolerance)


@pytest.mark.parametrize("tolerance", [0.001, 0.25])
def test_equal_tokens_of_equal_requests_have_equal_logprobs(tolerance: float) -> None:
    near, server = max(NEAR_TIE_NATS, 2 * tolerance), cast(Any, SimpleNamespace(tolerance_nats=tolerance))

    def judge(off: float) -> Tally:
        tally, (one, other) = Tally(), (answer((5, -0.5), (7, -1.0)), answer((5, -0.5), (7, -1.0 - off), (8, -1.0)))
        other.request_id = "r"
        fields._require_same_logprobs(server, tally, "obeyed", one, other, "")
        return tally

    assert judge(0.9 * near).passed["obeyed"] == 1
    with pytest.raises(BrokenLawError, match=f"2 tokens are equal, but their logprobs are {1.1 * near:.3g} nats"):
        judge(1.1 * near)


def test_an_answer_that_ends_early_is_another_one() -> None:
    with pytest.raises(BrokenLawError, match=r"\(1, 7, None\)"):
        again(answer((5, -0.5), (7, -1.0)), answer((5, -0.5)), 0.001)


def test_a_score_differs_where_it_is_off_or_no_number() -> None:
    recorder = SimpleNamespace(compared=lambda *_: None)
    tally, connected = Tally(), cast(Any, SimpleNamespace(tolerance_nats=0.1, recorder=recorder))
    own = np.array([-1.0, -2.0, -3.0], np.float32)
    fixed.require_scores(connected, tally, "rescored", own, np.array([0.0, 0.05, -0.09]))
    assert (tally.passed["rescored"], tally.scored_nats) == (3, 0.09)
    for off in (0.2, np.nan):
        with pytest.raises(BrokenLawError, match=r"offset 6 of 3; all others agree") as raised:
            fixed.require_scores(connected, tally, "long", own, np.array([0.0, off, 0.0]), places=[5, 6, 7])
        assert raised.value.where.position == 6


def end() -> int:
    return int(tokenizer().eos_token_id)


@pytest.mark.parametrize(("latency", "pipe_s", "judged"), [(0.0, 0.0, False), (0.0, 9.0, False), (0.5, 0.0, True)])
def test_an_abort_that_came_too_late_is_not_judged(
    latency: float, pipe_s: float, judged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a slow pipe, the stream of an answer that was sampled in moments comes long after its abort."""
    abort_all = fixed._abort_all_but_one

    async def piped(*arguments: Any) -> Any:
        aborts, other = await abort_all(*arguments)
        return [replace(one, early=False, seconds=one.seconds + pipe_s) for one in aborts] if pipe_s else aborts, other

    monkeypatch.setattr(fixed, "_abort_all_but_one", piped)

    async def check() -> Tally:
        server = await connect(target_of("vllm", replace(SOUND, options={"latency": lambda _: latency})))
        tally = Tally()
        await check_abort(server, tally)
        await server.policy.backend.aclose()
        return tally

    tally = asyncio.run(check())
    assert bool(tally.passed["aborted"]) is judged
    assert bool(tally.not_applicable.get("aborted")) is not judged


def test_what_no_answer_reports_does_not_hold() -> None:
    def remove(view: View, request: ScriptedRequest) -> None:
        view.cached_tokens = None

    outcome = suite.replay(
        target_of("vllm-completions", replace(SOUND, edit=remove)), PROFILES["quick"], [Ask(), Ask()]
    )
    assert outcome.sound, str(outcome.broken)
    for check in ("cached", "versions"):
        assert not outcome.tally.passed[check]
        assert outcome.tally.not_applicable[check] == {NOT_REPORTED: 2}


@pytest.mark.parametrize("wire", ["vllm", "sglang"])
def test_top_k_1_may_report_another_logprob_than_greedy_sampling(wire: str) -> None:
    policy = HashPolicy(len(tokenizer()), eos_ids=[end()])
    truncating = {"raw_logprobs": False, "truncated_logprobs": True}
    target = target_of(wire, replace(SOUND, wrap=lambda _: policy, options=truncating))

    async def play() -> Tally:
        server, tally = await connect(target), Tally()
        assert server.policy.info.truncated_logprobs
        await fields.check(server, tally, 2)
        return tally

    assert asyncio.run(play()).passed["obeyed"] > 8


SCORES_AND_GENERATIONS = ("/generate", "/completions")


class Counting:
    """A transport that counts generations and scores at the server."""

    def __init__(self, inner: HttpTransport, counts: list[str]) -> None:
        self._inner, self._counts = inner, counts

    async def send(self, method: str, url: str, headers: Mapping[str, str], body: Any) -> HttpResponse:
        if method == "POST" and url.endswith(SCORES_AND_GENERATIONS):
            self._counts.append(url)
        return await self._inner.send(method, url, headers, body)

    async def aclose(self) -> None:
        await self._inner.aclose()


@pytest.mark.parametrize("wire", SERVERS)
def test_no_more_requests_are_sent_than_announced(wire: str) -> None:
    weights = FOLDERS if wire == "sglang" else ()
    make, sent, shown = plant(SOUND, wire, tokenizer(), end()), list[str](), list[tuple[int, int]]()
    target = target_of(wire, transport=lambda: Counting(make(), sent), experts=EXPERTS, weights=weights)
    profile = PROFILES["quick"]
    outcome = suite.run(target, profile, lambda conversations, requests: shown.append((conversations, requests)))
    assert outcome.sound, str(outcome.broken)
    if weights:
        assert outcome.server.folder == weights[0]
        assert outcome.server.weight_updates >= 4
        assert outcome.tally.passed["changed"] > 1_000
    assert len(sent) <= profile.most_requests(weights=bool(weights))
    assert 2 * len(sent) > profile.most_requests(weights=bool(weights))
    connecting = len(sent) - outcome.requests
    assert 0 <= connecting <= 20
    assert {number for _, number in shown} == set(range(shown[0][1], outcome.requests + 1))
    assert shown[0] == (0, outcome.requests - len({number for _, number in shown}) + 1)
    assert shown[0][1] < 10  # those of the measurements at the connection
    assert shown[-1] == (profile.conversations, outcome.requests)


def _mix_queue_into_seeds(engine: ScriptedEngine) -> None:
    def moved(request: ScriptedRequest) -> ScriptedRequest:
        return request if request.seed is None else replace(request, seed=request.seed + engine.running)

    engine.script = Changed(engine.script, moved)


def _first_block_is_zero(scores: list[float], _: list[float]) -> list[float]:
    return [*[0.0] * 31, *scores[31:]] if len(scores) > 64 else scores


@pytest.mark.parametrize(
    ("defect", "check"),
    [
        (
            Defect(
                "seed-of-the-queue",
                4,
                "A seeded answer depends on the number of requests before it.",
                spoil=_mix_queue_into_seeds,
                options={"latency": 0.01},
            ),
            "seeded",
        ),
        (
            Defect(
                "scores-of-the-first-block",
                4,
                "The first scores of every long prompt are 0.",
                wrap=lambda script: Scoring(script, _first_block_is_zero),
            ),
            "scored",
        ),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_what_is_wrong_in_the_same_way_at_each_comparison_is_noticed(defect: Defect, check: str) -> None:
    verdict = try_defect(defect, "vllm", tokenizer(), end(), PROFILES["quick"])
    assert verdict.caught_by == check, verdict.problem
