"""Real servers that stay up from test to test, and the order in which tests need the fewest starts of them.

A start takes a minute of a core, so tests that take a server as it is share one; each process keeps one of each engine.
Under pytest-xdist (`--dist loadgroup`) one process has vLLM's tests and the other SGLang's: at most two servers are
busy at once, each on a core of its own.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest

from support.real import Served, serve

ENGINES = ("vllm", "sglang")
BOTH = "both"
"""The group of tests that need both engines."""


class Keeper:
    """Keeps the last server of each engine up until another model is asked for."""

    def __init__(self) -> None:
        self._up: dict[str, tuple[str, ExitStack, Served]] = {}

    def served(self, kind: str, model: str = "smollm2") -> Served:
        """Give a server of a model, as it was started by default."""
        if kind in self._up and self._up[kind][0] != model:
            self.stop(kind)
        if kind not in self._up:
            stack = ExitStack()
            self._up[kind] = (model, stack, stack.enter_context(serve(kind, model)))
        return self._up[kind][2]

    def stop(self, *kinds: str) -> None:
        """Stop the servers of some engines, or of all."""
        for kind in kinds or tuple(self._up):
            _, stack, _ = self._up.pop(kind)
            stack.close()


def group_of(item: Any) -> str:
    """Name the engine that a test needs, from its mark or its parameters."""
    mark = item.get_closest_marker("xdist_group")
    if mark is not None:
        return str(mark.args[0])
    values = getattr(item, "callspec", None)
    for value in values.params.values() if values is not None else ():
        for kind in ENGINES:
            if isinstance(value, str) and value.split()[0] == kind:
                return kind
    raise pytest.UsageError(
        f"{item.nodeid} does not say which engine it needs: give it a parameter vllm or sglang, or mark it "
        f"xdist_group('vllm'), 'sglang' or {BOTH!r}."
    )


def arrange(items: list[Any]) -> None:
    """Group the tests of real engines by engine; those with a server of their own come first, while none is kept."""
    ours = [(place, item) for place, item in enumerate(items) if item.get_closest_marker("engine")]
    for _, item in ours:
        item.add_marker(pytest.mark.xdist_group(group_of(item)))
    ordered = sorted((item for _, item in ours), key=_order)
    for (place, _), item in zip(ours, ordered, strict=True):
        items[place] = item


def _order(item: Any) -> tuple[int, int]:
    kept = 0 if "keeper" not in item.fixturenames else 1 if "tagged" in item.fixturenames else 2
    return (*ENGINES, BOTH).index(group_of(item)), kept
