"""A generation while it is in the engine: how far it is, who may end it, and its tokens as they stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace

from strands_tito.testing.script import ScriptedRequest
from strands_tito.testing.settle import Settled


@dataclass(slots=True)
class Running:
    """One request's generations. `seconds` are spread evenly over `tokens`; `held` freezes the count, for a hang."""

    requests: Sequence[ScriptedRequest]
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    began: bool = False
    started: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    tokens: int = 0
    held: int | None = None
    aborted: bool = False
    streamed: int | None = None
    """Tokens that a stream has brought; None where the answer comes at once."""
    versions: list[tuple[str, int]] = field(default_factory=list)
    """(version, first token) once the weights have changed during the generation, the original version first."""

    def begin(self, tokens: int, seconds: float, held: int | None) -> None:
        """The script has answered; from here on tokens come out."""
        self.began, self.started = True, time.monotonic()
        self.tokens, self.seconds, self.held = tokens, seconds, held

    @property
    def elapsed(self) -> float:
        """Seconds since the request came, or since its tokens began to come."""
        return time.monotonic() - self.started

    def emitted(self) -> int:
        """Tokens that are out by now."""
        if self.held is not None:
            return self.held
        if self.streamed is not None:
            return self.streamed
        return min(self.tokens, int(self.elapsed / self.seconds * self.tokens)) if self.seconds else self.tokens

    def stop(self) -> None:
        """Abort it, from any thread; no token follows."""
        if self.began:
            self.held = self.emitted()
        self.aborted = True
        self.loop.call_soon_threadsafe(self.stopped.set)

    async def wait(self, seconds: float | None) -> bool:
        """Wait so long, or forever; return True if it was aborted meanwhile."""
        try:
            await asyncio.wait_for(self.stopped.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def update(self, old: str, new: str) -> None:
        """The weights change under it."""
        if self.began:
            more = [] if self.aborted else [(new, self.emitted())]
            self.versions = [*(self.versions or [(old, 0)]), *more]

    def spans(self, answer: Settled) -> Settled:
        """The answer with the version spans that weight updates left, unless the script gave spans of its own."""
        if not self.versions or answer.said.weight_versions is not None:
            return answer
        total = len(answer.output_ids)
        starts = [min(start, total) for _, start in self.versions]
        ends = [*starts[1:], total]
        tiled = [(v, s, e) for (v, _), s, e in zip(self.versions, starts, ends, strict=True) if s < e]
        return replace(answer, said=replace(answer.said, weight_versions=tiled))


class TokenStream:
    """The events of a streamed answer, one every `seconds / tokens`.

    An abort ends it with the partial answer's last events. `finish(complete)` is called exactly once, also when
    nobody reads the stream.
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
        """Itself."""
        return self

    async def __anext__(self) -> bytes:
        """The next event, when it is due."""
        try:
            return await anext(self._steps)
        except BaseException as end:
            self._close(isinstance(end, StopAsyncIteration))
            raise

    async def aclose(self) -> None:
        """The client has gone, or has read everything."""
        await self._steps.aclose()
        self._close(False)

    def _close(self, complete: bool) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish(complete)

    async def _run(self, run: Running, answers: Sequence[Settled]) -> AsyncGenerator[bytes, None]:
        gap, sent, known = run.seconds / max(1, run.tokens), 0, list(run.versions)
        events = self._events(answers)
        run.streamed = 0
        while sent < len(events) - 1:
            if await run.wait(gap):
                events = self._events([answer.cut(sent + 1) for answer in answers])
                break
            sent += 1
            run.streamed = min(run.tokens, max(sent, run.tokens * sent // (len(events) - 1)))
            yield events[sent - 1]
            if run.versions != known:  # the last events tell of the change
                events, known = self._events(answers), list(run.versions)
        for event in events[sent:]:
            yield event
