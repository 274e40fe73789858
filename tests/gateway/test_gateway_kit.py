"""The kit that judges gateways: a sound one passes every check, and each planted defect is caught."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from aiohttp import web
from typer.testing import CliRunner, Result

from gateway.toy import DEFECTS, Toy
from gateway.toy_wires import WIRE_DEFECTS
from strands_tito import cli
from strands_tito.gateway import Gateway
from support.pages import ROOT
from tito_conformance.gateway.adapter import ADAPTERS, HttpGateway
from tito_conformance.gateway.audit import Row, trained_once
from tito_conformance.gateway.checks import CHECKS, Verdict
from tito_conformance.gateway.dialects import DIALECTS
from tito_conformance.gateway.engine import Call, Engine, load
from tito_conformance.gateway.run import FAILED, Report, run
from tito_conformance.testing import ScriptedRequest
from tito_core import Policy
from tito_engines.models import qwen3_instruct

HERE = Path(__file__).parent
ABSENT = {
    *(("messages", defect) for defect in ("arguments as text", "arguments cut")),
    *((wire, defect) for wire in ("messages", "responses") for defect in ("seed dropped", "n ignored")),
    *(("responses", defect) for defect in ("stop dropped silently", "stream says stop")),
}
"""Defects in what a wire does not have; a response does not say that it ends in calls."""
PLANTED = [
    *((wire, defect, check) for wire in DIALECTS for defect, check in DEFECTS.items() if (wire, defect) not in ABSENT),
    *((wire, defect, check) for (wire, defect), check in WIRE_DEFECTS.items()),
]


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


def judged(defect: str = "", speaks: str = "chat", seed: int = 0, checks: Sequence[str] = ()) -> Report:
    gateway = ToyGateway(defect)
    return asyncio.run(run(gateway, str(tokenizer()), wire="vllm", speaks=speaks, seed=seed, checks=checks))


def failures(report: Report) -> dict[str, str]:
    return {verdict.name: verdict.detail for verdict in report.verdicts if verdict.result == FAILED}


@pytest.mark.parametrize(
    ("speaks", "lacking"),
    [
        ("chat", set()),
        ("messages", {"prefix_under_other_json_spacing", "several_choices"}),
        ("responses", {"several_choices"}),
    ],
)
def test_a_sound_gateway_passes_every_check_that_its_wire_has(speaks: str, lacking: set[str]) -> None:
    report = judged(speaks=speaks)
    assert not failures(report)
    assert {verdict.name for verdict in report.verdicts if verdict.result != "passed"} == lacking


@pytest.mark.suite
@pytest.mark.parametrize("speaks", DIALECTS)
@pytest.mark.parametrize("seed", range(1, 11))
def test_a_sound_gateway_raises_no_alarm(seed: int, speaks: str) -> None:
    assert not failures(judged(speaks=speaks, seed=seed))


@pytest.mark.suite
@pytest.mark.parametrize(("speaks", "defect", "check"), PLANTED)
def test_every_defect_is_caught(speaks: str, defect: str, check: str) -> None:
    assert failures(judged(defect, speaks, checks=[check]))


class OwnGateway(HttpGateway):
    """Our own gateway in this process, addressed and exported as a gateway that runs already."""

    def __init__(self) -> None:
        super().__init__("http://unknown")
        self._open = AsyncExitStack()

    async def start(self, engine: str, wire: str, tokenizer: str, model: str) -> None:
        policy = await Policy.connect_async(backend=wire, base_url=engine, tokenizer=tokenizer)
        gateway = await self._open.enter_async_context(Gateway(await self._open.enter_async_context(policy)))
        self._url = gateway.url

    async def stop(self) -> None:
        await self._open.aclose()


@pytest.mark.suite
@pytest.mark.parametrize("seed", range(1, 31))
def test_our_own_gateway_raises_no_alarm(seed: int) -> None:
    wire, speaks = ("vllm", "sglang")[seed % 2], [*DIALECTS][seed % 3]
    report = asyncio.run(run(OwnGateway(), str(tokenizer()), wire=wire, speaks=speaks, seed=seed))
    assert not failures(report)


def test_every_check_catches_a_defect() -> None:
    assert {*CHECKS} - {*DEFECTS.values()} == set()


# The command


def command(*options: str) -> Result:
    cli.add_commands()
    return CliRunner().invoke(cli.app, ["conformance", *options])


@pytest.mark.suite
def test_the_command_runs_an_adapters_file_in_a_process_of_its_own(tmp_path: Path) -> None:
    chosen = ["--check", "prefix", "--check", "usage", "--report", str(tmp_path)]
    result = command("--gateway", str(HERE / "toy_adapter.py"), *chosen)
    assert result.exit_code == 0, result.output
    assert "2 passed, 0 failed" in result.output
    result = command("--gateway", f"{HERE / 'toy_adapter.py'}:usage missing", *chosen)
    assert result.exit_code == 1, result.output
    report = json.loads((tmp_path / "toy-usage missing-vllm.json").read_text())
    assert {each["name"]: each["result"] for each in report["checks"]} == {"prefix": "passed", "usage": "failed"}
    assert report["gateway"]["note"] == "has no usage"


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        (["--gateway", "none-such"], 4, "Available: agentcore-rl-toolkit,"),
        (["--gateway", "rllm-model-gateway"], 4, "Make an environment with Python 3.10 and later, run `pip install"),
        (["--gateway", "rllm-model-gateway", "--python", "/none"], 4, "cannot run /none"),
        (["--gateway", str(HERE / "toy_adapter.py"), "--speaks", "messages"], 4, "toy speaks chat, not 'messages'"),
        (["--gateway", "x", "--speaks", "none"], 2, "Available: chat, messages, responses"),
        (["--gateway", "x", "--check", "none"], 2, "Unknown check 'none'"),
        (["--gateway", "http://127.0.0.1:9"], 2, "needs --engine-port and --wire"),
        ([], 2, "Missing option '--backend'"),
    ],
)
def test_the_command_says_what_is_wrong(options: list[str], status: int, words: str) -> None:
    result = command(*options)
    assert result.exit_code == status
    assert words in " ".join(re.sub("[│╭╮╰╯─]", " ", result.output).split())


# The judge


class Toolless(ToyGateway):
    """A gateway whose adapter declares that nothing is its own."""

    def __init__(self, defect: str) -> None:
        super().__init__(defect)
        self.facts = replace(self.facts, token_in=False, renders="engine", aborts=False, streams=False)


@pytest.mark.parametrize(
    ("defect", "check"),
    [
        ("render again", "prefix"),
        ("content as control", "control_words_stay_text"),
        ("abandoned is kept", "disconnect"),
    ],
)
def test_what_a_gateway_does_not_claim_is_measured_and_not_held_against_it(defect: str, check: str) -> None:
    [verdict] = asyncio.run(run(Toolless(defect), str(tokenizer()), wire="vllm", checks=[check])).verdicts
    assert verdict.result == "not applicable"
    assert "measured: " in verdict.detail


def test_a_check_that_needs_what_a_gateway_lacks_says_so() -> None:
    [verdict] = asyncio.run(run(Toolless(""), str(tokenizer()), wire="vllm", checks=["stream_equals_plain"])).verdicts
    assert verdict == Verdict("stream_equals_plain", "not applicable", "the gateway has no streams here")


@pytest.mark.parametrize("wire", ["vllm", "sglang"])
def test_samples_are_not_what_encoding_their_text_gives(wire: str) -> None:
    engine = Engine(wire, str(tokenizer()), seed=1)
    encode, decode = engine.tokenizer.encode, engine.tokenizer.decode
    for number, kind in enumerate(("text", "call", "calls", "canonical", "text")):
        prompt = tuple(encode(f"nonce-1 with:{kind}"))
        answer = engine.scripted.script(ScriptedRequest(prompt, number=number))
        assert (encode(decode(answer.output_ids)) == list(answer.output_ids)) == (kind == "canonical")
        assert answer.logprobs is not None
        assert len({*answer.logprobs}) == len(answer.output_ids)


def test_one_token_is_answered_though_it_cannot_be_cut_otherwise() -> None:
    engine = Engine("sglang", str(tokenizer()), seed=1)
    assert engine.scripted.script(ScriptedRequest((1, 2), max_new_tokens=1)).output_ids


def test_the_page_shows_an_adapter_as_it_is() -> None:
    page = (ROOT / "docs/gateways.md").read_text()
    assert f"```python\n{(ADAPTERS / 'rllm_model_gateway.py').read_text()}```" in page
    assert all(path.stem.replace("_", "-") in page for path in ADAPTERS.glob("*.py"))


def test_a_sampled_token_counts_once_where_one_row_trains_it_with_its_logprob() -> None:
    first, second = Call(0, [1, 2], [3, 4], [-0.5, -0.25], {}), Call(1, [1, 2, 3, 4, 5], [6], [-1.0], {})
    path = Row([1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 0, 1], [None, None, -0.5, -0.25, None, -1.0])
    assert trained_once([path], [first, second]) == 3
    again = Row(path.ids[:4], path.mask[:4], path.logprobs[:4])
    assert trained_once([path, again], [first, second]) == 1  # the first answer twice
    assert trained_once([again], [first, second]) == 2  # the second one nowhere
    assert trained_once([replace(path, logprobs=[None, None, -0.5, -0.5, None, None])], [first, second]) == 1
    assert trained_once([replace(path, ids=[1, 2, 3, 9, 5, 6])], [first, second]) == 0


async def test_an_export_that_cannot_be_read_is_a_failed_check() -> None:
    class Unreadable(ToyGateway):
        async def export(self, name: str) -> list[Row]:
            return [Row.of({"ids": [1]})]

    [verdict] = (await run(Unreadable(), str(tokenizer()), wire="vllm", checks=["alignment"])).verdicts
    assert verdict == Verdict("alignment", "failed", "the export cannot be read: KeyError('mask')")
