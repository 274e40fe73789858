"""A mistyped option fails in mypy and in editors; a correct one passes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SNIPPET = """
from tito_core import Policy, TITOModel
from strands_tito.collect import InProcess
from tito_core.settings import Settings

model = TITOModel(backend="vllm", tokenizer="t", temprature=3)  # error
TITOModel(backend="vllm", tokenizer="t", verify_echo="never")  # error
TITOModel(backend="vllm", tokenizer="t", verify_echo="first", parser="hermes", timeout_s=3.0, sampling={"top_k": 1})
policy = Policy.connect(backend="vllm", bse_url="http://h", tokenizer="t")  # error
Policy.connect(backend="vllm", base_url="http://h", tokenizer="t", patience_s=2, store="rollouts.tito")
policy.model(histry="fork")  # error
policy.model(history="error", max_total_tokens=100, stream=True)
TITOModel.of(policy, None, thinking="strip")  # error
InProcess(policy, "agents:run", on_abrt="discard")  # error
InProcess(policy, "agents:run", on_abort="discard")
Settings.of(turn_timeout=3)  # error
policy.model(sampling={"temprature": 0.7})  # error
policy.model(sampling={"temperature": 0.7, "stop": "x", "extra": {"logit_bias": {"5": -1}}})
"""


@pytest.mark.timeout(300)
def test_a_mistyped_option_fails_in_mypy(tmp_path: Path) -> None:
    snippet = tmp_path / "snippet.py"
    snippet.write_text(SNIPPET)
    # Without site-packages it takes a second instead of twenty; the options are typed in our own packages.
    options = [
        "--no-site-packages",
        "--follow-imports=silent",
        "--no-error-summary",
        f"--cache-dir={tmp_path / 'cache'}",
    ]
    command = ["-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), *options, str(snippet)]
    ended = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    reported = {int(line) for line in re.findall(r"snippet.py:(\d+): error", ended.stdout)}
    expected = {number for number, line in enumerate(SNIPPET.splitlines(), 1) if line.endswith("# error")}
    assert reported == expected, ended.stdout + ended.stderr
    for name in ("temprature", "bse_url", "histry", "on_abrt", "turn_timeout"):
        assert f'Unexpected keyword argument "{name}"' in ended.stdout
