"""Close every file that a test opens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from strands_tito.viewer.rollouts import Rollouts


@pytest.fixture(autouse=True)
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    opened: list[Rollouts] = []
    init = Rollouts.__init__

    def record_and_init(self: Rollouts, *arguments: Any) -> None:
        opened.append(self)
        init(self, *arguments)

    monkeypatch.setattr(Rollouts, "__init__", record_and_init)
    yield
    for rollouts in opened:
        rollouts.close()
