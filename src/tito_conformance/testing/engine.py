"""A scripted engine: a wire, a script, faults and latency, and a record of all requests."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from tito_conformance.testing.script import Completion, Script, ScriptedRequest, ScriptError, Settled, settle
from tito_conformance.testing.wire import SSE_HEADERS, EngineState, Generation, Wire, WireResponse, sse_text


@dataclass(slots=True)
class Running:
    """One request's generations. `seconds` are spread over `tokens`; `held` fixes the emitted count in a hang."""

    requests: Sequence[ScriptedRequest]
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    began: bool = False
    started: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    tokens: int = 0
    held: int | None = None
    weights: int = 0
    aborted: bool = False
    streamed: int | None = None
    """Tokens that were streamed; None if the response is not a stream."""
    versions: list[tuple[str, int, int]] = field(default_factory=list)
    """(version, first token, weights) if the weights changed during the generation, the original version first."""

    def begin(self, tokens: int, seconds: float, held: int | None, weights: int) -> None:
        """Start to emit tokens: the script has answered."""
        self.began, self.started = True, time.monotonic()
        self.tokens, self.seconds, self.held, self.weights = tokens, seconds, held, weights

    @property
    def elapsed(self) -> float:
        """Seconds since the request arrived, or since it started to emit tokens."""
        return time.monotonic() - self.started

    def emitted(self) -> int:
        """Return the number of tokens emitted so far."""
        if self.held is not None:
            return self.held
        if self.streamed is not None:
            return self.streamed
        return min(self.tokens, int(self.elapsed / self.seconds * self.tokens)) if self.seconds else self.tokens

    def stop(self) -> None:
        """Abort the generation, from any thread. It emits no further token."""
        if self.began:
            self.held = self.emitted()
        self.aborted = True
        self.loop.call_soon_threadsafe(self.stopped.set)

    async def wait(self, seconds: float | None) -> bool:
        """Wait for some seconds, or forever. Return True if the generation was aborted."""
        try:
            await asyncio.wait_for(self.stopped.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def update(self, old: str, new: str, weights: int) -> None:
        """Record a weight update during the generation."""
        if self.began:
            more = [] if self.aborted else [(new, self.emitted(), weights)]
            self.versions = [*(self.versions or [(old, 0, self.weights)]), *more]

    def spans(self, answer: Settled) -> Settled:
        """Return the answer with version spans of the weight updates, unless the script set spans itself.

        From an update on, the ids are those of the old weights, and their logprobs those of the new ones.
        """
        if not self.versions or answer.completion.weight_versions is not None:
            return answer
        total = len(answer.output_ids)
        for (*_, old), (_, start, new) in pairwise(self.versions):
            answer = answer.reloaded(start, new - old)
        starts = [min(start, total) for _, start, _ in self.versions]
        ends = [*starts[1:], total]
        tiled = [(v, s, e) for (v, *_), s, e in zip(self.versions, starts, ends, strict=True) if s < e]
        return replace(answer, completion=replace(answer.completion, weight_versions=tiled))


class TokenStream:
    """The events of a streamed answer, one every `seconds / tokens`.

    An abort ends it with the partial answer's last events. `finish(complete)` is called exactly once, also if nobody
    reads the stream.
    """

    def __init__(
        self,
        run: Running,
        answers: Sequence[Settled],
        events: Callable[[Sequence[Settled]], Sequence[bytes]],
        finish: Callable[[bool], None],
    ) -> None:
        self._events = events
        self._finish: Callable[[bool], None] | None = finish
        self._steps = self._run(run, answers)

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Return itself."""
        return self

    async def __anext__(self) -> bytes:
        """Return the next event when it is due."""
        try:
            return await anext(self._steps)
        except BaseException as end:
            self._close(isinstance(end, StopAsyncIteration))
            raise

    async def aclose(self) -> None:
        """Close the stream: the client disconnected, or has read everything."""
        await self._steps.aclose()
        self._close(False)

    def _close(self, complete: bool) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish(complete)

    async def _run(self, run: Running, answers: Sequence[Settled]) -> AsyncGenerator[bytes, None]:
        gap, sent = run.seconds / max(1, run.tokens), 0
        rendered: dict[int, Sequence[bytes]] = {}

        def events() -> Sequence[bytes]:
            updates = len(run.versions)  # each changes what is still to be sent
            if updates not in rendered:
                rendered[updates] = self._events(answers)
            return rendered[updates]

        run.streamed = 0
        while sent < len(events()) - 1:
            if await run.wait(gap):
                answers = [answer.cut(sent + 1) for answer in answers]
                rendered.clear()
                break
            sent += 1
            run.streamed = min(run.tokens, max(sent, run.tokens * sent // (len(events()) - 1)))
            yield events()[sent - 1]
        for event in events()[sent:]:
            yield event


@dataclass(frozen=True, slots=True)
class Fault:
    """One or several faults of one response.

    The script does not run after `status`, nor after `reset_after=0` or `close_after=0`.

    Attributes:
        status: Status of an error response, with `headers` and `body`.
        headers: Additional response headers.
        body: Bytes that replace the body.
        content_type: Replaces the content type.
        delay: Seconds before the request starts.
        hang: Send nothing until the client disconnects or aborts the request.
        emitted: Tokens that an abort returns after `hang`.
        edit: Changes the decoded JSON response in place, or returns another. For a stream it gets the list of events.
        reset_after: Reset the connection after so many bytes of the body; 0 sends no response at all. The announced
            content length is that of the whole body.
        close_after: Close the connection likewise.
        drip: (bytes, seconds): send the body in pieces of so many bytes with a pause after each.
    """

    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    content_type: str | None = None
    delay: float = 0.0
    hang: bool = False
    emitted: int = 0
    edit: Callable[[Any], Any] | None = None
    reset_after: int | None = None
    close_after: int | None = None
    drip: tuple[int, float] | None = None

    @property
    def unanswered(self) -> bool:
        """Whether the script does not run."""
        return self.status is not None or self.reset_after == 0 or self.close_after == 0

    def response(self) -> WireResponse:
        """Return the response of a fault that is `unanswered`."""
        response = WireResponse(self.status or 500, body=self.body or b"")
        return self.apply(replace(response, headers=dict(self.headers)))

    def apply(self, response: WireResponse) -> WireResponse:
        """Return the response with this fault applied to it."""
        body = response.body if self.body is None or self.status is not None else self.body
        if self.edit is not None:
            body = _edited(self.edit, response)
        headers = {**response.headers, **self.headers}
        if self.content_type is not None:
            headers["content-type"] = self.content_type
        return replace(
            response,
            headers=headers,
            body=body,
            reset_after=self.reset_after,
            close_after=self.close_after,
            drip=self.drip,
        )


FaultPolicy = Callable[[int, ScriptedRequest], Fault | None]
"""Maps a request's number (from 0) and the request to its fault, or None."""


def _edited(edit: Callable[[Any], Any], response: WireResponse) -> bytes | tuple[bytes, ...]:
    """Edit a body. The standard library's encoder is used because it writes NaN and Infinity."""
    if isinstance(response.body, bytes):
        value = json.loads(response.body)
        changed = edit(value)
        return json.dumps(value if changed is None else changed, separators=(",", ":"), ensure_ascii=False).encode()
    events = [json.loads(piece.removeprefix(b"data: ")) for piece in response.content.split(b"\n\n")[:-2]]
    changed = edit(events)
    return sse_text([json.dumps(e, separators=(",", ":")).encode() for e in (events if changed is None else changed)])


def always(fault: Fault) -> FaultPolicy:
    """Apply a fault to every request."""
    return lambda number, request: fault


def first(count: int, fault: Fault) -> FaultPolicy:
    """Apply a fault to the first `count` requests."""
    return lambda number, request: fault if number < count else None


def every(step: int, fault: Fault) -> FaultPolicy:
    """Apply a fault to requests 0, step, 2 * step, ..."""
    return lambda number, request: None if number % step else fault


def at(faults: Mapping[int, Fault] | Iterable[tuple[int, Fault]]) -> FaultPolicy:
    """Apply faults to the given request numbers."""
    table = dict(faults)
    return lambda number, request: table.get(number)


THROTTLED = Fault(status=429, headers={"retry-after": "0"}, content_type="application/json", body=b'{"error":"busy"}')
"""429 with a retry delay of 0 seconds."""
UNAVAILABLE = Fault(status=503, body=b"no upstream")
"""503 without JSON, as from a proxy whose server is down."""


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
        peak: Largest number of generations that ran or waited at once.
        overrides: Responses that replace the wire's, by path without query.
        hold: Whether a generation waits before it starts, asked again until it does not.
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
        """See `tito_conformance.testing.Options` for the arguments."""
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
        self.hold: Callable[[ScriptedRequest], bool] = lambda request: False
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
            weights = self.state.weights_of(first.adapter)
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
        while self.state.paused or not self._has_room() or self.hold(run.requests[0]):
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
            run.update(self.state.weight_version, version, self.state.weights_of(run.requests[0].adapter))


_PARTIAL = "\N{REPLACEMENT CHARACTER}"


def completion_text(state: EngineState, answer: Settled, params: Mapping[str, Any]) -> str:
    """Return a completion's text, without the stop token or stop string at its end and without eos ids.

    `params` are vLLM's or SGLang's sampling fields: `skip_special_tokens` false keeps eos ids; vLLM's
    `include_stop_str_in_output` and SGLang's `no_stop_trim` keep the stop.
    """
    if answer.completion.text is not None:
        return answer.completion.text
    return _visible(state, answer, answer.output_ids, params, len(answer.output_ids))


def deltas(state: EngineState, answer: Settled, params: Mapping[str, Any]) -> list[str]:
    """Return the text that each token adds to a stream. A token that ends inside a character adds nothing yet."""
    texts = ["", *prefixes(state, answer, params)]
    return [text[len(before) :] for before, text in pairwise(texts)]


def prefixes(state: EngineState, answer: Settled, params: Mapping[str, Any]) -> list[str]:
    """Return the text after each token of a cumulative stream. It waits for whole characters too."""
    texts: list[str] = []
    total = len(answer.output_ids)
    for n in range(1, total + 1):
        text = _visible(state, answer, answer.output_ids[:n], params, total)
        if text.endswith(_PARTIAL) and n < total:
            text = texts[-1] if texts else ""
        texts.append(text)
    return texts


def _visible(state: EngineState, answer: Settled, ids: Sequence[int], params: Mapping[str, Any], total: int) -> str:
    keep = bool(params.get("include_stop_str_in_output") or params.get("no_stop_trim"))
    stopped_at_token = answer.finish == "stop" and not isinstance(answer.stop, str)
    if stopped_at_token and not keep and len(ids) == total:
        ids = ids[:-1]
    if params.get("skip_special_tokens", True):
        special = answer.request.eos_ids
        ids = [i for i in ids if i not in special]
    text = state.decode(ids)
    if isinstance(answer.stop, str) and not keep and (at := text.find(answer.stop)) >= 0:
        return text[:at]
    return text
