"""Why a path of the forest is not simply the next turn of the one before."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Reason(StrEnum):
    """What happened to a history so that it went on elsewhere (law 8)."""

    EDIT = "edit"  # a message changed, or one that was not sampled here came in
    TRIM = "trim"  # messages were left out
    SUMMARY = "summary"  # several messages were replaced by one
    REWIND = "rewind"  # the agent went back and was asked something else
    RETRY = "retry"  # the same messages were answered again
    OPENING = "new system prompt or tools"
    THINKING = "thinking stripped"
    SEPARATE = "separate agent"
    SIDE_CALL = "side call"  # a call outside any agent's conversation, such as a summary


OF_ONE_AGENT = frozenset(Reason) - {Reason.SEPARATE, Reason.SIDE_CALL}
"""Reasons that lie in one agent's own history."""


@dataclass(frozen=True, slots=True)
class Branch:
    """A link from the first turn of a new path to where it left an older one.

    Attributes:
        reason: Why it left.
        turn: Where the path left: the last turn that both have in common by content, or the agent's own last turn when
            they part before any, as after a trim. None for a path that left no other.
        message: Index of the first message that differs, where one does.
        detail: Which part of the opening differs, for `OPENING`; empty otherwise.
    """

    reason: Reason
    turn: int | None = None
    message: int | None = None
    detail: str = ""

    def __str__(self) -> str:
        words = [str(self.reason) + (f" ({self.detail})" if self.detail else "")]
        if self.turn is not None:
            words.append(f"from turn {self.turn}")
        if self.message is not None:
            words.append(f"at message {self.message}")
        return ", ".join(words)
