"""Progress of a collection: a live bar on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from strands_tito.collect.collector import OnEnd, Tally

QUIET_S = 5.0
"""Seconds between two lines without a terminal."""


@contextmanager
def on_console(console: Console) -> Iterator[OnEnd]:
    """Yield a callback that displays a tally; it may be called any number of times."""
    if not console.is_terminal:
        yield _Lines(console)
        return
    shape = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    columns = (
        *(TextColumn("rollouts"), BarColumn(bar_width=24), MofNCompleteColumn()),
        *(TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.description}", table_column=shape)),
    )
    with Progress(*columns, console=console, expand=True, refresh_per_second=4) as bar:
        task = bar.add_task("", total=None)

        def draw(tally: Tally) -> None:
            bar.update(task, completed=tally.before + tally.finished, total=tally.total, description=status(tally))

        yield draw


def status(tally: Tally) -> str:
    """Return speed and failures in one line."""
    return " · ".join([f"{tally.tokens_per_s:,.0f} tokens/s", *_counted("failed", tally)])


def summary(tally: Tally) -> str:
    """Return the result of a collection, in two to four lines."""
    count = tally.before + tally.finished
    first = f"{count:,} of {tally.total:,} rollouts are finished"
    if tally.before:
        first += f", {tally.before:,} of them by an earlier run"
    endings = ", ".join(f"{reason.value} {count:,}" for reason, count in tally.endings.most_common())
    speed = f"{tally.finished:,} in {tally.seconds:,.1f} s, {tally.turns:,} turns, {tally.tokens_per_s:,.0f} tokens/s"
    lines = [f"{first}.", f"This run: {speed}{': ' + endings if endings else ''}."]
    if tally.finished:
        lines[-1] += f" {tally.rewarded:,} of {tally.finished:,} rewarded."
    if tally.failed:
        lines.append(f"{', '.join(_counted('failed', tally))}, the last with: {tally.last_error}")
    if tally.missing:
        lines.append(f"{tally.missing:,} are missing: run the same command again to collect them.")
    return "\n".join(lines)


def _counted(word: str, tally: Tally) -> list[str]:
    if not tally.failed:
        return []
    reasons = ", ".join(f"{reason.value} {count:,}" for reason, count in tally.failures.most_common())
    return [f"{tally.failed:,} {word} ({reasons})"]


class _Lines:
    """Prints at most one line every few seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = time.monotonic()

    def __call__(self, tally: Tally) -> None:
        now = time.monotonic()
        if now - self._last >= QUIET_S:
            self._last = now
            count = f"{tally.before + tally.finished:,} of {tally.total:,} rollouts"
            self._console.print(f"{count} · {status(tally)}", highlight=False, markup=False, soft_wrap=True)
