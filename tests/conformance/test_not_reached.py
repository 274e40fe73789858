"""A check whose subject the server does not report, or that judged nothing, does not hold."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from conformance.defects.answer_views import View
from conformance.defects.defect import SOUND, plant
from support.scripted import tokenizer
from tito_conformance import suite
from tito_conformance.checks import PROFILES, Tally
from tito_conformance.final_checks import NOT_REPORTED
from tito_conformance.fixed import check_abort
from tito_conformance.target import Target, connect
from tito_conformance.testing import ScriptedRequest
from tito_conformance.testing.moves import Ask


def end() -> int:
    return int(tokenizer().eos_token_id)


@pytest.mark.parametrize(("latency", "judged"), [(0.0, False), (0.5, True)])
def test_an_abort_that_came_too_late_is_not_judged(latency: float, judged: bool) -> None:
    async def check() -> Tally:
        transport = plant(replace(SOUND, options={"latency": lambda _: latency}), "vllm", tokenizer(), end())
        server = await connect(Target("vllm", "http://scripted", tokenizer(), transport=transport))
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

    transport = plant(replace(SOUND, edit=remove), "vllm-completions", tokenizer(), end())
    target = Target("vllm", "http://scripted", tokenizer(), transport=transport)
    outcome = suite.replay(target, PROFILES["quick"], [Ask(), Ask()])
    assert outcome.sound, str(outcome.broken)
    for check in ("cached", "versions"):
        assert not outcome.tally.passed[check]
        assert outcome.tally.not_applicable[check] == {NOT_REPORTED: 2}
    assert outcome.tally.passed["usage"] == 2
