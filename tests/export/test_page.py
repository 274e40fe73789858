"""The page on trainers says what the code does: each status, and each version that is tested."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import product
from pathlib import Path

from tools.matrix import CPU_TORCH, TRAINERS, pins

from strands_tito.export import samples_of
from strands_tito.export.agent_lightning import STATE
from strands_tito.export.slime import STATUS
from support.rollout_forests import chain
from tito_core.termination import Termination, record_termination

PAGE = (Path(__file__).parents[2] / "docs/trainers.md").read_text(encoding="utf-8")


def test_each_termination_has_its_row() -> None:
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \| (trained|masked) \| (\w+) \|$", PAGE, re.MULTILINE)
    assert [row[0] for row in rows] == [word.value for word in Termination]
    for name, slime, others, lightning in rows:
        word = Termination(name)
        assert slime.split(",")[0].strip() == STATUS[word]
        assert lightning == STATE[word]
        ledger = chain((3, 2))
        record_termination(ledger, word)
        assert (others == "masked") is samples_of(ledger)[0].ended_outside


def test_each_version_on_the_page_is_locked_and_each_lock_is_on_the_page() -> None:
    table = PAGE.split("## The rules")[0]
    for name, versions in TRAINERS.items():
        for version in versions:
            assert name == "ray" or version in table, (name, version)
            assert pins(f"{name}-{version}")[name] == version
    for row, package in product(("lowest", "newest"), ("pyarrow", "datasets")):
        assert pins(row)[package] in table
    assert CPU_TORCH in table


def test_no_trainer_is_imported_before_a_function_that_needs_it_is_called() -> None:
    """Except by `verl_loop`, which verl itself imports."""
    code = (
        "import importlib, pkgutil, sys, strands_tito.export, strands_tito.integrations\n"
        "packages = (strands_tito.export, strands_tito.integrations)\n"
        "names = [f'{each.__name__}.{one.name}' for each in packages for one in pkgutil.iter_modules(each.__path__)]\n"
        "names.remove('strands_tito.integrations.verl_loop')\n"
        "for name in names: importlib.import_module(name)\n"
        "print(len(names), {name.partition('.')[0] for name in sys.modules} & set(sys.argv[1:]))"
    )
    heavy = ["torch", "pyarrow", "datasets", "slime", "verl", "trl", "agentlightning", "tinker", "skyrl", "verifiers"]
    ran = subprocess.run([sys.executable, "-c", code, *heavy], capture_output=True, text=True, check=True)
    count, loaded = ran.stdout.strip().split(" ", 1)
    assert int(count) > 12
    assert loaded == "set()"
