"""The kit that judges gateways: a sound one passes every check, and each planted defect is caught."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from aiohttp import web

from gateway.toy import DEFECTS, Toy
from tito_conformance.gateway.adapter import HttpGateway
from tito_conformance.gateway.checks import CHECKS
from tito_conformance.gateway.engine import load
from tito_conformance.gateway.run import FAILED, Report, run
from tito_engines.models import qwen3_instruct


@cache
def tokenizer() -> Path:
    return qwen3_instruct.tokenizer(lambda line: None)


class ToyGateway(HttpGateway):
    """The toy in this process, addressed and exported as a gateway that runs already."""

    def __init__(self, defect: str = "") -> None:
        super().__init__("http://unknown")
        self.defect = defect

    async def start(self, engine: str, wire: str, tokenizer: str, model: str) -> None:
        toy = Toy(engine, load(tokenizer), self.defect)
        self._runner = web.AppRunner(toy.app(), handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self._url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        await super().start(engine, wire, tokenizer, model)

    async def stop(self) -> None:
        await self._runner.cleanup()


def judged(defect: str = "", seed: int = 0, checks: Sequence[str] = ()) -> Report:
    return asyncio.run(run(ToyGateway(defect), str(tokenizer()), wire="vllm", seed=seed, checks=checks))


def failures(report: Report) -> dict[str, str]:
    return {verdict.name: verdict.detail for verdict in report.verdicts if verdict.result == FAILED}


def test_a_sound_gateway_passes_every_check() -> None:
    report = judged()
    assert not failures(report)
    assert {verdict.result for verdict in report.verdicts} == {"passed"}


@pytest.mark.suite
@pytest.mark.parametrize("seed", range(1, 31))
def test_a_sound_gateway_raises_no_alarm(seed: int) -> None:
    assert not failures(judged(seed=seed))


@pytest.mark.suite
@pytest.mark.parametrize("defect", DEFECTS)
def test_every_defect_is_caught(defect: str) -> None:
    assert failures(judged(defect, checks=[DEFECTS[defect]]))


def test_every_check_catches_a_defect() -> None:
    assert {*CHECKS} - {*DEFECTS.values()} == set()
