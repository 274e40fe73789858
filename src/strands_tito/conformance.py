"""The former name of `tito_conformance`, also for `pytest --pyargs strands_tito.conformance`."""

from __future__ import annotations

import sys
from importlib import import_module

from strands_tito.former_names import former_name

__getattr__ = former_name(
    __name__,
    "tito_conformance",
    {"profiles": "checks", "suite": "suite", "target": "target", "wire_reading": "wire"},
)
if "pytest" in sys.modules:  # it collects this file, and looks for tests among its variables alone
    _tests = vars(import_module("tito_conformance.test_server"))
    globals().update({name: test for name, test in _tests.items() if name.startswith("test_")})
