"""A generation in progress: its emitted tokens, its abort, and its stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from strands_tito.testing.script import ScriptedRequest
from strands_tito.testing.settle import Settled


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
