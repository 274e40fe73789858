"""What the ledger raises."""

from __future__ import annotations


class LawViolationError(ValueError):
    """A law of the ledger does not hold.

    Attributes:
        law: Its number.
    """

    def __init__(self, law: int, sentence: str) -> None:
        super().__init__(f"Law {law}: {sentence}")
        self.law = law
