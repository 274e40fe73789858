"""Run a coroutine suspension by suspension, so that a test can interrupt it at any await point."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Boom(Exception):
    """An error that our code does not know."""


class Steps(Generic[T]):
    """Awaits `work`, and calls `act` at one of its suspensions.

    Args:
        work: The coroutine.
        at: Index of the suspension; None for none.
        act: Called once, at that suspension.

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
        """Throw an error into `work` where it waits; `GeneratorExit` closes it, as when it is garbage-collected."""
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
            except GeneratorExit:  # the caller is closed
                self.work.close()
                raise
            except BaseException as error:
                arrived, self._thrown = self._thrown or error, None

    def _arrive(self, error: BaseException) -> Any:
        if isinstance(error, GeneratorExit):
            self.work.close()  # raises if the coroutine still awaits
            raise asyncio.CancelledError  # ends its task
        return self.work.throw(error)
