"""Tool-call ids that are unique in a ledger and the same on every backend (law 13)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class CallIds:
    """Counts them. Threads may share it.

    Args:
        uuid: Identity of the ledger, whose first eight characters every id carries.
        given: How many were given out before.
    """

    def __init__(self, uuid: str, given: int = 0) -> None:
        self._prefix = f"call_{uuid[:8]}_"
        self._given = given
        self._lock = threading.Lock()

    @property
    def given(self) -> int:
        """How many were given out."""
        return self._given

    def next(self) -> str:
        """Give the next one."""
        return f"{self._prefix}{self._take()}"

    @contextmanager
    def of_a_turn(self) -> Iterator[Callable[[], str]]:
        """Give those of a turn; when the turn is lost they are given again (law 5).

        Where another turn took one meanwhile, those before it stay unused: no id may be given twice.
        """
        taken: list[int] = []

        def take() -> str:
            taken.append(self._take())
            return f"{self._prefix}{taken[-1]}"

        try:
            yield take
        except BaseException:
            with self._lock:
                while taken and taken.pop() == self._given:
                    self._given -= 1
            raise

    def _take(self) -> int:
        with self._lock:
            self._given += 1
            return self._given
