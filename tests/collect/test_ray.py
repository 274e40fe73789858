"""`tito collect --ray` with real Ray, which is installed into a folder of the user's cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.trainer_packages import run

SCRIPT = Path(__file__).parent / "real" / "ray_check.py"


@pytest.mark.trainers
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("killed", "160 rollouts of"),
        ("lost", "160 rollouts after a lost actor"),
        ("errors", "of 50 when it was cancelled, nothing left on the engine"),
    ],
)
def test_a_cluster_loses_and_repeats_nothing(part: str, message: str, kind: str, tmp_path: Path) -> None:
    assert message in run(str(SCRIPT), "ray-2.50.0", part, kind, str(tmp_path))
