"""The wires of installed engines, by name, through the entry-point group `tito.wires`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from tito_core.testing.wire import EngineState, Wire

GROUP = "tito.wires"
Heard = TypeVar("Heard")


@dataclass(frozen=True, slots=True)
class WireKit(Generic[Heard]):
    """One engine's wire: how the conformance suite reads it, and how a scripted server speaks it.

    An engine's package names one in the entry-point group `tito.wires`, under its backend's name.

    Attributes:
        read: Reads one HTTP exchange for the suite, a `tito_conformance.wire_reading.Seen`: returns its generation as
            a `Heard`, or None where the exchange is something else. It judges the backend, and shares no code with it.
        wire: Makes the scripted server's HTTP surface; None where the engine cannot be scripted.
        cache_page: Tokens of one page of the server's prefix cache.
    """

    read: Callable[[Any], Heard | None]
    wire: Callable[[EngineState], Wire] | None = None
    cache_page: int = 1


def installed_wires() -> list[str]:
    """Return the names of the installed wires."""
    return sorted({point.name for point in entry_points(group=GROUP)})


@cache
def find_wire(name: str) -> WireKit[Any]:
    """Return the wire of that name.

    Raises:
        ValueError: No installed package offers it; the message lists those installed.
    """
    for point in entry_points(group=GROUP):
        if point.name == name:
            kit = point.load()
            if not isinstance(kit, WireKit):
                raise ValueError(f"The entry point {point.value} is a {type(kit).__name__}, not a WireKit.")
            return kit
    raise ValueError(f"There is no wire {name!r}. Installed wires: {', '.join(installed_wires())}.")
