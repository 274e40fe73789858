"""Recipes of strands-sglang, strands-vllm and strands-env with the import changed, on real engines.

Their READMEs' code for slime comes from their source distributions. slime itself is in no package registry: its
`Sample` is an object with the recorded fields.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import importlib
import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from strands import Agent
from strands.types.exceptions import MaxTokensReachedException

import tito_engines as engines
import tito_sglang
from calculator import calculator
from support.real import Served, serve
from support.reference import reference
from support.scripted import tokenizer
from support.slime_facts import PARAMETERS, Recorded, arguments
from tito_core.backend import create_backend
from tito_core.backend.generate import score
from tito_core.ledger import check_ledger
from tito_engines import install, models
from tito_sglang import SGLangModel
from tito_vllm import VLLMModel, VLLMTokenRecorder

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tools"))
TUNING = ROOT / "tests" / "support" / "tuning_script.py"
README = {"sglang": ("strands-sglang", "0.2.7"), "vllm": ("strands-vllm", "0.0.6")}


@pytest.fixture
def slime(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of slime that the recipes import."""
    state = SimpleNamespace(GenerateState=lambda args: SimpleNamespace(tokenizer=tokenizer(args.model)))
    for name, module in (("rollout.sglang_rollout", state), ("utils.types", SimpleNamespace(Sample=Recorded))):
        monkeypatch.setitem(sys.modules, f"slime.{name}", module)


def recipe_of(kind: str, **changes: str) -> Any:
    """Return `generate` of a README with the import, and other parts of its text, changed."""
    from peers_tests import source_of  # type: ignore[import-not-found]

    page = (source_of(*README[kind]) / "README.md").read_text(encoding="utf-8")
    (code,) = (code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "slime" in code)
    replaced = {f"strands_{kind}": f"tito_{kind}", "[execute_python_code]": "[calculator]", **changes}
    for theirs, ours in replaced.items():
        assert theirs in code, theirs
        code = code.replace(theirs, ours)
    names: dict[str, Any] = {"calculator": calculator, "logger": logging.getLogger("recipe")}
    exec(compile(code, "README.md", "exec"), names)
    names["SYSTEM_PROMPT"] = "You count. " * 30
    return names["generate"]


EXPERTS = {
    "sampling_params=sampling_params,": "sampling_params=sampling_params, return_routed_experts=True,",
    "    model.reset()\n": "    sample.metadata.update(model=model, agent=agent)\n",
}


async def test_slimes_recipe_with_routed_experts(slime: None) -> None:
    """The flat rows that the recipe decodes are those that transformers' own router computes."""
    env = {"PYTHONPATH": str(ROOT / "tests" / "support" / "unpinned")}
    with serve("sglang", "qwen3-moe-tiny", environment=env, server_args=["--enable-return-routed-experts"]) as served:
        args = arguments(served.url, "", model="qwen3-moe-tiny")
        parameters = {**PARAMETERS, "max_new_tokens": 24}
        sample: Any = await recipe_of("sglang", **EXPERTS)(args, Recorded(prompt="What is 25 * 17?"), parameters)
        model: SGLangModel = sample.metadata["model"]
        assert sample.status is Recorded.Status.COMPLETED or sample.status is Recorded.Status.TRUNCATED
        check_ledger(model.ledger)
        with contextlib.suppress(MaxTokensReachedException):  # another turn, whose rows begin at its own tokens
            await sample.metadata["agent"].invoke_async("Sure?", limits={"turns": 1})
        tokens = model.rollout.token_ids
        rows = b"".join(map(base64.b64decode, model.rollout.routed_experts))
        decoded = np.frombuffer(rows, "<i4").reshape(len(tokens) - 1, 2, 2)
        computed = reference("qwen3-moe-tiny", [tokens])["experts_0"][:-1]
        assert decoded.shape == computed.shape
        assert np.sort(decoded, -1).tolist() == np.sort(computed, -1).tolist()
        assert len(model.rollout.routed_experts) == len(model.ledger) >= 2


async def test_slimes_recipes_fill_the_sample_of_the_real_context(served: Served, slime: None, tmp_path: Path) -> None:
    tokenizer().save_pretrained(tmp_path / "smollm2")
    args = arguments(served.url, str(tmp_path / "smollm2"), model="smollm2", vllm_base_url=f"{served.url}/v1")
    changes = {"sampling_params=sampling_params,": "sampling_params=sampling_params,"}
    if served.kind == "vllm":
        changes = {
            "MAX_TOOL_ITERATIONS = ...": "MAX_TOOL_ITERATIONS = 5",
            'args.hf_checkpoint.split("/")[-1],': '"smollm2", tokenizer=args.hf_checkpoint,',
        }
    generate = recipe_of(served.kind, **changes)
    samples: list[Any] = [Recorded(prompt="What is 25 * 17?") for _ in range(2)]
    done = await asyncio.gather(*(generate(args, each, {**PARAMETERS, "max_new_tokens": 32}) for each in samples))
    for sample in done:
        start = len(sample.tokens) - sample.response_length
        assert start > 0
        mask = np.array(sample.loss_mask, bool)
        assert mask.any()
        if served.kind == "vllm":  # strands-vllm's recipe adds no logprobs
            assert set(sample.rollout_log_probs) == {None}
            continue
        scores = (await score(served.policy.backend, sample.tokens))[start:]
        found = np.array([np.nan if value is None else value for value in sample.rollout_log_probs])
        assert np.abs(found - scores)[mask].max() <= 1e-4


# strands-env, whose Environment makes an agent and reads model.rollout, on both engines.


@pytest.fixture
def strands_env(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`strands_env.core` 0.5.1 (0.7.3 needs Python 3.12) on our names."""
    from peers_tests import source_of

    monkeypatch.syspath_prepend(str(source_of("strands-env", "0.5.1") / "src"))
    monkeypatch.setitem(sys.modules, "strands_sglang", tito_sglang)
    monkeypatch.setitem(sys.modules, "strands_sglang.tool_parsers", importlib.import_module("tito_sglang.tool_parsers"))
    yield importlib.import_module("strands_env.core")
    for name in [name for name in sys.modules if name.partition(".")[0] == "strands_env"]:
        del sys.modules[name]


async def test_strands_env_runs_on_both_engines(served: Served, strands_env: Any) -> None:
    def factory() -> Any:
        params = {"temperature": 1.0, "max_new_tokens": 64}
        if served.kind == "vllm":
            url = f"{served.url}/v1"
            return VLLMModel(base_url=url, model_id="smollm2", tokenizer=tokenizer(), params=params)
        return SGLangModel(tokenizer(), base_url=served.url, tool_parser="hermes", sampling_params=params)

    class Calculating(strands_env.Environment):  # type: ignore[misc]
        def get_tools(self) -> list[Any]:
            return [calculator]

    class Length(strands_env.RewardFunction):  # type: ignore[misc]
        async def compute(self, task: Any, result: Any) -> Any:
            return strands_env.RewardResult(reward=float(len(result.rollout.token_ids)))

    env = Calculating(model_factory=factory, reward_fn=Length(), max_tool_iters=2)
    tasks = [strands_env.Task(message="What is 25 * 17?") for _ in range(4)]
    results = await asyncio.gather(*(env.rollout(task) for task in tasks))
    reasons = {result.termination_reason.value for result in results}
    assert reasons <= {"task_complete", "max_tool_iterations_reached", "max_tokens_reached"}, reasons
    for result in results:
        rollout = result.rollout
        assert isinstance(rollout, tito_sglang.Rollout)
        assert result.reward_result.reward == len(rollout.token_ids)
        assert result.metrics["model_calls"] >= 1
        mask = np.array(rollout.loss_mask, bool)
        found = np.array([np.nan if value is None else value for value in rollout.logprobs])
        assert np.abs(found - await score(served.policy.backend, rollout.token_ids))[mask].max() <= 1e-4


# The agent-tuning guide of strands-vllm: collect, reward, update, evaluate.


async def test_the_agent_tuning_guides_loop(tmp_path: Path) -> None:
    python = install.ensure(engines.find("vllm")).python
    weights = models.ensure("qwen3-tiny", python)
    loaded = tokenizer("qwen3-tiny")
    with engines.running_sync("vllm", model="qwen3-tiny", dev_mode=True) as url:
        backend: Any = create_backend("vllm", url, timeout_s=300)
        versions: list[str | None] = []

        async def collect_rollout(problem: dict[str, Any]) -> dict[str, Any]:
            model = VLLMModel(
                base_url=f"{url}/v1",
                model_id="qwen3-tiny",
                tokenizer=loaded,
                return_token_ids=True,
                params={"max_tokens": 24},
            )
            recorder = VLLMTokenRecorder()
            agent = Agent(model=model, system_prompt="Solve math problems.", callback_handler=recorder)
            with contextlib.suppress(MaxTokensReachedException):
                await agent.invoke_async(problem["question"])
            check_ledger(model.ledger)
            versions.append(model.ledger[0].draft.engine.versions[0].version)
            answer = recorder.token_ids or []
            return {
                "prompt_token_ids": recorder.prompt_token_ids,
                "response_token_ids": answer,
                "reward": float(sum(answer) % 2 == problem["expected"]),
            }

        async def likelihood(rollouts: list[dict[str, Any]]) -> float:
            """The mean logprob of rewarded answers, as the server scores them."""
            found = []
            for rollout in rollouts:
                prompt, answer = rollout["prompt_token_ids"], rollout["response_token_ids"]
                found.append((await score(backend, [*prompt, *answer]))[len(prompt) :].mean())
            return float(np.mean(found))

        problems = [{"question": f"What is {number} + 1?", "expected": number % 2} for number in range(8)]
        collected = await asyncio.gather(*(collect_rollout(problem) for problem in problems))
        rewarded = [rollout for rollout in collected if rollout["reward"] > 0]
        assert rewarded, "half of the answers have the expected parity"
        before = await likelihood(rewarded)

        given, tuned = tmp_path / "rollouts.json", tmp_path / "tuned"
        pairs = [[rollout["prompt_token_ids"], rollout["response_token_ids"]] for rollout in rewarded]
        given.write_text(json.dumps(pairs))
        command: list[Any] = [python, TUNING, weights, given, tuned]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        await backend.load_weights(str(tuned), "step-1")

        assert await likelihood(rewarded) > before + 0.01
        assert set(versions) == {"default"}
        await asyncio.gather(*(collect_rollout(problem) for problem in problems))
        assert set(versions[len(problems) :]) == {"step-1"}, "evaluated on the new weights"
