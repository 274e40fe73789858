"""The stages of connecting, as lines on a terminal."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

LOGGER = "tito_core.policy"
"""Logs each stage at INFO."""


@contextmanager
def stages_shown(console: Console) -> Iterator[None]:
    """Print each stage as it begins; connecting takes seconds."""
    logger, handler = logging.getLogger(LOGGER), _Lines(console)
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
