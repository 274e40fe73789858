"""Values that transformers computes for given ids, to compare an engine's with."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tito_engines import install, models
from tito_engines.spec import find
from tito_engines.terminal import silent

SCRIPT = Path(__file__).with_name("reference_script.py")


def reference(
    model: str, sequences: Sequence[Sequence[int]], temperature: float = 1.0
) -> Mapping[str, npt.NDArray[np.generic]]:
    """See `reference_script.py`; the model is one of `tito_engines.models`, in float32."""
    python = install.ensure(find("vllm"), progress=silent).python
    folder = models.ensure(model, python, progress=silent)
    with tempfile.TemporaryDirectory() as place:
        given, out = Path(place, "ids.json"), Path(place, "out.npz")
        given.write_text(json.dumps([list(map(int, ids)) for ids in sequences]))
        command: list[Any] = [python, SCRIPT, folder, given, out, str(temperature)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        with np.load(out) as found:
            return dict(found)
