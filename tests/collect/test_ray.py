"""`tito collect --ray` with real Ray, which is installed into a folder of the user's cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.trainer_packages import run

SCRIPT = Path(__file__).parent / "real" / "ray_check.py"


@pytest.mark.trainers
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_cluster_loses_and_repeats_nothing(kind: str, tmp_path: Path) -> None:
    told = run(str(SCRIPT), ["ray"], kind, str(tmp_path))
    assert "240 rollouts of" in told
    assert "after two kills and a lost node" in told
    assert "240 rollouts after a lost actor" in told
    assert "nothing left on the engine" in told
