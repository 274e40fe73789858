"""Every file that a test opened is closed after it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from strands_tito.viewer.rollouts import Rollouts


@pytest.fixture(autouse=True)
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    opened: list[Rollouts] = []
    begin = Rollouts.__init__

    def begun(self: Rollouts, *arguments: Any) -> None:
        opened.append(self)
        begin(self, *arguments)

    monkeypatch.setattr(Rollouts, "__init__", begun)
    yield
    for rollouts in opened:
        rollouts.close()
