"""Progress callbacks, and one that draws progress on a terminal."""

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
"""Seconds between two lines about the same step without a terminal."""


class ProgressCallback(Protocol):
    """A progress callback. It is called from the thread that does the work, at most a few times per second."""

    def __call__(self, text: str, fraction: float | None = None, /) -> None:
        """Report the current step in one line, and the completed fraction (0 to 1) if it is known."""


def silent(text: str, fraction: float | None = None, /) -> None:
    """Ignore progress."""


@contextmanager
def on_console() -> Iterator[ProgressCallback]:
    """Yield a callback that draws a live bar on standard error, or prints a few lines if that is not a terminal."""
    console = VisibleConsole(stderr=True)
    if not console.is_terminal:
        yield _Lines()
        return
    shape = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    line = TextColumn("{task.description}", markup=False, table_column=shape)
    columns = (SpinnerColumn(), BarColumn(bar_width=16), TimeElapsedColumn(), line)
    with Progress(*columns, console=console, transient=True, expand=True) as bar:
        task = bar.add_task("", total=None)

        def report(text: str, fraction: float | None = None, /) -> None:
            bar.update(task, description=text, total=None if fraction is None else 1.0, completed=fraction or 0.0)

        yield report


class _Lines:
    """Prints a line when its first two words change, otherwise every few seconds."""

    def __init__(self) -> None:
        self._topic = ""
        self._last = 0.0

    def __call__(self, text: str, fraction: float | None = None, /) -> None:
        topic, now = " ".join(text.split()[:2]), time.monotonic()
        if topic != self._topic or now - self._last >= QUIET_S:
            self._topic, self._last = topic, now
            print(visible(text), file=sys.stderr, flush=True)
