"""Import this first to use `tito_core.parsing` alone in an engine's environment, which has no Strands."""

from __future__ import annotations

import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
if "tito_core" not in sys.modules:
    package = types.ModuleType("tito_core")
    package.__path__ = [str(ROOT / "src" / "tito_core")]
    sys.modules["tito_core"] = package
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
