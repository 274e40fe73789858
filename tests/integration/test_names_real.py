"""The quick starts of strands-sglang and strands-vllm with the import changed, on real engines.

The code comes from their source distributions. The server's address, the model's name, its tokenizer and its format of
calls are changed, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from strands.types.exceptions import ContextWindowOverflowException, MaxTokensReachedException

from calculator import calculator, evaluate, make_agent
from strands_tito.inspect.verify import rescore
from support.real import Served
from support.scripted import tokenizer
from tito_compat.model import LazyModel
from tito_core.backend.generate import score
from tito_core.ledger import check_ledger
from tito_sglang import SGLangClient, SGLangModel
from tito_vllm import VLLMModel, VLLMTokenRecorder

pytestmark = [pytest.mark.engine, pytest.mark.long]
sys.path.append(str(Path(__file__).parents[2] / "tools"))


def quick_start(project: str, version: str, number: int, changes: dict[str, str]) -> str:
    """Return a Python snippet of a peer's README with replacements, each of which must occur in it."""
    from peers_tests import source_of  # type: ignore[import-not-found]

    page = (source_of(project, version) / "README.md").read_text(encoding="utf-8").split("Quick Start", 1)[1]
    code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[number]
    for theirs, ours in changes.items():
        assert theirs in code, theirs
        code = code.replace(theirs, ours)
    return str(code)


def run(code: str) -> dict[str, Any]:
    """Run a snippet; return its names and the model that it made."""
    names: dict[str, Any] = {"eval": evaluate}  # the snippet's tool evaluates text of the policy
    models: list[LazyModel] = []
    init = LazyModel.__init__

    def record_and_init(self: LazyModel, *args: Any) -> None:
        models.append(self)
        init(self, *args)

    LazyModel.__init__ = record_and_init  # type: ignore[method-assign]
    try:
        with contextlib.suppress(MaxTokensReachedException, ContextWindowOverflowException):  # the policy is tiny
            exec(compile(code, "README.md", "exec"), names)
    finally:
        LazyModel.__init__ = init  # type: ignore[method-assign]
    return {**names, "model": models[-1]}


async def confirmed(model: LazyModel, served: Served) -> int:
    """Check the laws, the rollout's lists, and that re-scoring confirms the sampled tokens."""
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
    """A folder with the tokenizer under the served model's name, and a module with the calculator that they import."""
    monkeypatch.setitem(sys.modules, "strands_tools", SimpleNamespace(calculator=calculator))
    tokenizer().save_pretrained(tmp_path / "smollm2")
    monkeypatch.chdir(tmp_path)
    return "smollm2"


QUICK_STARTS = {
    "sglang": [("strands-sglang", "0.6.2", 0), ("strands-sglang", "0.4.3", 0), ("strands-sglang", "0.0.3", 0)],
    "vllm": [("strands-vllm", "0.0.6", 0), ("strands-vllm", "0.0.6", 1), ("strands-vllm", "0.0.6", 3)],
}


def changes_for(served: Served, model: str, version: str, snippet: int) -> dict[str, str]:
    if version == "0.0.3":  # SGLangModel(tokenizer=tokenizer, base_url=...)
        return {
            "strands_sglang": "tito_sglang",
            "http://localhost:30000": served.url,
            "Qwen/Qwen3-4B-Instruct-2507": model,
        }
    if served.kind == "sglang":
        return {
            "strands_sglang": "tito_sglang",
            "http://localhost:30000": served.url,
            "Qwen/Qwen3.5-4B": model,
            "qwen_xml": "hermes",
        }
    if snippet == 3:  # with VLLMToolValidationHooks
        return {
            "strands_vllm": "tito_vllm",
            "http://localhost:8000": served.url,
            'model_id="..."': f'model_id="{model}"',
            "strands_tools.calculator": "strands_tools",
        }
    return {
        "strands_vllm": "tito_vllm",
        "http://localhost:8000": served.url,
        "AMead10/Llama-3.2-3B-Instruct-AWQ": model,
    }


@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_other_providers_quick_start_runs_with_the_import_changed(
    number: int, served: Served, at_hand: str
) -> None:
    assert served.policy.info.model == at_hand
    project, version, snippet = QUICK_STARTS[served.kind][number]
    names = run(quick_start(project, version, snippet, changes_for(served, at_hand, version, snippet)))
    model = names["model"]
    assert isinstance(model, SGLangModel if served.kind == "sglang" else VLLMModel)
    assert len(model.ledger) >= 1
    recorder = names.get("recorder")
    if recorder is not None:
        assert isinstance(recorder, VLLMTokenRecorder)
        recorded = (recorder.prompt_token_ids or []) + (recorder.token_ids or [])
        assert recorded == model.trajectory.token_ids.tolist()
    assert (recorder is not None) == ((served.kind, number) == ("vllm", 1))
    print(f"\n{project} {version}, snippet {snippet}: {asyncio.run(confirmed(model, served))} tokens re-scored")


def model_at(served: Served) -> LazyModel:
    if served.kind == "sglang":
        params = {"temperature": 1.0, "max_new_tokens": 96}
        client = SGLangClient(served.url)
        return SGLangModel(client=client, tokenizer=tokenizer(), tool_parser="hermes", sampling_params=params)
    params = {"temperature": 1.0, "max_tokens": 96}
    url = f"{served.url}/v1"
    return VLLMModel(base_url=url, model_id="smollm2", tokenizer=tokenizer(), params=params, return_token_ids=True)


async def test_the_lists_of_the_token_manager_after_a_reset(served: Served, at_hand: str) -> None:
    """strands-sglang's blog: a model by address, `reset` before each episode, then the lists that a trainer takes."""
    if served.kind == "sglang":
        model: LazyModel = SGLangModel(tokenizer=tokenizer(), base_url=served.url)
    else:
        model = VLLMModel(base_url=f"{served.url}/v1", model_id=at_hand, return_token_ids=True)
    agent = make_agent(model)
    lengths = []
    for question in ("What is 25 * 17?", "What is 3 + 4?"):
        model.reset()
        agent.messages.clear()
        with contextlib.suppress(MaxTokensReachedException, ContextWindowOverflowException):
            await agent.invoke_async(question, limits={"turns": 3})
        manager = model.token_manager
        token_ids, logprobs, segments = manager.token_ids, manager.logprobs, manager.segments
        assert len(token_ids) == len(manager.loss_mask) == len(logprobs) == sum(map(len, segments))
        assert [token.token_id for segment in segments for token in segment] == token_ids
        assert all(logprobs[i] is not None for i, mask in enumerate(manager.loss_mask) if mask)
        lengths.append(await confirmed(model, served))
    assert all(lengths)


async def test_each_prompt_extends_the_one_before(served: Served) -> None:
    """With strands-vllm it does not, because the server renders and tokenizes the history again."""
    model, recorder = model_at(served), VLLMTokenRecorder()
    agent = make_agent(model)
    agent.callback_handler = recorder
    with contextlib.suppress(MaxTokensReachedException):
        await agent.invoke_async("What is 25 * 17?", limits={"turns": 3})
        await agent.invoke_async("Are you sure?", limits={"turns": 2})
    await confirmed(model, served)
    assert len(recorder.history) == (len(model.ledger) if served.kind == "vllm" else 0)
    for one, after in pairwise(recorder.history):
        whole = (one["prompt_token_ids"] or []) + (one["token_ids"] or [])
        assert (after["prompt_token_ids"] or [])[: len(whole)] == whole


async def test_prompt_logprobs_are_the_engines(served: Served) -> None:
    model = model_at(served)
    with contextlib.suppress(MaxTokensReachedException):
        await make_agent(model).invoke_async("What is 25 * 17?", limits={"turns": 3})
    logprobs = np.array([np.nan if value is None else value for value in model.rollout.logprobs])
    if served.kind == "vllm":
        assert np.isnan(logprobs).tolist() == [not mask for mask in model.rollout.loss_mask]
        return
    whole = await score(served.policy.backend, model.rollout.token_ids)
    assert np.isnan(logprobs).sum() == 1
    assert np.nanmax(np.abs(logprobs - whole)) <= 1e-3
