"""Defects of servers with LoRA adapters."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from conformance.defects.defect import Defect
from tito_conformance.testing import EngineState

NAMES = ("one", "two")
_ORIGINAL = EngineState.weights_of


def _using(choose: Callable[[EngineState, str | None], str | None]) -> Callable[[], AbstractContextManager[Any]]:
    """Use the weights of another adapter than the request names."""
    return lambda: mock.patch.object(
        EngineState, "weights_of", lambda self, adapter: _ORIGINAL(self, choose(self, adapter))
    )


def _exchanged(state: EngineState, adapter: str | None) -> str | None:
    """Return the other adapter while several requests run."""
    if adapter is None or state.running() < 2:
        return adapter
    return next(name for name in NAMES if name != adapter)


ADAPTERS = (
    Defect("adapter-ignored", 4, "The name of an adapter is ignored, and the model alone answers.",
           client=_using(lambda state, adapter: None), adapters=NAMES),
    Defect("adapter-exchanged", 4, "Requests with two adapters that run at once get each other's.",
           client=_using(_exchanged), adapters=NAMES),
    Defect("adapter-one-behind", 4, "The weights of the version before are served under a new name.",
           client=_using(lambda state, adapter: adapter and NAMES[0]), adapters=NAMES),
)  # fmt: skip
"""Defects of servers with LoRA adapters."""
