"""Fixtures of the model's tests."""

from __future__ import annotations

import gc

import pytest

from support.scripted import BACKENDS, policy_of


@pytest.fixture(scope="module")
def frozen_heap(fresh_heap: None) -> None:
    """Exclude the policies of the module's tests from garbage collection too: some collect at each step of a turn."""
    for kind in BACKENDS:
        policy_of(kind)
    gc.freeze()
