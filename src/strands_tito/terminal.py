"""Printing what files and servers hold: a terminal shows their control characters, and does not act on them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

VISIBLE = (
    {code: chr(0x2400 + code) for code in range(32)}
    | {127: "␡"}
    | {code: f"\\x{code:02x}" for code in range(0x80, 0xA0)}
)
"""What stands for each control character, for `str.translate`."""
CONNECTING = "tito_core.policy"
"""Name of the logger that logs each stage of connecting at INFO."""
_VISIBLE = {code: shown for code, shown in VISIBLE.items() if chr(code) not in "\t\n"}


def visible(text: str) -> str:
    """Return a text with its control characters made visible, but for tabs and ends of lines."""
    return text.translate(_VISIBLE)


class VisibleConsole(Console):
    """A console that makes control characters of texts visible; its own colours and bars are no texts."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as `Console` does, with texts made visible."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control else Segment(visible(text), style)


@contextmanager
def stages_shown(console: Console) -> Iterator[None]:
    """Print each stage of connecting as it begins; it takes seconds."""
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
        """Print what is logged."""
        self._console.print(record.getMessage(), style="dim", markup=False, highlight=False, soft_wrap=True)
