"""Texts and progress in a terminal. Control characters of files and servers are shown, and not executed."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.table import Column

T = TypeVar("T")
VISIBLE = (
    {code: chr(0x2400 + code) for code in range(32)}
    | {127: "␡"}
    | {code: f"\\x{code:02x}" for code in range(0x80, 0xA0)}
)
"""The visible replacement of each control character, for `str.translate`."""
CONNECTING = "tito_core.policy"
"""Name of the logger that logs each stage of connecting at INFO."""
_VISIBLE = {code: symbol for code, symbol in VISIBLE.items() if chr(code) not in "\t\n"}


def visible(text: str) -> str:
    """Return a text with visible control characters, except tabs and newlines."""
    return text.translate(_VISIBLE)


class VisibleConsole(Console):
    """A console that makes control characters in texts visible. Its own colours and bars work as usual."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as `Console` does, with visible control characters in texts."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control else Segment(visible(text), style)


def progress_of(items: Iterable[T], doing: str, total: int, console: Console | None = None) -> Iterator[T]:
    """Yield items, with a bar on standard error while they are taken, if it is a terminal."""
    console = console or VisibleConsole(stderr=True)
    if not console.is_terminal:
        yield from items
        return
    from rich.progress import track

    yield from track(items, doing, total, console=console, transient=True)


@contextmanager
def stages_shown(console: Console) -> Iterator[None]:
    """Print each stage of connecting, which takes seconds, when it begins."""
    logger, handler = logging.getLogger(CONNECTING), _Lines(console)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class _Lines(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Print a log record."""
        self._console.print(record.getMessage(), style="dim", markup=False, highlight=False, soft_wrap=True)


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
        yield _SparseLines()
        return
    shape = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    line = TextColumn("{task.description}", markup=False, table_column=shape)
    columns = (SpinnerColumn(), BarColumn(bar_width=16), TimeElapsedColumn(), line)
    with Progress(*columns, console=console, transient=True, expand=True) as bar:
        task = bar.add_task("", total=None)

        def report(text: str, fraction: float | None = None, /) -> None:
            bar.update(task, description=text, total=None if fraction is None else 1.0, completed=fraction or 0.0)

        yield report


class _SparseLines:
    """Prints a line when its first two words change, otherwise every few seconds."""

    def __init__(self) -> None:
        self._topic = ""
        self._last = 0.0

    def __call__(self, text: str, fraction: float | None = None, /) -> None:
        topic, now = " ".join(text.split()[:2]), time.monotonic()
        if topic != self._topic or now - self._last >= QUIET_S:
            self._topic, self._last = topic, now
            print(visible(text), file=sys.stderr, flush=True)
