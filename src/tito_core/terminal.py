"""Printing what files and servers hold: a terminal shows their control characters, and does not act on them."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

VISIBLE = (
    {code: chr(0x2400 + code) for code in range(32)}
    | {127: "␡"}
    | {code: f"\\x{code:02x}" for code in range(0x80, 0xA0)}
)
"""What stands for each control character, for `str.translate`."""
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
