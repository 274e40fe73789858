"""A scripted engine: a wire, a script, faults and latency, and a record of all requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from strands_tito.testing.faults import Fault, FaultPolicy
from strands_tito.testing.running import Running, TokenStream
from strands_tito.testing.script import Completion, Script, ScriptedRequest, ScriptError
from strands_tito.testing.settle import Settled, settle
from strands_tito.testing.wire import SSE_HEADERS, EngineState, Generation, Wire, WireResponse

_POLL_S = 0.005  # seconds between checks of a paused or full server

_CLOSED = WireResponse(500, close_after=0)  # a dead server: the connection closes without a response

Latency = float | Callable[[ScriptedRequest], float]
"""Seconds that a generation takes, spread evenly over its tokens: a constant, or a function of the request."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One HTTP request and its response. `answers` holds the generations of the response, if any."""

    method: str
    path: str
    body: bytes
    response: WireResponse
    answers: Sequence[Settled] = ()


class ScriptedEngine:
    """One wire and one script behind `handle`; `ScriptedServer` and `InProcessTransport` carry requests to it.

    Attributes:
        requests: Every generation request, in order of arrival.
        exchanges: Every HTTP request with its response, in order of the responses.
        aborted: Server ids of generations that an abort call ended.
        disconnected: Server ids of generations whose client disconnected.
        peak: Largest number of generations that ran at once.
        overrides: Responses that replace the wire's, by path without query.
    """

    def __init__(
        self,
        wire: Wire,
        script: Script,
        *,
        fault: FaultPolicy | None = None,
        latency: Latency = 0.0,
        max_running: int | None = None,
        max_queued: int | None = None,
        record: bool = True,
    ) -> None:
        """See `strands_tito.testing.Options` for the arguments."""
        self.wire = wire
        self.script = script
        self.fault = fault
        self.latency = latency
        self.max_running = max_running
        self.max_queued = max_queued
        self.record = record
        self.requests: list[ScriptedRequest] = []
        self.exchanges: list[Exchange] = []
        self.aborted: list[str] = []
        self.disconnected: list[str] = []
        self.peak = 0
        self.overrides: dict[str, WireResponse] = {}
        self._active: list[Running] = []
        self._count = 0
        self.state.running = lambda: self.running
        self.state.abort = self._abort
        self.state.in_use = self._in_use
        self.state.version_changed = self._version_changed

    @property
    def state(self) -> EngineState:
        """The server's settings and current state."""
        return self.wire.state

    @property
    def running(self) -> int:
        """Number of generations in progress."""
        return sum(len(run.requests) for run in self._active)

    async def handle(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> WireResponse:
        """Answer one HTTP request. Cancelling this coroutine acts like a client that disconnects."""
        if self.state.dead:
            return _CLOSED
        override = self.overrides.get(path.partition("?")[0])
        routed = override or self.wire.route(method, path, headers, body)
        answers: Sequence[Settled] = ()
        if isinstance(routed, Generation):
            response, answers = await self._generate(routed)
        else:
            response = routed
        if self.state.dead:  # killed by this request, or by another while this one ran
            response, answers = _CLOSED, ()
            for run in self._active:
                run.stop()
        if self.record:
            self.exchanges.append(Exchange(method, path, body, response, answers))
        return response

    async def _generate(self, generation: Generation) -> tuple[WireResponse, Sequence[Settled]]:
        waiting = sum(not run.began for run in self._active)
        full = None if self.max_queued is None or waiting < self.max_queued else self.wire.queue_full()
        if full is not None and not self._has_room():
            return full, ()
        run = Running([replace(request, number=self._count + n) for n, request in enumerate(generation.requests)])
        self._count += len(run.requests)
        if self.record:
            self.requests += run.requests
        self._active.append(run)
        self.peak = max(self.peak, self.running)
        complete = True
        try:
            response, answers = await self._answer(generation, run)
            complete = not isinstance(response.body, TokenStream)
            return response, answers
        except asyncio.CancelledError:
            self._leave(run, complete=False)
            raise
        finally:
            if complete:
                self._leave(run, complete=True)

    def _leave(self, run: Running, *, complete: bool) -> None:
        if run in self._active:
            self._active.remove(run)
            if not complete:
                self.disconnected += [request.server_id for request in run.requests]

    async def _answer(self, generation: Generation, run: Running) -> tuple[WireResponse, Sequence[Settled]]:
        first = run.requests[0]
        fault = (self.fault(first.number, first) if self.fault else None) or Fault()
        if await self._queue(run, fault):
            answers = [self._aborted_in_queue(request) for request in run.requests]
            return generation.render(answers, run.elapsed), answers
        if fault.unanswered:
            return fault.response(), ()
        try:
            weights = self.state.weights
            answers = [settle(self.script, replace(each, weights=weights), self.state.decode) for each in run.requests]
        except ScriptError as error:
            return self.wire.script_error(str(error)), ()
        seconds = self.latency(first) if callable(self.latency) else self.latency
        run.begin(max(len(a.output_ids) for a in answers), seconds, fault.emitted if fault.hang else None, weights)
        if generation.stream and seconds and not fault.hang and fault.edit is None:
            return fault.apply(self._stream(generation, run, answers)), answers
        if (fault.hang or seconds) and await run.wait(None if fault.hang else seconds):
            answers = [answer.cut(run.emitted()) for answer in answers]
        answers = [run.spans(answer) for answer in answers]
        return fault.apply(generation.render(answers, run.elapsed)), answers

    async def _queue(self, run: Running, fault: Fault) -> bool:
        """Wait until the request may start. Return True if it was aborted first."""
        if fault.delay and await run.wait(fault.delay):
            return True
        while self.state.paused or not self._has_room():
            if await run.wait(_POLL_S):
                return True
        return False

    def _has_room(self) -> bool:
        return self.max_running is None or sum(run.began for run in self._active) < self.max_running

    def _aborted_in_queue(self, request: ScriptedRequest) -> Settled:
        empty = settle(lambda _: Completion((), finish="abort"), request, self.state.decode)
        return empty.cut(0, queued=True)

    def _stream(self, generation: Generation, run: Running, answers: Sequence[Settled]) -> WireResponse:
        def events(partial: Sequence[Settled]) -> Sequence[bytes]:
            body = generation.render([run.spans(answer) for answer in partial], run.elapsed).body
            assert isinstance(body, tuple)  # the body of a stream is its events
            return body

        stream = TokenStream(run, answers, events, lambda complete: self._leave(run, complete=complete))
        return WireResponse(200, SSE_HEADERS, stream)

    def _abort(self, matches: Callable[[ScriptedRequest], bool]) -> int:
        found = [run for run in self._active if any(matches(request) for request in run.requests)]
        for run in found:
            self.aborted += [request.server_id for request in run.requests]
            run.stop()
        return len(found)

    def _in_use(self, server_id: str) -> bool:
        return any(request.server_id == server_id for run in self._active for request in run.requests)

    def _version_changed(self, version: str) -> None:
        for run in self._active:
            run.update(self.state.weight_version, version, self.state.weights)
