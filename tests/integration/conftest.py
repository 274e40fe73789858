"""Real servers on this CPU, each started once for the tests that need it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.real import Served, serve


@pytest.fixture(scope="session", params=["vllm", "sglang"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    with serve(request.param) as server:
        yield server
