"""Ctrl-C handling. A signal does not raise in the middle of work; it asks the work to stop within a few seconds.

`asyncio.Runner` handles Ctrl-C in the main thread, for work that ends when it is cancelled. This module adds a runner
in another thread (a running event loop takes no second one), SIGTERM, and an end for work that does not react.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, NoReturn, Self, TypeVar

T = TypeVar("T")
GRACE_S = 2.0
"""Seconds that work may take to stop after a signal. Aborting its requests takes a fraction of a second."""
LAST_S = 3.0
"""Seconds that a command may then take to print its results. Its output may go to a pipe without a reader."""
_SHOW_CURSOR = b"\x1b[?25h"
"""Shows the cursor again, which a progress bar hides."""


class StoppableRunner:
    """An `asyncio.Runner` that a signal handler or another thread can stop."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._task: asyncio.Task[Any] | None = None
        self.stopped = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end.

        Raises:
            KeyboardInterrupt: `stop` was called, before or meanwhile. The result or error of the cancelled coroutine
                is dropped.
        """
        if self.stopped:
            work.close()
            raise KeyboardInterrupt
        try:
            return self._runner.run(self._owned(work))
        finally:
            if self.stopped:
                raise KeyboardInterrupt from None

    def close(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine that releases resources, to its end, even after `stop`."""
        self._runner.run(work)

    def stop(self) -> None:
        """Cancel the running coroutine and refuse later ones. Takes no lock: a signal handler may call it."""
        self.stopped = True
        if (task := self._task) is not None:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                task.get_loop().call_soon_threadsafe(task.cancel)

    async def _owned(self, work: Coroutine[Any, Any, T]) -> T:
        task = self._task = asyncio.current_task()
        assert task is not None
        if self.stopped:  # before there was a task to cancel
            task.cancel()
        try:
            return await work
        finally:
            self._task = None


def in_thread(work: Callable[[], T], stop: Callable[[], None], interrupts: Interrupts | None = None) -> T:
    """Run work in its own thread, so that Ctrl-C only interrupts a caller that waits.

    Args:
        work: The work.
        stop: Asks the work to stop.
        interrupts: The command's signals. Without them, Python raises KeyboardInterrupt in the main thread.

    Raises:
        KeyboardInterrupt: The wait was interrupted. The work has stopped, or it still runs after `GRACE_S`.
    """
    results: list[T] = []
    ended: SimpleQueue[BaseException | None] = SimpleQueue()  # its `put` is safe in a signal handler

    def attempt() -> None:
        try:
            results.append(work())
        except BaseException as error:
            ended.put(error)
        else:
            ended.put(None)

    thread = threading.Thread(target=attempt, name="tito", daemon=True)
    with interrupts.calling(lambda: ended.put(KeyboardInterrupt())) if interrupts else contextlib.nullcontext():
        try:
            thread.start()
            error = ended.get()
            if error is not None:
                raise error
        except KeyboardInterrupt:
            stop()
            thread.join(GRACE_S)
            raise
    return results[0]


class Interrupts:
    """Handles a command's signals without raising an exception in the middle of work.

    Outside `calling`, the first signal ends the process at once. Within `calling`, it is passed on; the process then
    ends with its work, at the second signal, or `GRACE_S + LAST_S` seconds after the first.

    Args:
        statuses: The signals, each with its exit status.
        message: Printed if the first signal ends the process at once.
        results: Returns the results to print if the work does not stop in time.
    """

    def __init__(self, statuses: Mapping[int, int], message: str, results: Callable[[], str] = str) -> None:
        self._statuses = statuses
        self._message = message
        self._results = results
        self._before: dict[int, Any] = {}
        self._on_first: Callable[[], None] | None = None
        self._received: SimpleQueue[int | None] = SimpleQueue()
        self.received: int | None = None

    @property
    def status(self) -> int:
        """Exit status of the signal that was received; 0 without one."""
        return 0 if self.received is None else self._statuses[self.received]

    def __enter__(self) -> Self:
        self.take()
        os.register_at_fork(after_in_child=self._give_back)  # so that a tool can end its own processes
        return self

    def take(self) -> None:
        """Install the signal handlers, again if other code replaced them."""
        if threading.current_thread() is not threading.main_thread():  # only the main thread receives signals
            return
        for number in self._statuses:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores a signal
                before = signal.signal(number, self._on_signal)
                self._before.setdefault(number, before)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._received.put(None)

    def _give_back(self) -> None:
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, handler)

    @contextlib.contextmanager
    def calling(self, call: Callable[[], None]) -> Iterator[None]:
        """Call `call` on the first signal, from now on until the command ends."""
        threading.Thread(target=self._watch, name="tito-interrupts", daemon=True).start()
        self._on_first = call
        yield

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self._on_first is None:
            leave(self._statuses[number], self._message)
        if self.received is not None:
            leave(self._statuses[number], self._results())
        self.received = number
        self._received.put(number)
        self._on_first()

    def _watch(self) -> None:
        number = self._received.get()
        if number is None:
            return
        try:
            self._received.get(timeout=GRACE_S + LAST_S)
        except Empty:
            leave(self._statuses[number], self._results())


def leave(status: int, message: str = "") -> NoReturn:
    """End the process at once, without Python's cleanup, which could hang or print errors."""
    prefix = _SHOW_CURSOR if os.isatty(2) else b""
    with contextlib.suppress(OSError):
        os.write(2, prefix + (message + "\n" if message else "").encode())
    os._exit(status)
