"""A scripted engine: a wire, a script, faults and latency, and a record of everything that was asked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tito_core.testing.faults import Fault, FaultPolicy
from tito_core.testing.script import Completion, Script, ScriptedRequest, ScriptError
from tito_core.testing.settle import Settled, settle
from tito_core.testing.wire import Generation, Wire, WireResponse

_POLL = 0.005  # seconds between looks at a paused server

Latency = float | Callable[[ScriptedRequest], float]
"""Seconds that a generation takes, spread evenly over its tokens."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One HTTP request and what came of it. `answer` holds the generations behind it, if there were any."""

    method: str
    path: str
    body: bytes
    response: WireResponse
    answers: Sequence[Settled] = ()


@dataclass(slots=True)
class _Running:
    """One generation request while it is in the engine."""

    requests: Sequence[ScriptedRequest]
    loop: asyncio.AbstractEventLoop
    stopped: asyncio.Event
    seconds: float = 0.0
    started: float = field(default_factory=time.monotonic)
    held: int | None = None
    tokens: int = 0
    began: bool = False
    versions: list[tuple[str, int]] = field(default_factory=list)

    def emitted(self) -> int:
        """Tokens that are out by now."""
        if self.held is not None:
            return self.held
        share = (time.monotonic() - self.started) / self.seconds if self.seconds else 1.0
        return min(self.tokens, int(share * self.tokens))

    def stop(self) -> None:
        """Ends the wait, from any thread."""
        self.loop.call_soon_threadsafe(self.stopped.set)

    async def wait(self, seconds: float | None) -> bool:
        """Waits so long, or for ever; True when aborted meanwhile."""
        try:
            await asyncio.wait_for(self.stopped.wait(), seconds)
        except TimeoutError:
            return False
        return True


class ScriptedEngine:
    """The facade over one wire and one script. Serve it with `server()` or call it through `transport()`.

    Attributes:
        requests: every generation that was asked for, in order of arrival.
        exchanges: every HTTP request with its response (while `record` is true).
        aborted: server ids of generations ended by an abort call.
        disconnected: server ids of generations whose client went away.
        running: generations in progress.

    """

    def __init__(
        self,
        wire: Wire,
        script: Script,
        *,
        fault: FaultPolicy | None = None,
        latency: Latency = 0.0,
        record: bool = True,
    ) -> None:
        self.wire = wire
        self.state = wire.state
        self.script = script
        self.fault = fault
        self.latency = latency
        self.record = record
        self.requests: list[ScriptedRequest] = []
        self.exchanges: list[Exchange] = []
        self.aborted: list[str] = []
        self.disconnected: list[str] = []
        self._active: list[_Running] = []
        self._count = 0
        self.state.running = lambda: self.running
        self.state.abort = self._abort
        self.state.in_use = self._in_use
        self.state.version_changed = self._version_changed

    @property
    def running(self) -> int:
        """Generations in progress."""
        return sum(len(run.requests) for run in self._active)

    async def handle(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> WireResponse:
        """One HTTP request. Cancelling this coroutine is what a client's disconnect is to a server."""
        if self.state.dead:
            return WireResponse(500, close_after=0)
        routed = self.wire.route(method, path, headers, body)
        answers: Sequence[Settled] = ()
        if isinstance(routed, Generation):
            response, answers = await self._generate(routed)
        else:
            response = routed
        if self.record:
            self.exchanges.append(Exchange(method, path, body, response, answers))
        return response

    async def _generate(self, generation: Generation) -> tuple[WireResponse, Sequence[Settled]]:
        requests = [replace(request, number=self._count + n) for n, request in enumerate(generation.requests)]
        self._count += len(requests)
        if self.record:
            self.requests += requests
        run = _Running(requests, asyncio.get_running_loop(), asyncio.Event())
        self._active.append(run)
        streaming = False
        try:
            response, answers = await self._answer(generation, run)
            streaming = isinstance(response.body, AsyncIterator)
            return response, answers
        except asyncio.CancelledError:
            self.disconnected += [request.server_id for request in requests]
            raise
        finally:
            if not streaming:
                self._active.remove(run)

    async def _answer(self, generation: Generation, run: _Running) -> tuple[WireResponse, Sequence[Settled]]:
        first = run.requests[0]
        fault = (self.fault(first.number, first) if self.fault else None) or Fault()
        if fault.delay and await run.wait(fault.delay):
            return self._aborted_in_queue(generation, run)
        while self.state.paused:
            if await run.wait(_POLL):
                return self._aborted_in_queue(generation, run)
        if fault.unanswered:
            return fault.instead(), ()
        try:
            answers = [settle(self.script, request, self.state.decode) for request in run.requests]
        except ScriptError as error:
            return self.wire.script_error(str(error)), ()
        seconds = self.latency(first) if callable(self.latency) else self.latency
        run.began, run.started, run.seconds = True, time.monotonic(), seconds
        run.tokens, run.held = max(len(answer.output_ids) for answer in answers), fault.emitted if fault.hang else None
        if generation.stream and seconds and not fault.hang:
            return WireResponse(200, {"content-type": "text/event-stream; charset=utf-8"}, self._stream(generation, run, answers), drip=fault.drip, reset_after=fault.reset_after, close_after=fault.close_after), answers
        if (fault.hang or seconds) and await run.wait(None if fault.hang else seconds):
            answers = [answer.cut(run.emitted()) for answer in answers]
        answers = [_with_versions(answer, run.versions) for answer in answers]
        response = generation.render(answers, time.monotonic() - run.started)
        return fault.spoil(response), answers

    async def _stream(self, generation: Generation, run: _Running, answers: Sequence[Settled]) -> AsyncIterator[bytes]:
        """Events as the tokens come; an abort ends the stream with the partial answer's last events."""
        events = _events(generation, answers, run.seconds)
        done, sent = False, 0
        try:
            gap = run.seconds / max(1, run.tokens)
            for event in events[:-1]:
                if await run.wait(gap):
                    partial = [answer.cut(sent + 1) for answer in answers]
                    events = _events(generation, partial, time.monotonic() - run.started)
                    break
                yield event
                sent += 1
            for event in events[sent:]:
                yield event
            done = True
        finally:
            if not done:
                self.disconnected += [request.server_id for request in run.requests]
            self._active.remove(run)

    def _aborted_in_queue(self, generation: Generation, run: _Running) -> tuple[WireResponse, Sequence[Settled]]:
        """Nothing was generated; the script was not asked."""
        answers = [
            settle(lambda _: Completion((), finish="abort"), request, self.state.decode).cut(0, queued=True)
            for request in run.requests
        ]
        return generation.render(answers, time.monotonic() - run.started), answers

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
            if run.began:
                run.versions = run.versions or [(self.state.weight_version, 0)]
                run.versions.append((version, run.emitted()))


def _events(generation: Generation, answers: Sequence[Settled], seconds: float) -> Sequence[bytes]:
    body = generation.render(answers, seconds).body
    assert isinstance(body, tuple)  # a stream's body is its events
    return body


def _with_versions(answer: Settled, changes: Sequence[tuple[str, int]]) -> Settled:
    """The spans that weight updates in mid-generation leave, unless the script gave its own."""
    if not changes or answer.said.weight_versions is not None:
        return answer
    total = len(answer.output_ids)
    ends = [*(min(start, total) for _, start in changes[1:]), total]
    spans = [(v, start, end) for (v, start), end in zip(changes, ends, strict=True) if start < end]
    return replace(answer, said=replace(answer.said, weight_versions=spans))
