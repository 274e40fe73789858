"""What a class of hostile input is to the runner."""

from __future__ import annotations

from random import Random
from typing import Literal, Protocol

Outcome = Literal["refused", "accepted"]


class Finding(AssertionError):
    """The package did something that it must not do."""


class Target(Protocol):
    """One class of hostile input. It holds what is slow to make, and nothing that one case leaves to the next."""

    def case(self, random: Random) -> Outcome:
        """Make and judge one case.

        Raises:
            Finding: The package did not keep a promise. Any other exception is a finding too.
        """


def require(holds: bool, sentence: str) -> None:
    """Raise a finding unless a promise holds."""
    if not holds:
        raise Finding(sentence)
