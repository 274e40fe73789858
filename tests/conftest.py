"""Budgets of the property tests: small under `make test`, raised for all of them by TITO_EXAMPLES (`make prove`)."""

from __future__ import annotations

import os

import pytest
from hypothesis import Phase, settings

# Tests are never timed: a slow machine is no defect. Benchmarks hold speed.
settings.register_profile("tito", deadline=None)
# A mutant is killed by the first example that fails; nobody reads the smallest one.
settings.register_profile("mutants", deadline=None, phases=[Phase.generate], derandomize=True, database=None)
settings.load_profile(os.environ.get("TITO_PROFILE", "tito"))

EXAMPLES = int(os.environ.get("TITO_EXAMPLES", "0"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not EXAMPLES:
        return
    for item in items:
        test = getattr(item, "obj", None)
        held_by = getattr(item, "cls", None) if hasattr(getattr(item, "cls", None), "settings") else test
        name = "settings" if held_by is getattr(item, "cls", None) else "_hypothesis_internal_use_settings"
        if isinstance(own := getattr(held_by, name, None), settings):
            raised = settings(own, max_examples=max(own.max_examples, EXAMPLES))
            setattr(getattr(held_by, "__func__", held_by), name, raised)
