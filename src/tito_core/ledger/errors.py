"""The base class of every error, its place in the documentation, and how a missing package is installed."""

from __future__ import annotations

from typing import Any, cast

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


class TITOError(Exception):
    """Base class of every error that strands-tito raises. Its traceback ends with its place in the documentation."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self.add_note(place_in_docs(self))

    def __reduce__(self) -> tuple[Any, ...]:
        """Support pickle and copy without `__init__`, which may take other arguments than the message."""
        kind, args, *state = cast(tuple[Any, ...], super().__reduce__())
        # Only the `__init__` of an OSError sets its parts.
        return (kind, args, *state) if isinstance(self, OSError) else (_remade, (kind, args), *state)


def _remade(kind: type[TITOError], args: tuple[Any, ...]) -> TITOError:
    return kind.__new__(kind, *args)


class LawViolationError(TITOError, ValueError):
    """A ledger, turn or response breaks a law.

    Attributes:
        law: The law's number.
    """

    def __init__(self, law: int, sentence: str) -> None:
        super().__init__(law, sentence)
        self.law = law

    def __str__(self) -> str:
        return "Law {}: {}".format(*self.args)
