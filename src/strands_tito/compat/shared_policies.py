"""Policies that are made once for all the models that ask for the same one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable

from tito_core.model import Policy


class SharedPolicies:
    """Policies by what they were made of. Threads and event loops may share it; a failure is not kept."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._making: dict[Hashable, threading.Lock] = {}
        self._made: dict[Hashable, Policy] = {}

    def get(self, key: Hashable, make: Callable[[], Policy]) -> Policy:
        """Give the policy of a key; who asks first makes it, and others who ask meanwhile wait.

        Args:
            key: All that it is made of.
            make: Makes it, and blocks until the server has answered.
        """
        with self._lock:
            making = self._making.setdefault(key, threading.Lock())
        with making:
            if key not in self._made:
                self._made[key] = make()
            return self._made[key]
