"""Generations in flight: each is aborted on the engine when its answer is lost, whatever way that happens.

When the process ends before they do, the engine is told to stop them.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import msgspec

from tito_core.backend.errors import BackendError, EngineTimeoutError
from tito_core.backend.http.connections import Call, LoopEndingError
from tito_core.backend.http.streaming import Gathering, StreamReader
from tito_core.backend.http.transport import EngineHttp, HttpAnswer, HttpRequest, decoded
from tito_core.backend.id_text import IdText
from tito_core.backend.protocol import OnChunk
from tito_core.backend.retries import Attempt

T = TypeVar("T")
Abort = Callable[[str], Awaitable[None]]
ABORT_WITHIN_S = 5.0
"""Longest time that an abort may take, and that all of those at the end of a process may, in seconds."""


class InFlightRequests:
    """The running ids of one backend. Threads and event loops may share it.

    Args:
        call: Gives the call that aborts an id.
    """

    def __init__(self, call: Callable[[str], Call]) -> None:
        self._call = call
        self._running: set[str] = set()
        _all.add(self)

    def add(self, running: str) -> None:
        """Count an id as running, until it is answered, known not to run, or aborted."""
        self._running.add(running)

    def discard(self, running: str) -> None:
        """Count it no longer."""
        self._running.discard(running)

    def abort_without_loop(self, running: str) -> None:
        """Abort what was lost together with its event loop. It does not wait, where a thread can still be had."""
        self._running.discard(running)
        call = self._call(running)
        with contextlib.suppress(RuntimeError):  # the interpreter is ending
            threading.Thread(target=_post, args=(call, ABORT_WITHIN_S), name="tito-abort").start()
            return
        _post(call, ABORT_WITHIN_S)

    def abort_all(self, until: float) -> None:
        """Tell the engine to stop all of them, as far as time is left."""
        for running in list(self._running):
            if (left := until - time.monotonic()) <= 0:
                return
            _post(self._call(running), left)


def _post(call: Call, timeout_s: float) -> None:
    with contextlib.suppress(Exception):  # no caller is left to report a failure to
        call.post(timeout_s)


_all: weakref.WeakSet[InFlightRequests] = weakref.WeakSet()


@atexit.register
def _at_exit() -> None:
    until = time.monotonic() + ABORT_WITHIN_S
    for outstanding in list(_all):
        outstanding.abort_all(until)


class Answer(msgspec.Struct, Generic[T], frozen=True):
    """A decoded answer, how long it took, and the id under which the engine ran it."""

    value: T
    latency_s: float
    request_id: str


class Exchanges:
    """Runs the generations of one backend. It does not know the backend: in a cycle of references its sockets would be
    collected before they could be closed.

    Args:
        http: Sends the requests.
        abort_call: Gives the call that stops a generation, for when there is no event loop any more.
    """

    def __init__(self, http: EngineHttp, abort_call: Callable[[str], HttpRequest]) -> None:
        self.http = http
        self._aborting: set[asyncio.Task[None]] = set()
        self._outstanding = InFlightRequests(lambda running: http.without_loop(abort_call(running)))

    async def run(
        self,
        request_id: str,
        prepare: Callable[[str], HttpRequest],
        kind: type[T],
        gather: Callable[[], Gathering[T]] | None,
        on_chunk: OnChunk | None,
        abort: Abort,
        prompt: IdText | None,
    ) -> Answer[T]:
        """Send a generation; whatever way a try is lost, the engine is told to stop it before anything else happens.

        Args:
            request_id: Ours.
            prepare: Builds the request for one try from that try's own id.
            kind: Type of the answer.
            gather: Begins to put the answer together where it streams.
            on_chunk: Is given what comes of a stream; None where the answer comes in one body.
            abort: Stops a generation on the engine.
            prompt: The prompt, where its echo is asked for: one that is the same is not decoded.
        """

        async def one_try(attempt: Attempt) -> Answer[T]:
            running, started = attempt.name(request_id), time.perf_counter()
            asked = prepare(running)
            reader = None
            if gather is not None and on_chunk is not None:
                url, hide = self.http.base_url + asked.path, self.http.hide_key
                reader = StreamReader(gather, on_chunk, self.http.backend, url, request_id, hide, asked.size)
            self._outstanding.add(running)
            try:
                if reader is not None:
                    value = await self.http.reading(asked, reader, request_id=request_id)
                else:
                    raw = await self.http.send_once(asked, request_id=request_id)
                    if prompt is not None:
                        raw = HttpAnswer(prompt.without_echo(raw.body), raw.content_type)
                    value = decoded(self.http, raw, kind, request_id)
            except GeneratorExit:  # a coroutine that is closed cannot wait, and its event loop may be gone
                try:
                    self._abort_quietly(running, abort, asyncio.get_running_loop())
                except RuntimeError:
                    self._outstanding.abort_without_loop(running)
                raise
            except BaseException as lost:
                if isinstance(lost, BackendError):
                    lost.shown = reader is not None and reader.shown
                if _may_still_run(lost):
                    # A second cancellation goes through at once.
                    await asyncio.shield(self._abort_quietly(running, abort, asyncio.get_running_loop()))
                else:
                    self._outstanding.discard(running)
                raise
            self._outstanding.discard(running)
            return Answer(value, time.perf_counter() - started, running)

        return await self.http.retrying(one_try)

    def _abort_quietly(self, request_id: str, abort: Abort, loop: asyncio.AbstractEventLoop) -> asyncio.Task[None]:
        """Start an abort, which runs to its end whatever becomes of who waits for it."""

        # The generation is already lost, and what lost it must reach the caller: a failing abort says nothing new.
        async def stop() -> None:
            try:
                async with asyncio.timeout(ABORT_WITHIN_S):
                    await abort(request_id)
            except (GeneratorExit, LoopEndingError) as ending:
                self._outstanding.abort_without_loop(request_id)
                if isinstance(ending, GeneratorExit):
                    raise
            except Exception:
                pass
            self._outstanding.discard(request_id)

        stopping = loop.create_task(stop())
        self._aborting.add(stopping)
        stopping.add_done_callback(self._aborting.discard)
        return stopping


def _may_still_run(lost: BaseException) -> bool:
    """Return whether the engine may be at work on a request that ended so, which no answer did."""
    return not isinstance(lost, BackendError) or lost.sent or isinstance(lost, EngineTimeoutError)
