"""What installed packages offer, ours and others' alike: their entry points of the groups `tito.*`."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from tito_core.ledger.errors import TITOError


class BrokenEntryPointError(TITOError, ImportError):
    """What an installed package offers cannot be imported, or is of another kind."""


def offered(group: str) -> list[str]:
    """Return the names that installed packages offer in a group, sorted."""
    return sorted({point.name for point in entry_points(group=group)})


def load(group: str, name: str, kind: Any = Callable) -> Any:
    """Return the object that an installed package offers by a name; None if none does.

    Args:
        group: The group of entry points.
        name: Of the entry point.
        kind: The class that the object must be an instance of.

    Raises:
        BrokenEntryPointError: It cannot be imported, or is of another kind.
    """
    for point in entry_points(group=group):
        if point.name == name:
            try:
                found = point.load()
            except Exception as error:  # another package's code
                raise _broken(point, f"cannot be loaded ({type(error).__name__}: {error})") from error
            if not isinstance(found, kind):
                raise _broken(point, f"is of type {type(found).__name__}, not a {kind.__name__}")
            return found
    return None


def _broken(point: EntryPoint, problem: str) -> BrokenEntryPointError:
    package = "a package" if point.dist is None else f"{point.dist.name} {point.dist.version}"
    return BrokenEntryPointError(
        f"{point.value} {problem}. It is the entry point {point.name!r} in {point.group} of {package}: install what "
        "that package lacks or another version of it, or uninstall it."
    )
