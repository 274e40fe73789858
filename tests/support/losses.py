"""A model whose turn is interrupted at a chosen await point, in a chosen way, while other agents have turns."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from support.interrupts import Boom, Steps
from support.scripted import END, Says, backend_of, engine_of, ids_of, policy_of
from tito_conformance.testing import ScriptedEngine, ScriptedRequest, ScriptedServer
from tito_core import TITOModel, store
from tito_core.backend import Backend, BackendError
from tito_core.backend.http.backend import HttpBackend
from tito_core.backend.protocol import EngineInfo, RawResponse, TokenRequest
from tito_core.ledger import Ledger
from tito_core.policy import run_blocking
from tito_core.store import LedgerFile

UUID = "00000000-0000-4000-8000-000000000000"
SLOW_S = 0.5
"""Latency of the interrupted turn: long enough for another agent's turn and for a poll of the cancel signal."""
Message = dict[str, Any]
WAYS = ("boom", "cancelled", "timeout", "closed")
"""Ways to interrupt a coroutine at an await point."""
OUTER_WAYS = ("cancelled outside", "closed outside", "signal")
"""Ways to interrupt its caller while it waits there."""


def says(prompt: ScriptedRequest) -> list[int]:
    """Answer by the prompt alone, so that a lost answer does not change others."""
    return ids_of(f"The checksum is {sum(prompt.prompt_ids) % 997}.{END}")


def user(text: str) -> Message:
    return {"role": "user", "content": [{"text": text}]}


async def collect(stream: AsyncGenerator[Any]) -> list[Any]:
    return [event async for event in stream]


class Stepped:
    """A backend that runs its generations in `Steps`."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.name = inner.name
        self.at: int | None = None
        self.act: Callable[[Steps[Any]], None] = lambda steps: None

    async def connect(self) -> EngineInfo:
        return await self.inner.connect()

    async def generate(self, request: TokenRequest) -> RawResponse:
        at, self.at = self.at, None  # only for the next generation
        return await Steps(self.inner.generate(request), at, self.act)

    async def score(self, token_ids: Any) -> Any:
        return await self.inner.score(token_ids)

    async def tokenize(self, text: str) -> Any:
        return await self.inner.tokenize(text)

    async def abort(self, request_id: str) -> None:
        await self.inner.abort(request_id)

    async def aclose(self) -> None:
        await self.inner.aclose()


@dataclass
class World:
    """A model over an engine, with a store, and an agent after two turns."""

    engine: ScriptedEngine
    model: TITOModel
    backend: Stepped
    path: Path
    messages: list[Message] = field(default_factory=lambda: [user("First?")])
    state: dict[str, Any] = field(default_factory=dict)
    others: Iterator[int] = field(default_factory=itertools.count)
    slow_from: int | None = None
    """Number of prompt tokens from which the engine is slow."""

    def latency(self, prompt: ScriptedRequest) -> float:
        return SLOW_S if self.slow_from is not None and len(prompt.prompt_ids) >= self.slow_from else 0.002

    def turn(self, cancel: threading.Event | None = None) -> AsyncGenerator[Any]:
        """Start the agent's next turn as Strands does, with copies of its messages."""
        return self.model.stream(
            [dict(message) for message in self.messages],
            None,
            "Be brief.",
            cancel_signal=cancel,
            model_state=self.state,
        )

    async def play(self) -> None:
        """Play a whole turn."""
        events = await collect(self.turn())
        text = "".join(e.get("contentBlockDelta", {}).get("delta", {}).get("text", "") for e in events)
        self.messages += [{"role": "assistant", "content": [{"text": text}]}, user("And then?")]

    def other_turn(self) -> None:
        """Play a whole turn of another agent, on another thread and event loop."""
        run_blocking(collect(self.model.stream([user(f"Other {next(self.others)}?")], None, None, model_state={})))  # type: ignore[list-item]

    def seen(self) -> tuple[bytes, bytes, list[Any], int]:
        """Return everything in which a turn could leave a trace."""
        ledger = self.model.ledger
        return store.encode(ledger), self.path.read_bytes(), ledger.retained(), ledger.call_ids.given

    def running(self) -> list[str]:
        """Return the server's id of the slow generation, if it runs."""
        own = [r for r in self.engine.requests if self.slow_from is not None and len(r.prompt_ids) >= self.slow_from]
        return [own[-1].server_id] if own and self.engine.running else []

    def was_aborted(self, server_id: str) -> bool:
        """Return whether the engine got an abort of a generation, or had finished it."""
        done = any(a.request.server_id == server_id for e in self.engine.exchanges for a in e.answers)
        return done or any(server_id.encode() in e.body for e in self.engine.exchanges if "abort" in e.path)

    async def until(self, condition: Callable[[], bool], message: str) -> None:
        """Wait until a condition holds."""
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, message
            await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def world(kind: str, wire: str, path: Path) -> Any:
    """Yield a world over a scripted engine in memory or behind a socket."""
    path.unlink(missing_ok=True)
    engine = engine_of(kind, Says(says))
    with contextlib.ExitStack() as stack:
        if wire == "socket":
            server = stack.enter_context(ScriptedServer(engine))
            inner: HttpBackend = type(backend_of(engine, kind))(server.base_url)  # type: ignore[assignment]
        else:
            inner = backend_of(engine, kind)  # type: ignore[assignment]
        backend = Stepped(inner)
        file = stack.enter_context(LedgerFile(path, "a"))
        policy = replace(policy_of(kind), backend=backend, store=file)
        made = World(engine, policy.model(ledger=Ledger(UUID)), backend, path)
        engine.latency = made.latency
        await made.play()
        await made.play()
        await inner.aclose()  # so that a turn can be interrupted while it connects, too
        yield made
        await inner.aclose()


@contextlib.contextmanager
def no_noise() -> Iterator[None]:
    """Check that a block leaves no unretrieved exception, no pending task and no open generator."""
    loop, contexts = asyncio.get_running_loop(), list[dict[str, Any]]()
    loop.set_exception_handler(lambda _, context: contexts.append(context) if _is_ours(context) else None)
    try:
        yield
        gc.collect()
        assert contexts == []
    finally:
        loop.set_exception_handler(None)


def _is_ours(context: dict[str, Any]) -> bool:
    """Return False for the error of CPython before 3.13 about async generators whose reader was closed."""
    return str(context.get("exception")) != "aclose(): asynchronous generator is already running"


class Loss:
    """Interrupts one turn, after another agent's turn meanwhile.

    Args:
        world: The world.
        way: One of `WAYS` or `OUTER_WAYS`.
        in_flight: Wait until the engine runs the request, instead of interrupting at once.
        again: An error to throw at the next suspension, during the cleanup.
    """

    def __init__(
        self, world: World, way: str, *, in_flight: bool = False, again: type[BaseException] | None = None
    ) -> None:
        self.world = world
        self.way = way
        self.in_flight = in_flight
        self.again = again
        self.interrupted_again = False
        self.signal = threading.Event() if way == "signal" else None
        self.happened = False
        self.before: Any = None
        self.running: list[str] = []
        self._limit: asyncio.Timeout | None = None
        self._outer: Steps[Any] | None = None
        self._watch: asyncio.Task[None] | None = None

    async def run(self, at: int | None, *, backend_at: int | None = None) -> bool:
        """Play the turn, interrupt it at a suspension of its generator or backend; return whether it completed."""
        self.world.slow_from = self.world.model.ledger.path_length(self.world.state["tito"]["turn"])
        self.world.backend.at, self.world.backend.act = backend_at, self
        self._outer = Steps(collect(self.world.turn(self.signal)), at, self)

        async def limited() -> Any:
            async with asyncio.timeout(None) as self._limit:
                return await self._outer

        try:
            events = await asyncio.ensure_future(limited())
        except (Boom, TimeoutError, asyncio.CancelledError):
            return False
        except BackendError as lost:
            if not isinstance(lost.__cause__, Boom):
                raise
            return False
        finally:
            self.world.slow_from = None
            if self._watch is not None:
                await self._watch
        return any("messageStop" in event for event in events)

    def __call__(self, steps: Steps[Any]) -> None:
        if self.happened:
            assert self.again is not None
            self.interrupted_again = True
            steps.throw(self.again())
        elif self.in_flight:
            self._watch = asyncio.ensure_future(self._strike_in_flight(steps))
        else:
            self._strike(steps)

    async def _strike_in_flight(self, steps: Steps[Any]) -> None:
        await self.world.until(lambda: bool(self.world.running()), "the engine did not get the request")
        self._strike(steps)

    def _strike(self, steps: Steps[Any]) -> None:
        self.world.other_turn()
        self.before, self.happened = self.world.seen(), True
        self.running = self.world.running()
        steps.at = steps.count if self.again is not None else None
        outer = self._outer
        assert outer is not None
        assert outer.task is not None
        match self.way:
            case "boom":
                steps.throw(Boom())
            case "closed":
                steps.throw(GeneratorExit())
            case "cancelled":
                assert steps.task is not None
                steps.task.cancel()
            case "timeout":
                assert self._limit is not None
                self._limit.reschedule(asyncio.get_running_loop().time())
            case "signal":
                assert self.signal is not None
                self.signal.set()
            case "cancelled outside":
                outer.task.cancel()
            case "closed outside":
                outer.throw(GeneratorExit())
            case way:
                raise AssertionError(way)
