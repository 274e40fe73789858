"""Policies that several models share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable

from tito_core.model import Policy


class SharedPolicies:
    """Policies by the arguments they were made with. Thread-safe. A failed attempt is not remembered."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locks: dict[Hashable, threading.Lock] = {}
        self._policies: dict[Hashable, Policy] = {}

    def get(self, key: Hashable, make: Callable[[], Policy]) -> Policy:
        """Return the policy of a key. The first caller makes it while other callers of the key wait.

        Args:
            key: All arguments that the policy depends on.
            make: Makes the policy. It blocks until the server has answered.
        """
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._policies:
                self._policies[key] = make()
            return self._policies[key]
