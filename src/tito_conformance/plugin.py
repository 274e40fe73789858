"""A pytest plugin that runs `tito conformance` once: `pytest --pyargs tito_conformance --tito-backend=...`."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

VALUES = (
    *("backend", "base-url", "tokenizer", "profile", "seed", "report", "model", "parser", "tolerance", "dtype"),
    *("experts", "weights", "adapter", "against-backend", "against-url", "require", "not-require", "replay"),
)
"""Options of the command that take a value, here with the prefix `tito-`. They are as the command reads them."""
FLAGS = ("seeds", "keep-going")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the command."""
    group = parser.getgroup("tito", "conformance of a server: the options of `tito conformance`, see its --help")
    for name in VALUES:
        group.addoption(f"--tito-{name}", action="append", default=[])
    for name in FLAGS:
        group.addoption(f"--tito-{name}", action="store_true")


@pytest.fixture(scope="session")
def tito_report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of one run of the command, as `conformance.json` has it."""
    given = {name: request.config.getoption(f"--tito-{name}") for name in VALUES}
    folder = (given.pop("report") or [tmp_path_factory.mktemp("conformance")])[-1]
    command = [part for name, values in given.items() for value in values for part in (f"--{name}", value)]
    command += [f"--{name}" for name in FLAGS if request.config.getoption(f"--tito-{name}")]
    tito = "from strands_tito.cli import main; main()"
    run = [sys.executable, "-c", tito, "conformance", *command, "--report", str(folder)]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    try:
        with open(f"{folder}/conformance.json", encoding="utf-8") as file:
            report: dict[str, Any] = json.load(file)
            return report
    except FileNotFoundError:
        pytest.fail(f"No run: exit status {done.returncode}.\n{done.stdout}{done.stderr}", pytrace=False)
