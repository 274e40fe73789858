"""Run generations, and abort each on the engine if its answer is lost in any way, also at the end of the process."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterable
from typing import Generic, TypeVar

import msgspec

from tito_core.backend.errors import BackendError, EngineTimeoutError, hidden
from tito_core.backend.http.connections import BlockingPost, LoopEndingError
from tito_core.backend.http.streaming import StreamAssembler, StreamReader
from tito_core.backend.http.transport import EngineHttp, HttpRequest, ResponseBody, decoded
from tito_core.backend.id_text import IdText
from tito_core.backend.protocol import OnChunk
from tito_core.backend.retries import Attempt

_log = logging.getLogger(__name__)
T = TypeVar("T")
Abort = Callable[[str], Awaitable[None]]
ABORT_WITHIN_S = 5.0
"""Longest time for one abort, and for all aborts at the end of a loop or process, in seconds."""
WATCH_S = 1.0
"""Seconds between two looks for closed event loops."""


class InFlightRequests:
    """The ids of one backend's running generations. Threads and event loops may share it.

    Args:
        abort_post: Returns the request that aborts an id.
    """

    def __init__(self, abort_post: Callable[[str], BlockingPost]) -> None:
        self._abort_post = abort_post
        self._running: dict[str, asyncio.AbstractEventLoop | None] = {}
        _instances.add(self)

    def add(self, running: str, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Register an id as running in an event loop. When the loop is closed, the generation is aborted."""
        self._running[running] = loop
        if loop is not None:
            _watch_loops()

    def discard(self, running: str) -> None:
        """Remove an id that was answered, is known not to run, or was aborted."""
        self._running.pop(running, None)

    def is_watched(self) -> bool:
        """Return whether a generation runs in an event loop."""
        return any(loop is not None for loop in list(self._running.values()))

    def forget(self) -> None:
        """Drop all ids: they are another process's."""
        self._running.clear()

    def abort_without_loop(self, running: str) -> None:
        """Abort a generation whose event loop is gone: in a thread if one can still be started, else blocking."""
        self.discard(running)
        post = self._abort_post(running)
        with contextlib.suppress(RuntimeError):  # the interpreter is shutting down
            threading.Thread(target=_post, args=(post, ABORT_WITHIN_S), name="tito-abort").start()
            return
        _post(post, ABORT_WITHIN_S)

    def abort_all(self, until: float) -> None:
        """Abort all running generations, until the time `until` of `time.monotonic`."""
        self._abort(list(self._running), until)

    def abort_of_closed_loops(self, until: float) -> None:
        """Abort the generations whose event loop was closed: its tasks never run again, not even to be cancelled."""
        left = [running for running, loop in list(self._running.items()) if loop is not None and loop.is_closed()]
        self._abort(left, until)
        for running in left:
            self.discard(running)

    def _abort(self, ids: Iterable[str], until: float) -> None:
        for running in ids:
            if (left := until - time.monotonic()) <= 0:
                return
            _post(self._abort_post(running), left)


def _post(post: BlockingPost, timeout_s: float) -> None:
    with contextlib.suppress(Exception):  # no caller is left to report a failure to
        post.send(timeout_s)


_instances: weakref.WeakSet[InFlightRequests] = weakref.WeakSet()
_watching = threading.Lock()
_watcher: threading.Thread | None = None


def _watch_loops() -> None:
    """Start the thread that looks for closed event loops, unless it runs."""
    global _watcher
    with _watching:
        if _watcher is None:
            thread = threading.Thread(target=_watch, name="tito-loops", daemon=True)
            with contextlib.suppress(RuntimeError):  # the interpreter is shutting down
                thread.start()
                _watcher = thread


def _watch() -> None:
    """Abort what closed event loops left, while any generation runs. Nothing else notices `loop.close()`."""
    global _watcher
    while True:
        time.sleep(WATCH_S)
        for requests in list(_instances):
            requests.abort_of_closed_loops(time.monotonic() + ABORT_WITHIN_S)
        with _watching:
            if not any(requests.is_watched() for requests in list(_instances)):
                _watcher = None
                return


def _after_fork() -> None:
    """Leave the parent's generations alone, which the end of this process would abort."""
    global _watcher, _watching
    _watcher, _watching = None, threading.Lock()  # threads do not survive a fork
    for requests in list(_instances):
        requests.forget()


os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def _at_exit() -> None:
    until = time.monotonic() + ABORT_WITHIN_S
    for requests in list(_instances):
        requests.abort_all(until)


class DecodedResponse(msgspec.Struct, Generic[T], frozen=True):
    """A decoded response, its latency in seconds, the id that was sent, and whether a stream did not show its order."""

    value: T
    latency_s: float
    request_id: str
    unordered: bool = False


class GenerationRunner:
    """Runs the generations of one backend, with retries and aborts.

    It has no reference to the backend: in a reference cycle the sockets would be collected before they are closed.

    Args:
        http: Sends the requests.
        abort_request: Returns the request that stops a generation, used without an event loop.
    """

    def __init__(self, http: EngineHttp, abort_request: Callable[[str], HttpRequest]) -> None:
        self.http = http
        self._abort_tasks: set[asyncio.Task[None]] = set()
        self._logged: set[tuple[type[Exception], int | None]] = set()
        self._in_flight = InFlightRequests(lambda running: http.blocking_post(abort_request(running)))

    async def run(
        self,
        request_id: str,
        prepare: Callable[[str], HttpRequest],
        kind: type[T],
        assembler: Callable[[], StreamAssembler[T]] | None,
        on_chunk: OnChunk | None,
        abort: Abort,
        prompt: IdText | None,
    ) -> DecodedResponse[T]:
        """Send a generation. If a try is lost, it is aborted on the engine before anything else happens.

        Args:
            request_id: Our request id.
            prepare: Builds the request for one try from that try's own id.
            kind: Type of the response.
            assembler: Makes the assembler of a streamed response.
            on_chunk: Called with each chunk of a stream; None for a response in one body.
            abort: Stops a generation on the engine.
            prompt: The prompt's text if its echo is requested: an equal echo is not decoded.
        """

        async def one_try(attempt: Attempt) -> DecodedResponse[T]:
            running, started = attempt.name(request_id), time.perf_counter()
            request = prepare(running)
            reader = None
            if assembler is not None and on_chunk is not None:
                url = self.http.base_url + request.path
                reader = StreamReader(assembler, on_chunk, self.http.backend, url, request_id, request.size)
            self._in_flight.add(running, asyncio.get_running_loop())
            try:
                if reader is not None:
                    value = await self.http.reading(request, reader, request_id=request_id)
                else:
                    raw = await self.http.send_once(request, request_id=request_id)
                    if prompt is not None:
                        raw = ResponseBody(prompt.without_echo(raw.body), raw.content_type)
                    value = decoded(self.http, raw, kind, request_id)
            except GeneratorExit:  # a closed coroutine cannot await, and its event loop may be gone
                try:
                    self._abort_quietly(running, abort, asyncio.get_running_loop())
                except RuntimeError:
                    self._in_flight.abort_without_loop(running)
                raise
            except BaseException as lost:
                if isinstance(lost, BackendError):
                    lost.was_streamed = reader is not None and reader.was_streamed
                if _may_still_run(lost):
                    # Shielded, so that a second cancellation is not delayed.
                    await asyncio.shield(self._abort_quietly(running, abort, asyncio.get_running_loop()))
                else:
                    self._in_flight.discard(running)
                raise
            self._in_flight.discard(running)
            unordered = reader is not None and reader.unordered
            return DecodedResponse(value, time.perf_counter() - started, running, unordered)

        return await self.http.retrying(one_try)

    def _abort_quietly(self, request_id: str, abort: Abort, loop: asyncio.AbstractEventLoop) -> asyncio.Task[None]:
        """Start an abort as a task of its own, so that it completes even if its caller is cancelled."""

        # Failures are only logged: the caller must see the error that lost the generation.
        async def stop() -> None:
            try:
                async with asyncio.timeout(ABORT_WITHIN_S):
                    await abort(request_id)
            except (GeneratorExit, LoopEndingError) as ending:
                self._in_flight.abort_without_loop(request_id)
                if isinstance(ending, GeneratorExit):
                    raise
            except Exception as error:
                self._log(request_id, error)
            self._in_flight.discard(request_id)

        task = loop.create_task(stop())
        self._abort_tasks.add(task)
        task.add_done_callback(self._abort_tasks.discard)
        return task

    def _log(self, request_id: str, error: Exception) -> None:
        """Log the first failed abort of a kind: a server that refuses one refuses all."""
        kind = (type(error), getattr(error, "status", None))
        if kind not in self._logged:
            self._logged.add(kind)
            _log.warning(
                "request %s could not be aborted, and may still run on the server: %s: %s (logged once)",
                request_id,
                type(error).__name__,
                " ".join(hidden(str(error)).split()) or f"no answer within {ABORT_WITHIN_S:g} s",
            )


def _may_still_run(lost: BaseException) -> bool:
    """Return whether the engine may still be working on a request that failed with this error."""
    return not isinstance(lost, BackendError) or lost.sent or isinstance(lost, EngineTimeoutError)
