"""examples/third_engine as a user installs it: a third-party backend passes the conformance suite."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.trainer_packages import folder_of
from tito_engines import find, install, models

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PYTHONPATH with torch and the example, which pip installed."""
    site = tmp_path_factory.mktemp("third") / "site-packages"
    package = str(ROOT / "examples" / "third_engine")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-input", "--target", str(site), package],
        check=True,
        timeout=300,
    )
    return os.pathsep.join(map(str, (site, folder_of("torch"), ROOT / "src")))


@pytest.fixture(scope="module", params=["qwen3-tiny", pytest.param("smollm2", marks=pytest.mark.long)])
def model(request: pytest.FixtureRequest) -> str:
    """The folder of a random model: trained weights take many minutes with one request at a time."""
    return str(models.ensure(request.param, install.ensure(find("vllm")).python))


def run(*arguments: str, path: str, cwd: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "COLUMNS": "160"}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=cwd, env=environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.long
def test_the_suite_passes_and_lists_what_does_not_apply(installed: str, model: str, tmp_path: Path) -> None:
    command = ("-c", "from strands_tito.cli import main; main()", "conformance", "--backend", "transformers", "--seeds")
    options = ("--base-url", model, "--tokenizer", model, "--profile", "quick", "--tolerance", "0.001")
    options += ("--not-require", "sampler", "--report", "out")
    shown = run(*command, *options, path=installed, cwd=tmp_path)
    assert "Every law that applies holds: " in shown
    [left] = [line for line in shown.splitlines() if line.startswith("Did not apply: ")]
    assert all(name in left for name in ("text", "top", "routed", "left", "changed"))
    verdicts = {
        check["check"]: check["verdict"]
        for check in json.loads((tmp_path / "out" / "conformance.json").read_text())["checks"]
    }
    names = ("prompt", "answers", "logprobs", "finish", "rescored", "seeded", "lost", "semantics")
    assert {name: verdicts[name] for name in names} == dict.fromkeys(names, "holds")


def test_it_samples_scores_and_stops(installed: str, model: str, tmp_path: Path) -> None:
    assert "sound" in run(
        str(ROOT / "tests" / "support" / "third_engine_check.py"), model, path=installed, cwd=tmp_path
    )


def test_it_is_short() -> None:
    assert len((ROOT / "examples" / "third_engine" / "third_engine.py").read_text().splitlines()) < 200
