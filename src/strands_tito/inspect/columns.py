"""Tables that fit the terminal: wide texts are shortened first, then the least important columns are left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from strands_tito.terminal import visible

MIN_TEXT, MAX_TEXT = 12, 36
"""Widths of a text column, in characters."""
_BETWEEN = 3
"""Characters between two columns."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        name: Its heading.
        cells: One text for each row.
        rank: Columns with a higher rank are left out first; those of rank 0 never.
        is_text: Whether its cells are words, which may be shortened, and not numbers.
    """

    name: str
    cells: Sequence[str]
    rank: int = 0
    is_text: bool = False

    @property
    def width(self) -> int:
        """Its width with all cells whole, at most `MAX_TEXT` for words."""
        widest = max((Text(visible(cell)).cell_len for cell in self.cells), default=0)
        return max(len(self.name), min(widest, MAX_TEXT) if self.is_text else widest)


class FittedTable:
    """A table whose columns are chosen when the width is known. It names the columns that it left out."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self.columns = tuple(columns)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        shown, widths = fit(self.columns, options.max_width)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for column, width in zip(shown, widths, strict=True):
            table.add_column(
                column.name, justify="left" if column.is_text else "right", no_wrap=True, overflow="ellipsis",
                min_width=width, max_width=width,
            )  # fmt: skip
        for row in zip(*(column.cells for column in shown), strict=True):
            table.add_row(*(Text(visible(cell)) for cell in row))
        yield table
        if left_out := [column.name for column in self.columns if column not in shown]:
            yield Text(f"Left out at this width: {', '.join(left_out)}.", style="dim")


def fit(columns: Sequence[Column], width: int) -> tuple[list[Column], list[int]]:
    """Return the columns to show and their widths, so that they take at most `width` characters if possible."""
    shown = list(columns)
    while True:
        widths = _shortened(shown, width)
        optional = [column for column in shown if column.rank]
        if _total(widths) <= width or not optional:
            return shown, widths
        shown.remove(max(optional, key=lambda column: column.rank))


def _shortened(columns: Sequence[Column], width: int) -> list[int]:
    """Return widths: the widest text gives first, and none goes below `MIN_TEXT` or its heading."""
    widths = [column.width for column in columns]
    least = [max(MIN_TEXT, len(column.name)) if column.is_text else column.width for column in columns]
    while _total(widths) > width:
        at = max(range(len(widths)), key=lambda at: (widths[at] > least[at], widths[at]))
        if widths[at] <= least[at]:
            break
        widths[at] -= 1
    return widths


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + _BETWEEN * (len(widths) - 1)
