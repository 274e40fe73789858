"""A slow and obvious oracle of law 8: which turn a history goes on from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Parents:
    """The histories of all turns so far, as JSON a message, the answer last."""

    histories: list[list[str]] = field(default_factory=list)

    def fitting(self, history: list[str], messages: list[Any]) -> list[int]:
        """List the turns that a history may follow: the deepest whose own it begins with, and no answer after it."""
        fits: list[tuple[int, int]] = []
        for index, own in enumerate(self.histories):
            depth = len(own)
            rest = messages[depth - 1 :]
            if history[:depth] == own and all(message["role"] != "assistant" for message in rest):
                fits.append((depth, index))
        deepest = max(fits, default=(0, 0))[0]
        return [index for depth, index in fits if depth == deepest]

    def add(self, index: int, history: list[str]) -> None:
        """Keep what a turn answered, with its answer; turns come in commit order."""
        assert index == len(self.histories)
        self.histories.append(history)
