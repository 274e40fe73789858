"""A grammar that the server's own grammar engine refuses in the middle of an answer is skipped, with the reason."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from conformance.defects.defect import SOUND, plant
from support.scripted import tokenizer
from tito_conformance import suite
from tito_conformance.checks import PROFILES
from tito_conformance.servers import GRAMMAR_REFUSED
from tito_conformance.target import Target
from tito_conformance.testing import Fault, ScriptedRequest
from tito_conformance.testing import moves as m
from tito_core.backend.http.client import HttpResponse, HttpTransport

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


@pytest.mark.parametrize(
    ("wire", "for_good"),
    [
        pytest.param("vllm", False, marks=pytest.mark.suite),
        pytest.param("vllm-completions", True, marks=pytest.mark.suite),
        ("sglang", False),
    ],
)
def test_only_a_refusal_of_the_grammar_is_skipped(wire: str, for_good: bool) -> None:
    make = plant(SOUND, wire, tokenizer(), int(tokenizer().eos_token_id))
    target = Target(
        "sglang" if wire == "sglang" else "vllm",
        "http://scripted",
        tokenizer(),
        transport=lambda: Refusing(make(), for_good=for_good),
    )
    moves = [m.Call(calls=('{"name": "add", "arguments": {}}',)), m.Call(text="And now?", calls=("{}",))]
    outcome = suite.replay(target, PROFILES["quick"], moves)
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


def test_a_stream_that_ends_in_a_refusal_is_skipped_and_two_servers_begin_anew() -> None:
    end = int(tokenizer().eos_token_id)
    refusing = replace(SOUND, options={"fault": _abort_under_a_grammar})
    one, other = (
        Target(wire, "http://scripted", tokenizer(), transport=plant(defect, wire, tokenizer(), end, greedily=True))
        for wire, defect in (("vllm", SOUND), ("sglang", refusing))
    )
    moves = [m.Stream(), m.Ask(), m.Call(calls=("{}",)), m.Force(), m.Shape(), m.Ask(text="And now?")]
    outcome = suite.replay(one, PROFILES["quick"], moves, against=other)
    assert outcome.sound, (str(outcome.broken), outcome.error)
    assert outcome.tally.not_applicable["ledgers"] == {GRAMMAR_REFUSED: 3}
    for check in ("calls", "forced", "shaped"):
        assert any(REFUSED in reason for reason in outcome.tally.not_applicable[check])
    assert outcome.tally.turns == 10
