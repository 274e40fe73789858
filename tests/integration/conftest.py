"""Real servers on this CPU. Tests that need no options share one server per engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.keeping import ENGINES, ByEngine, Keeper, arrange
from support.real import Served


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    arrange(items)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByEngine | None:
    return ByEngine(config, log) if config.getvalue("dist") == "loadscope" else None


@pytest.fixture(scope="session")
def keeper() -> Iterator[Keeper]:
    kept = Keeper()
    yield kept
    kept.stop()


@pytest.fixture(scope="module", params=ENGINES)
def served(request: pytest.FixtureRequest, keeper: Keeper) -> Served:
    """A server of a small trained model whose tool tags are text. A module may cache its results."""
    return keeper.served(request.param)


@pytest.fixture(params=ENGINES)
def tagged(request: pytest.FixtureRequest, keeper: Keeper) -> Served:
    """A server with random weights and Qwen3's tokenizer and template, whose tool tags are tokens."""
    return keeper.served(request.param, "qwen3-tiny")
