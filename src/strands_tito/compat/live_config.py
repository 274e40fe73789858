"""A configuration dict in which a user may change values directly."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any


class LiveConfig:
    """A dict that a user may change, and the values that were last applied. Thread-safe.

    Attributes:
        values: The dict. Nested dicts in it stay the same objects while their content does not change.
        lock: Held while changes are applied.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.values: dict[str, Any] = {}
        self._applied: dict[str, Any] = {}

    def changes(self) -> dict[str, Any]:
        """Return the values that differ from the applied ones; None for those that were deleted."""
        with self.lock:
            live, applied = self.values, self._applied
            if live == applied:
                return {}
            changed = {name: value for name, value in live.items() if name not in applied or value != applied[name]}
            return {**changed, **dict.fromkeys(applied.keys() - live.keys())}

    def publish(self, values: Mapping[str, Any]) -> None:
        """Set the applied values, in the dict too."""
        with self.lock:
            self._applied = _copied(values)
            for name in self.values.keys() - values.keys():
                del self.values[name]
            for name, value in values.items():
                if name not in self.values or self.values[name] != value:  # else keep a dict that the user holds
                    self.values[name] = value


def _copied(value: Any) -> Any:
    """Copy dicts and lists, so that later changes of the original can be found."""
    if isinstance(value, Mapping):
        return {name: _copied(item) for name, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value
