"""Drive a coroutine suspension by suspension, so that a test can lose it at any of its await points."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Boom(Exception):
    """An interruption that no code of ours names."""


class Steps(Generic[T]):
    """Awaits `work` in its task, and calls `act` as it comes to wait at one of its suspensions.

    Args:
        work: The coroutine.
        at: The suspension to act at, from 0; None for none.
        act: Called there, once.

    Attributes:
        count: Suspensions so far.
        task: The task that waits.
    """

    def __init__(self, work: Coroutine[Any, Any, T], at: int | None, act: Callable[[Steps[T]], None]) -> None:
        self.work = work
        self.at = at
        self.act = act
        self.count = 0
        self.task: asyncio.Task[Any] | None = None
        self._thrown: BaseException | None = None

    def throw(self, error: BaseException) -> None:
        """Throw something in where `work` waits; `GeneratorExit` closes it, as when nobody refers to it any more."""
        assert self.task is not None
        self._thrown = error
        self.task.cancel()

    def __await__(self) -> Generator[Any, None, T]:
        self.task = asyncio.current_task()
        arrived: BaseException | None = None
        while True:
            try:
                waiting = self.work.send(None) if arrived is None else self._arrive(arrived)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            self.count += 1
            if self.count - 1 == self.at:
                self.act(self)
            try:
                arrived = None
                yield waiting
            except GeneratorExit:  # who drives this is closed itself
                self.work.close()
                raise
            except BaseException as error:
                arrived, self._thrown = self._thrown or error, None

    def _arrive(self, error: BaseException) -> Any:
        if isinstance(error, GeneratorExit):
            self.work.close()  # a coroutine that still waited for something would raise here
            raise asyncio.CancelledError  # what is left of its task
        return self.work.throw(error)
