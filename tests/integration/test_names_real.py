"""The two other providers' own quick starts, from their source distributions, with the import changed, on real engines.

What else is changed is where the server is, and the model: its name, its tokenizer, and its format of calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from strands import Agent
from strands.types.exceptions import ContextWindowOverflowException, MaxTokensReachedException

from calculator import evaluate, make_agent
from support.real import Served, serve
from support.scripted import tokenizer
from tito_core.dropin.late_model import LateModel
from tito_core.ledger import check_ledger
from tito_core.verify import rescore
from tito_sglang import SGLangClient, SGLangModel
from tito_vllm import VLLMModel, VLLMTokenRecorder

pytestmark = pytest.mark.engine
sys.path.append(str(Path(__file__).parents[2] / "tools"))


@pytest.fixture(scope="module")
def vllm() -> Iterator[Served]:
    with serve("vllm") as server:
        yield server


@pytest.fixture(scope="module")
def sglang() -> Iterator[Served]:
    with serve("sglang") as server:
        yield server


def quick_start(project: str, version: str, number: int, changes: dict[str, str]) -> str:
    """Give one of the Python snippets of a peer's README, with changes that are all found in it."""
    from peers_tests import SUITES, fetched  # type: ignore[import-not-found]

    (suite,) = (suite for suite in SUITES if (suite.project, suite.version) == (project, version))
    page = (fetched(suite) / "README.md").read_text(encoding="utf-8").split("Quick Start", 1)[1]
    code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[number]
    for theirs, ours in changes.items():
        assert theirs in code, theirs
        code = code.replace(theirs, ours)
    return str(code)


def run(code: str) -> dict[str, Any]:
    """Run a snippet, and give the names in it; those of its `main`, too, which is where one snippet has its model."""
    names: dict[str, Any] = {"eval": evaluate}  # a tool of theirs evaluates whatever the policy writes
    held: list[LateModel] = []
    began = LateModel.__init__

    def remember(self: LateModel, *args: Any) -> None:
        held.append(self)
        began(self, *args)

    LateModel.__init__ = remember  # type: ignore[method-assign]
    try:
        with contextlib.suppress(MaxTokensReachedException, ContextWindowOverflowException):  # the policy is tiny
            exec(compile(code, "README.md", "exec"), names)
    finally:
        LateModel.__init__ = began  # type: ignore[method-assign]
    return {**names, "model": held[-1]}


async def confirmed(model: LateModel, served: Served) -> int:
    """The laws hold, the lists are the trajectory's, and the server scores the sampled tokens as recorded."""
    check_ledger(model.ledger)
    trajectory = model.trajectory
    assert model.rollout.token_ids == trajectory.token_ids.tolist()
    assert model.rollout.loss_mask == trajectory.loss_mask.tolist()
    rescored = await rescore(model.ledger, served.policy.backend)
    assert len(rescored.differences) == int(trajectory.loss_mask.sum())
    assert rescored.quantile(1) <= 1e-4
    return len(rescored.differences)


@pytest.fixture
def at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The served model's tokenizer under its served name, as a folder here."""
    tokenizer().save_pretrained(tmp_path / "smollm2")
    monkeypatch.chdir(tmp_path)
    return "smollm2"


@pytest.mark.parametrize("version", ["0.6.2", "0.4.3"])
def test_strands_sglangs_quick_start(version: str, sglang: Served, at_hand: str) -> None:
    changes = {
        "strands_sglang": "tito_sglang",
        "http://localhost:30000": sglang.url,
        "Qwen/Qwen3.5-4B": at_hand,
        "qwen_xml": "hermes",
    }
    model = run(quick_start("strands-sglang", version, 0, changes))["model"]
    assert isinstance(model, SGLangModel)
    assert len(model.ledger) >= 1
    assert None not in model.rollout.logprobs[1:]
    print(f"\nstrands-sglang {version}: {asyncio.run(confirmed(model, sglang))} tokens re-scored")


@pytest.mark.parametrize("number", [0, 1])
def test_strands_vllms_quick_starts(number: int, vllm: Served, at_hand: str) -> None:
    assert vllm.policy.info.model == at_hand
    changes = {
        "strands_vllm": "tito_vllm",
        "http://localhost:8000": vllm.url,
        "AMead10/Llama-3.2-3B-Instruct-AWQ": at_hand,
    }
    names = run(quick_start("strands-vllm", "0.0.6", number, changes))
    model = names["model"]
    assert isinstance(model, VLLMModel)
    if number == 1:
        recorder = names["recorder"]
        assert isinstance(recorder, VLLMTokenRecorder)
        assert recorder.prompt_token_ids + recorder.token_ids == model.trajectory.token_ids.tolist()
    print(f"\nstrands-vllm: {asyncio.run(confirmed(model, vllm))} tokens re-scored")


async def rolled_out(model: LateModel, **options: Any) -> Agent:
    agent = make_agent(model)
    agent.callback_handler = options.get("recorder", agent.callback_handler)
    await agent.invoke_async("What is 25 * 17?", limits={"turns": 3})
    return agent


async def test_a_recorded_prompt_extends_the_one_before_on_a_real_vllm(vllm: Served) -> None:
    """Of strands-vllm it does not: the server renders and tokenizes the history anew."""
    recorder = VLLMTokenRecorder()
    params = {"temperature": 0.0, "max_tokens": 96}
    model = VLLMModel(
        base_url=f"{vllm.url}/v1", model_id="smollm2", tokenizer=tokenizer(), params=params, return_token_ids=True
    )
    await rolled_out(model, recorder=recorder)
    assert len(recorder.history) >= 2
    for one, after in zip(recorder.history, recorder.history[1:], strict=False):
        whole = (one["prompt_token_ids"] or []) + (one["token_ids"] or [])
        assert (after["prompt_token_ids"] or [])[: len(whole)] == whole
    await confirmed(model, vllm)


async def test_prompts_are_scored_by_a_real_sglang_as_it_scores_them_whole(sglang: Served) -> None:
    params = {"temperature": 1.0, "max_new_tokens": 96}
    async with SGLangClient(sglang.url) as client:
        model = SGLangModel(client=client, tokenizer=tokenizer(), tool_parser="hermes", sampling_params=params)
        await rolled_out(model)
        await confirmed(model, sglang)
        whole = await sglang.policy.backend.score(model.rollout.token_ids)
        told = np.array([np.nan if value is None else value for value in model.rollout.logprobs])
        assert np.nanmax(np.abs(told - whole)) <= 1e-3
        assert np.isnan(told).sum() == 1
        assert await client.health()
        assert (await client.max_model_len() or 0) >= 1024
        assert not await client.is_multimodal()
