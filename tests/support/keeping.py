"""Real servers shared by tests, and the test order that needs the fewest server starts.

A start takes a minute of a core, so tests that need no options share one server per engine and process. Under
pytest-xdist (`--dist loadscope`) one process runs vLLM's tests and the other SGLang's, so that at most two servers are
busy, each on a core of its own.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from support.real import Served, serve

ENGINES = ("vllm", "sglang")
ONCE = ("vllm", pytest.param("sglang", marks=pytest.mark.long))
ON_SGLANG = (pytest.param("vllm", marks=pytest.mark.long), "sglang")
"""For tests of what the client does, and of minutes: .ci/run runs them on one engine. Conformance runs on both."""
BOTH = "both"
"""Tests without an engine in their parameters need both."""


class Keeper:
    """Keeps the last server of each engine running until a test needs another model."""

    def __init__(self) -> None:
        self._up: dict[str, tuple[str, ExitStack, Served]] = {}

    def served(self, kind: str, model: str = "smollm2") -> Served:
        """Return a server of a model with default options."""
        if kind in self._up and self._up[kind][0] != model:
            self.stop(kind)
        if kind not in self._up:
            stack = ExitStack()
            self._up[kind] = (model, stack, stack.enter_context(serve(kind, model)))
        return self._up[kind][2]

    def stop(self, *kinds: str) -> None:
        """Stop the servers of some or all engines."""
        for kind in kinds or tuple(self._up):
            _, stack, _ = self._up.pop(kind)
            stack.close()


def engine_of(nodeid: str) -> str:
    """Return the engine that a test needs, from the parameters in its id."""
    found = re.search(rf"\[(?:.*[- ])?({'|'.join(ENGINES)})\b", nodeid)
    return found[1] if found else BOTH


class ByEngine(LoadScopeScheduling):  # type: ignore[misc]
    """Run all tests of one engine in one process."""

    def _split_scope(self, nodeid: str) -> str:
        return engine_of(nodeid)


def arrange(items: list[Any]) -> None:
    """Sort the tests of real engines by engine; tests that start their own server come before those that share one."""
    ours = [(place, item) for place, item in enumerate(items) if item.get_closest_marker("engine")]
    ordered = sorted((item for _, item in ours), key=_order)
    for (place, _), item in zip(ours, ordered, strict=True):
        items[place] = item


def _order(item: Any) -> tuple[int, int]:
    other_model = "tagged" in item.fixturenames or "qwen3-tiny" in item.nodeid
    shared = 0 if "keeper" not in item.fixturenames else 1 if other_model else 2
    return (*ENGINES, BOTH).index(engine_of(item.nodeid)), shared
