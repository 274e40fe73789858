"""Notice that the server at an address may have been replaced by another one, and have it checked again.

A rollout's semantics and vocabulary are those that were found at connect (laws 11 and 15). A server that was restarted
with another model or logprob mode answers as if nothing had happened.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import fields
from typing import Protocol, TypeAlias, runtime_checkable
from weakref import WeakKeyDictionary

from tito_core.backend.errors import (
    BadRequestError,
    DamagedAnswerError,
    EngineConnectionError,
    EngineTimeoutError,
    ServerChangedError,
    ServerError,
    ThrottledError,
)
from tito_core.backend.protocol import Backend, EngineInfo
from tito_core.backend.values import short_repr

Check: TypeAlias = Callable[[Backend, EngineInfo], Awaitable[None]]
"""Compares a server's measurements with those at connect, given what it reports now; raises where they differ."""
_OF_THE_MODEL = ("model", "vocab_size")
_MAY_CHANGE = ("max_model_len", "weight_version", "processed_logprobs", "truncated_logprobs")
"""Fields that a restarted server may report differently, such as the room that its memory leaves; two are measured."""
_FAULTS = (DamagedAnswerError, EngineConnectionError, EngineTimeoutError, ServerError, ThrottledError)
_checking: ContextVar[bool] = ContextVar("checking", default=False)
"""Whether the current task is a check, whose own requests must not start another."""


class ServerWatch:
    """Watches one server. Threads and event loops may share it.

    A check is due after a connection that was refused or reset, after a time without requests in which the server could
    have been restarted, and when an answer names another model or version than those before. Weight versions do not
    make one due: trainers change them all the time, and spans record them.

    It refers to no backend: in a reference cycle the sockets would be collected before they are closed.

    Args:
        interruptions: Returns how often the server may have become another one so far; see `EngineHttp`.
    """

    def __init__(self, interruptions: Callable[[], int]) -> None:
        self._interruptions = interruptions
        self._settled = self._renames = 0
        self._names: set[str] = set()
        self._checks: dict[str, Check] = {}
        self._running: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[None]] = WeakKeyDictionary()

    def add(self, key: str, check: Check) -> None:
        """Add a policy's check, after it was connected. Policies with the same key share one."""
        self._checks[key] = check

    @property
    def due(self) -> bool:
        """Whether the server has to be checked before its answers count."""
        return self._interruptions() + self._renames != self._settled and bool(self._checks) and not _checking.get()

    async def before(self, server: Backend, known: EngineInfo, discover: Callable[[], Awaitable[EngineInfo]]) -> None:
        """Check before a request where it is due, unless the server is away or its answers are damaged.

        The request then waits for it, and the check comes after it.
        """
        if self.due:
            with contextlib.suppress(*_FAULTS):
                await self._settle(server, known, discover)

    async def after(
        self,
        server: Backend,
        known: EngineInfo,
        discover: Callable[[], Awaitable[EngineInfo]],
        served_by: str | None,
    ) -> None:
        """Check before an answer is used, where it is due.

        Args:
            server: The server's backend.
            known: What it reported at connect.
            discover: Queries it again.
            served_by: See `RawResponse.served_by`.

        Raises:
            ServerChangedError: It is another server.
            LawViolationError: It has another vocabulary (law 15).
            BackendError: It could not be checked.
        """
        if served_by is not None and served_by not in self._names and not _checking.get():
            self._renames += bool(self._names)
            self._names.add(served_by)
        if self.due:
            await self._settle(server, known, discover)

    async def _settle(self, server: Backend, known: EngineInfo, discover: Callable[[], Awaitable[EngineInfo]]) -> None:
        """Run the checks, once for all requests of this event loop that wait for them.

        A check that began before an interruption may have measured the server before it: it is followed by another.
        """
        loop, seen = asyncio.get_running_loop(), self._interruptions() + self._renames
        while self._settled < seen:
            task = self._running.get(loop)
            if task is None or task.done():
                task = self._running[loop] = loop.create_task(self._check(server, known, discover))
                task.add_done_callback(lambda done: done.cancelled() or done.exception())  # waiters may be cancelled
            await asyncio.shield(task)

    async def _check(self, server: Backend, known: EngineInfo, discover: Callable[[], Awaitable[EngineInfo]]) -> None:
        _checking.set(True)
        began = self._interruptions() + self._renames
        try:
            now = await discover()
        except BadRequestError as error:
            if error.status is not None:  # a gateway may have refused: it measures no difference
                raise
            raise ServerChangedError(
                f"Law 15: the {server.name} server was interrupted, and is another one now: {error} {REMEDY}",
                backend=server.name,
                status=error.status,
                body=error.body,
            ) from error
        for name in (field.name for field in fields(known)):
            before, after = getattr(known, name), getattr(now, name)
            if before != after and name not in _MAY_CHANGE:
                raise ServerChangedError(
                    f"Law {15 if name in _OF_THE_MODEL else 11}: the {server.name} server is another one than at "
                    f"connect: its {name} was {short_repr(before)} and is {short_repr(after)}. {REMEDY}",
                    backend=server.name,
                )
        for check in list(self._checks.values()):
            await check(server, now)
        self._settled = max(self._settled, began)


@runtime_checkable
class Watched(Protocol):
    """A backend that watches its server, as those over HTTP do."""

    watch: ServerWatch


REMEDY = "Nothing was committed. Start the server as it was, or connect a new policy and collect the rollout again."
