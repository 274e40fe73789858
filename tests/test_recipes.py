"""What a recipe needs without its trainer: pins, scripts, targets of its YAML, its agent and its reward.

`make recipes` runs each recipe's `--tiny` mode with the trainer.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from tools import matrix

from strands_tito.export import samples_of
from strands_tito.integrations.run_rollout import load_function, run_rollout
from support.scripted import Says, call, model_of
from tito_core.ledger import check_ledger
from tito_core.termination import Termination

RECIPES = Path(__file__).parents[1] / "recipes"
LOCKS = {"slime_retool": "slime", "verl_agent_loop": "verl-0.9.1", "trl_lora": "trl-1.16.0"}
ONLY_ON_A_GPU = {"vllm": "0.30.0"}
"""What no lock of a trainer has."""
ROW = {"reward_model": {"ground_truth": "425"}}
QUESTION = [{"role": "user", "content": "What is 25 * 17?"}]


@pytest.fixture
def agent_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that imports a module of a recipe."""

    def load(recipe: str, module: str) -> Any:
        monkeypatch.syspath_prepend(RECIPES / recipe)
        return importlib.import_module(module)

    return load


def test_there_is_a_lock_for_each_recipe_and_a_row_for_each_in_the_table() -> None:
    assert {path.parent.name for path in RECIPES.glob("*/README.md")} == set(LOCKS)
    rows = re.findall(r"^\| \[(\w+)\]\(\1/README\.md\)", (RECIPES / "README.md").read_text("utf-8"), re.MULTILINE)
    assert rows == list(LOCKS)


@pytest.mark.parametrize("recipe", LOCKS)
def test_every_pin_is_the_locks(recipe: str) -> None:
    (file,) = [*(RECIPES / recipe).glob("requirements.txt"), *(RECIPES / recipe).glob("REQUIRED_VERL.txt")]
    pins = re.findall(r"\b([\w-]+)(?:\[\w+\])?==([\w.]+)", file.read_text("utf-8"))
    assert pins
    locked = {**matrix.pins(LOCKS[recipe]), **ONLY_ON_A_GPU}
    assert {name: locked.get(name) for name, _ in pins} == dict(pins)


@pytest.mark.parametrize("script", sorted(RECIPES.glob("**/*.sh")), ids=str)
def test_a_script_is_bash(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True, timeout=10)
    assert script.stat().st_mode & 0o111


def test_what_the_yaml_files_name_exists(agent_of: Any) -> None:
    slime = yaml.safe_load((RECIPES / "slime_retool/tito.yaml").read_text("utf-8"))
    (verl,) = yaml.safe_load((RECIPES / "verl_agent_loop/agent_loop.yaml").read_text("utf-8"))
    assert agent_of("slime_retool", "retool_agent").make_agent is load_function(slime["tito_agent"])
    assert agent_of("verl_agent_loop", "gsm8k_agent").make_agent is load_function(verl["agent"])
    module, _, name = verl["_target_"].rpartition(".")
    spec = importlib.util.find_spec(module)  # it imports verl
    assert spec is not None
    assert f"class {name}(" in Path(spec.origin or "").read_text("utf-8")


CODE = call("run_python", '{"code": "print(25 * 17)"}')
SUM = call("calculate", '{"expression": "25 * 17"}')
ROLLOUTS = [
    ("slime_retool", "retool_agent", SimpleNamespace(label="425"), (CODE, r"It is \boxed{425}."), 1.0),
    ("slime_retool", "retool_agent", SimpleNamespace(label="425"), (CODE, r"It is \boxed{426}."), -1.05),
    ("slime_retool", "retool_agent", SimpleNamespace(label="425"), ("It is 425, I think",), -1.1),
    ("slime_retool", "retool_agent", SimpleNamespace(label="425"), (CODE,), -0.7),
    ("verl_agent_loop", "gsm8k_agent", ROW, (SUM, "It is\n#### 425"), 1.0),
    ("verl_agent_loop", "gsm8k_agent", ROW, (SUM, "#### 17, no: #### 4,250"), 0.0),
    ("verl_agent_loop", "gsm8k_agent", ROW, (SUM,), 0.0),
]


@pytest.mark.parametrize(("recipe", "module", "row", "answers", "reward"), ROLLOUTS)
async def test_an_agent_scores_its_rollout(
    recipe: str, module: str, row: Any, answers: tuple[str, ...], reward: float, agent_of: Any
) -> None:
    model = model_of("sglang", Says(*answers))
    agent = agent_of(recipe, module).make_agent(model, row)
    result = await run_rollout(agent, model, QUESTION)
    check_ledger(model.ledger)
    (sample,) = samples_of(model.ledger)
    assert sample.reward == pytest.approx(reward)
    assert result.termination is (Termination.LIMIT if answers[-1] in (CODE, SUM) else Termination.COMPLETED)


async def test_the_pipelines_agent_records_both_scores(agent_of: Any) -> None:
    task = agent_of("trl_lora", "calculator_agent")
    found = task.problems(40, 3)
    assert [*found.items()] == [*task.problems(50, 3).items()][:40]
    assert all(eval(question.removeprefix("What is ").rstrip("?")) == answer for question, answer in found.items())
    agents = task.Agents({"What is 25 * 17?": 425}, operations=1)
    calculated = call("calculator", '{"expression": "25 * 17"}')
    for answers, scores in (
        ((calculated, "It is 425."), (1.0, 0.5)),
        (("It is 425.",), (1.0, 0.0)),
        ((calculated,), (0.0, 0.5)),
    ):
        model = model_of("vllm", Says(*answers))
        await run_rollout(agents.make(model, QUESTION), model, QUESTION)
        assert (model.ledger.annotation("reward"), model.ledger.annotation("tool_use")) == scores
        assert agents.tool_use_reward([model.ledger.uuid]) == [scores[1]]


VLLM = """#!{python}
import http.server, sys
class Empty(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Empty).serve_forever()
"""
"""Its /health is 200 without a body, as vLLM's."""


def test_the_gpus_script_sees_that_its_server_is_up(
    agent_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(RECIPES.parent / "examples")
    gpu = agent_of(".", "gpu")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "vllm").write_text(VLLM.format(python=sys.executable))
    (tmp_path / "vllm").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda model: str(tmp_path / model))
    with gpu.on_gpu("policy", port) as served:
        assert served == (f"http://127.0.0.1:{port}", str(tmp_path / "policy"))
    (tmp_path / "vllm").write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(RuntimeError, match="status 3"), gpu.on_gpu("policy", port):
        pass


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("print(6 * 7)", "42"),
        ("x = 1", "The code printed nothing."),
        ("1 / 0", "ZeroDivisionError"),
        ("import os; os.write(os.memfd_create('file'), b'x')", "File too large"),
        ("print('x' * 10**5)", "(the rest is cut)"),
        ("import os; print(len(os.environ) < 6)", "True"),
    ],
)
async def test_code_runs_within_its_limits(code: str, printed: str, agent_of: Any) -> None:
    assert printed in await agent_of("slime_retool", "retool_agent").run_code(code)


async def test_code_that_does_not_end_is_ended(agent_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    retool = agent_of("slime_retool", "retool_agent")
    monkeypatch.setattr(retool, "SECONDS", 0.5)
    assert "did not end" in await retool.run_code("import time; time.sleep(60)")


@pytest.mark.parametrize("expression", ["9**9", "9* *9", "x", "(1).__class__", "1 / 0", "1" * 101])
def test_the_calculator_refuses_what_is_not_arithmetic(expression: str, agent_of: Any) -> None:
    with pytest.raises((ValueError, ZeroDivisionError)):
        agent_of("verl_agent_loop", "gsm8k_agent").calculate(expression)
