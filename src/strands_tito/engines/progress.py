"""How long work tells what it is doing: a callable, and one that draws it on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column

from strands_tito.terminal import VisibleConsole, visible

QUIET_S = 5.0
"""Seconds between two lines about the same thing where there is no terminal to redraw."""


class Say(Protocol):
    """Called from the thread that does the work, at most a few times a second."""

    def __call__(self, text: str, fraction: float | None = None, /) -> None:
        """Take one line on what goes on now, and how much of it is done (0 to 1) where that is known."""


def silent(text: str, fraction: float | None = None, /) -> None:
    """Say nothing."""


@contextmanager
def on_console() -> Iterator[Say]:
    """A `Say` that draws one live bar on standard error, or prints lines, sparingly, where that is no terminal."""
    console = VisibleConsole(stderr=True)
    if not console.is_terminal:
        yield _Lines()
        return
    shape = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    line = TextColumn("{task.description}", markup=False, table_column=shape)
    columns = (SpinnerColumn(), BarColumn(bar_width=16), TimeElapsedColumn(), line)
    with Progress(*columns, console=console, transient=True, expand=True) as drawn:
        task = drawn.add_task("", total=None)

        def say(text: str, fraction: float | None = None, /) -> None:
            drawn.update(task, description=text, total=None if fraction is None else 1.0, completed=fraction or 0.0)

        yield say


class _Lines:
    """Prints a line when its first words change, and otherwise every few seconds."""

    def __init__(self) -> None:
        self._topic = ""
        self._last = 0.0

    def __call__(self, text: str, fraction: float | None = None, /) -> None:
        topic, now = " ".join(text.split()[:2]), time.monotonic()
        if topic != self._topic or now - self._last >= QUIET_S:
            self._topic, self._last = topic, now
            print(visible(text), file=sys.stderr, flush=True)
