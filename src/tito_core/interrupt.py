"""Ctrl-C: it never raises in the middle of work, which is asked to end instead, and gets a few seconds to do so."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from queue import Empty, SimpleQueue
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self, TypeVar

T = TypeVar("T")
GRACE_S = 2.0
"""How long work may take to end once it was asked to, in seconds; aborting its requests takes a fraction of one."""
LAST_S = 3.0
"""How long a command may then take to say what is known, in seconds: its output may go to a pipe that nobody reads."""
_SHOW_CURSOR = b"\x1b[?25h"
"""Undoes what a progress bar does to a terminal."""


class StoppableRunner:
    """An `asyncio.Runner` whose work a signal handler or another thread can stop."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._task: asyncio.Task[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.stopped = False

    def __enter__(self) -> Self:
        self._loop = self._runner.get_loop()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runner.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end.

        Raises:
            KeyboardInterrupt: `stop` was called, before or meanwhile. Nothing else is raised then: what a cancelled
                coroutine returns or raises says nothing.
        """
        if self.stopped:
            work.close()
            raise KeyboardInterrupt
        try:
            result = self._runner.run(self._owned(work))
        except BaseException:
            if self.stopped:
                raise KeyboardInterrupt from None
            raise
        if self.stopped:
            raise KeyboardInterrupt
        return result

    def close(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine that gives back what others held; stopped or not, it is left to end."""
        self._runner.run(work)

    def stop(self) -> None:
        """Cancel what runs, and refuse whatever is to run next. Any thread or signal handler may call it: no lock."""
        self.stopped = True
        task, loop = self._task, self._loop
        if task is not None and loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(task.cancel)

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
    """Do work in a thread of its own, so that Ctrl-C finds a caller that only waits.

    Args:
        work: What to do.
        stop: Asks it to end.
        interrupts: The command's; without them Ctrl-C is the KeyboardInterrupt that Python raises in the main thread.

    Raises:
        KeyboardInterrupt: The wait was interrupted. The work has ended, or did not within `GRACE_S` and goes on.
    """
    ended: SimpleQueue[Callable[[], T]] = SimpleQueue()  # whose put a signal handler may call at any moment

    def attempt() -> None:
        try:
            result = work()
        except BaseException as error:
            ended.put(_raising(error))
        else:
            ended.put(lambda: result)

    def interrupt() -> None:
        ended.put(_raising(KeyboardInterrupt()))

    thread = threading.Thread(target=attempt, name="tito", daemon=True)
    with contextlib.nullcontext() if interrupts is None else interrupts.calling(interrupt):
        try:
            thread.start()
            return ended.get()()
        except KeyboardInterrupt:
            stop()
            thread.join(GRACE_S)
            raise


def _raising(error: BaseException) -> Callable[[], Any]:
    def outcome() -> Any:
        raise error

    return outcome


class Interrupts:
    """Takes a command's signals, so that they end it without an exception in the middle of anything.

    While there is nothing to lose, the first one ends the process at once. Within `calling` it is passed on; the
    process then ends as its work does, at the second signal, or `LAST_S` after the time for that is over.

    Args:
        statuses: The signals, each with the exit status after it.
        sentence: What is printed where the first one ends the process at once.
        known: Gives what is to be printed where the work does not end in time.
    """

    def __init__(self, statuses: Mapping[int, int], sentence: str, known: Callable[[], str] = str) -> None:
        self._statuses = statuses
        self._sentence = sentence
        self._known = known
        self._before: dict[int, Any] = {}
        self._call: Callable[[], None] | None = None
        self._called: SimpleQueue[int | None] = SimpleQueue()
        self.received: int | None = None

    @property
    def status(self) -> int:
        """The exit status after the signal that was received."""
        return 0 if self.received is None else self._statuses[self.received]

    def __enter__(self) -> Self:
        self.take()
        return self

    def take(self) -> None:
        """Take the signals, again where other code took them meanwhile."""
        if threading.current_thread() is not threading.main_thread():  # only that one gets any
            return
        for number in self._statuses:
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
                before = signal.signal(number, self._on_signal)
                self._before.setdefault(number, before)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._called.put(None)

    @contextlib.contextmanager
    def calling(self, call: Callable[[], None]) -> Iterator[None]:
        """Pass the first signal on to what is running, from now on until the command ends."""
        threading.Thread(target=self._watch, name="tito-interrupts", daemon=True).start()
        self._call = call
        yield

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self._call is None:
            leave(self._statuses[number], self._sentence)
        if self.received is not None:
            leave(self._statuses[number], self._known())
        self.received = number
        self._called.put(number)
        self._call()

    def _watch(self) -> None:
        number = self._called.get()
        if number is None:
            return
        try:
            self._called.get(timeout=GRACE_S + LAST_S)
        except Empty:
            leave(self._statuses[number], self._known())


def leave(status: int, sentence: str = "") -> NoReturn:
    """End the process now, without what Python does at its end: nothing can hang any more, and nothing complains."""
    shown = _SHOW_CURSOR if os.isatty(2) else b""
    with contextlib.suppress(OSError):
        os.write(2, shown + (sentence + "\n" if sentence else "").encode())
    os._exit(status)
