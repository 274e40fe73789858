"""What the ledger raises."""

from __future__ import annotations


class LawViolationError(ValueError):
    """A law of the ledger does not hold.

    Attributes:
        law: Its number.
    """

    def __init__(self, law: int, sentence: str) -> None:
        super().__init__(law, sentence)  # what pickle calls it with
        self.law = law

    def __str__(self) -> str:
        return "Law {}: {}".format(*self.args)
