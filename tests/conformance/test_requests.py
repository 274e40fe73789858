"""The number of requests that a run announces holds, and progress counts them from the first one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from conformance.defects.column_views import EXPERTS
from conformance.defects.defect import SERVERS, SOUND, plant
from conformance.defects.trial import FOLDERS
from support.scripted import tokenizer
from tito_conformance import suite
from tito_conformance.checks import PROFILES
from tito_conformance.target import Target
from tito_core.backend.http.client import HttpResponse, HttpTransport

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


@pytest.mark.suite
@pytest.mark.parametrize("wire", SERVERS)
def test_no_more_requests_are_sent_than_announced(wire: str) -> None:
    weights = FOLDERS if wire == "sglang" else ()
    end = int(tokenizer().eos_token_id)
    make, sent, shown = plant(SOUND, wire, tokenizer(), end), list[str](), list[tuple[int, int]]()
    target = Target(
        "sglang" if wire == "sglang" else "vllm",
        "http://scripted",
        tokenizer(),
        transport=lambda: Counting(make(), sent),
        experts=EXPERTS,
        weights=weights,
    )
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
