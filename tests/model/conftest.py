"""Fixtures of the model's tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from support.scripted import BACKENDS, policy_of


@pytest.fixture(scope="module")
def frozen_heap() -> Iterator[None]:
    """Exclude loaded modules and policies from garbage collection.

    A full collection then takes a millisecond instead of a third of a second, and still finds all garbage that the
    tests of the module make.
    """
    for kind in BACKENDS:
        policy_of(kind)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
