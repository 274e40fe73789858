"""Branches: why a turn does not simply follow the latest turn of a path."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Reason(StrEnum):
    """Why a history branched (law 8)."""

    EDIT = "edit"  # a message changed, or an assistant message appeared that was not sampled here
    TRIM = "trim"  # messages were removed
    SUMMARY = "summary"  # several messages were replaced by one
    REWIND = "rewind"  # the agent returned to an earlier turn and got another message
    RETRY = "retry"  # the same messages were sent again
    OPENING = "new system prompt or tools"
    THINKING = "thinking stripped"
    SEPARATE = "separate agent"
    SIDE_CALL = "side call"  # a call outside any agent's conversation, such as a summary


OF_ONE_AGENT = frozenset(Reason) - {Reason.SEPARATE, Reason.SIDE_CALL}
"""Reasons that a change of one agent's own history can have."""


@dataclass(frozen=True, slots=True)
class Branch:
    """A link from the first turn of a new path to the older path that it left.

    Attributes:
        reason: Why the path branched.
        turn: The last turn whose content both paths share, or the agent's own last turn if they share none (after a
            trim, for example). None if the path left no other path.
        message: Index of the first message that differs, or None.
        detail: For `OPENING`, the part of the opening that differs; empty otherwise.
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
