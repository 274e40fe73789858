"""The ledger's error, where the documentation explains an error, and how a missing package is installed."""

from __future__ import annotations

_EXPLAINED = ("strands_tito", "tito_conformance", "tito_core", "tito_engines")
"""Packages whose errors are all on the page about errors."""


def place_in_docs(error: BaseException) -> str:
    """Return the page and anchor that explain an error, such as "docs: errors.md#lawviolationerror"; or ""."""
    for kind in type(error).__mro__:
        if kind.__module__.partition(".")[0] in _EXPLAINED:
            return f"docs: errors.md#{kind.__name__.lower()}"
    return ""


def how_to_install(extra: str = "") -> str:
    """Return the command that installs strands-tito with an extra. No package index has it yet, so from a clone."""
    return f"run pip install '.{f'[{extra}]' if extra else ''}' in a clone of strands-tito"


class LawViolationError(ValueError):
    """A ledger, turn or response breaks a law.

    Attributes:
        law: The law's number.
    """

    def __init__(self, law: int, sentence: str) -> None:
        super().__init__(law, sentence)  # pickle calls the class with these arguments
        self.law = law
        self.add_note(place_in_docs(self))

    def __str__(self) -> str:
        return "Law {}: {}".format(*self.args)
