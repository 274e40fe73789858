"""The interface of a fuzz target: one class of hostile input."""

from __future__ import annotations

from random import Random
from typing import Literal, Protocol

Outcome = Literal["refused", "accepted"]


class Finding(AssertionError):
    """The package broke a promise."""


class Target(Protocol):
    """One class of hostile input. It holds slow fixtures, but no state that one case leaves to the next."""

    def case(self, random: Random) -> Outcome:
        """Run and judge one case.

        Raises:
            Finding: The package broke a promise. Any other exception is a finding, too.
        """


def require(holds: bool, sentence: str) -> None:
    """Raise a finding unless a promise holds."""
    if not holds:
        raise Finding(sentence)
