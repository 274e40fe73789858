"""The ledger's error."""

from __future__ import annotations


class LawViolationError(ValueError):
    """A ledger, turn or response breaks a law.

    Attributes:
        law: The law's number.
    """

    def __init__(self, law: int, sentence: str) -> None:
        super().__init__(law, sentence)  # pickle calls the class with these arguments
        self.law = law

    def __str__(self) -> str:
        return "Law {}: {}".format(*self.args)
