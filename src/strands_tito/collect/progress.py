"""A collection on a terminal: one live bar, or lines now and then where there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from strands_tito.collect.collecting import OnEnd, Tally

QUIET_S = 5.0
"""Seconds between two lines where there is no terminal to redraw."""


@contextmanager
def on_console(console: Console) -> Iterator[OnEnd]:
    """Return what draws a tally whenever it is called, however often that is."""
    if not console.is_terminal:
        yield _Lines(console)
        return
    shape = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    columns = (
        *(TextColumn("rollouts"), BarColumn(bar_width=24), MofNCompleteColumn()),
        *(TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.description}", table_column=shape)),
    )
    with Progress(*columns, console=console, expand=True, refresh_per_second=4) as bar:
        drawn = bar.add_task("", total=None)

        def draw(tally: Tally) -> None:
            bar.update(drawn, completed=tally.before + tally.finished, total=tally.wanted, description=status(tally))

        yield draw


def status(tally: Tally) -> str:
    """Say how fast it goes and what failed, in a line."""
    return " · ".join([f"{tally.tokens_per_s:,.0f} tokens/s", *_counted("failed", tally)])


def summary(tally: Tally) -> str:
    """Say what a collection has come to."""
    have = tally.before + tally.finished
    found = f"{have:,} of {tally.wanted:,} rollouts are there"
    if tally.before:
        found += f", {tally.before:,} of them from before"
    ended = ", ".join(f"{reason.value} {count:,}" for reason, count in tally.endings.most_common())
    speed = f"{tally.finished:,} in {tally.seconds:,.1f} s, {tally.turns:,} turns, {tally.tokens_per_s:,.0f} tokens/s"
    lines = [f"{found}.", f"This time {speed}{': ' + ended if ended else ''}."]
    if tally.failed:
        lines.append(f"{', '.join(_counted('failed', tally))}, the last with {tally.last_error}")
    if tally.missing:
        lines.append(f"{tally.missing:,} are missing: run the same again for them.")
    return "\n".join(lines)


def _counted(word: str, tally: Tally) -> list[str]:
    if not tally.failed:
        return []
    reasons = ", ".join(f"{reason.value} {count:,}" for reason, count in tally.failures.most_common())
    return [f"{tally.failed:,} {word} ({reasons})"]


class _Lines:
    """Prints a line every few seconds at most."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = time.monotonic()

    def __call__(self, tally: Tally) -> None:
        now = time.monotonic()
        if now - self._last >= QUIET_S:
            self._last = now
            have = f"{tally.before + tally.finished:,} of {tally.wanted:,} rollouts"
            self._console.print(f"{have} · {status(tally)}", highlight=False, markup=False, soft_wrap=True)
