"""Several servers with one model as one backend: least loaded, sticky by session, a dead one left out for a while."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar, cast

from tito_core.backend.checked import connected, tokenize
from tito_core.backend.engine_info import EngineInfo
from tito_core.backend.errors import (
    BackendError,
    BadRequestError,
    EngineConnectionError,
    EngineTimeoutError,
    ServerError,
)
from tito_core.backend.protocol import (
    Backend,
    EngineAdmin,
    OnChunk,
    RawResponse,
    RawScores,
    Running,
    TokenChunk,
    TokenRequest,
)
from tito_core.backend.retries import Attempt, Retries, together
from tito_core.ledger.columns import TokenIds

T = TypeVar("T")
OUT_S = 10.0
"""How long a server that could not be reached, failed, or did not answer in time gets no requests, in seconds."""
SESSIONS = 1 << 16
"""Sessions whose server is remembered; the one that was not heard of for longest is forgotten first."""


@dataclass(slots=True, eq=False)
class _Member:
    backend: Backend
    where: str
    running: set[str] = field(default_factory=set)
    given: int = 0
    out_until: float = 0.0


class Replicas:
    """Spreads requests over backends of equal servers. Threads and event loops may share it.

    A session stays with its server, whose prefix cache holds its history, also while that is busy (429, 503). When it
    cannot be reached the session moves, and stays where it is then. A request without a session goes where the fewest
    are running. Tries are counted over all servers.

    Args:
        members: A backend for each server, which does not try anything again by itself.
        addresses: Where each is, for errors.
        retries: How often a request is tried, and the waits in between.
        clock: Seconds, for how long a server is left out.
    """

    def __init__(
        self,
        members: Sequence[Backend],
        addresses: Sequence[str],
        retries: Retries,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = members[0].name
        self.members = tuple(members)
        self._members = [_Member(*pair) for pair in zip(members, addresses, strict=True)]
        self._retries = retries
        self._clock = clock
        self._sessions: OrderedDict[str, _Member] = OrderedDict()
        self._lock = threading.Lock()
        self._info: EngineInfo | None = None

    async def connect(self) -> EngineInfo:
        """Ask every server what it is. The shortest context is that of all; a weight version only where all agree.

        Raises:
            BadRequestError: They are not the same model, on the same version of the engine.
            BackendError: One could not be asked.
        """
        if self._info is None:
            found = await self._each(lambda member: self._retries(lambda _: connected(member.backend)))
            self._check_alike(found)
            lengths = [info.max_model_len for info in found if info.max_model_len is not None]
            weights = {info.weight_version for info in found}
            self._info = replace(
                found[0],
                max_model_len=min(lengths, default=None),
                weight_version=weights.pop() if len(weights) == 1 else None,
            )
        return self._info

    def _check_alike(self, found: Sequence[EngineInfo]) -> None:
        first = found[0]
        for member, info in zip(self._members, found, strict=True):
            for what in ("model", "version", "vocab_size", "endpoints", "capabilities", "unreported"):
                one, other = getattr(first, what), getattr(info, what)
                if one != other:
                    raise BadRequestError(
                        f"The {self.name} servers are not alike, so a rollout cannot move from one to another: "
                        f"{what} is {one!r} at {self._members[0].where} and {other!r} at {member.where}. "
                        "Start them alike, or leave one out of base_url.",
                        backend=self.name,
                    )

    async def generate(self, request: TokenRequest, on_chunk: OnChunk | None = None) -> RawResponse:
        """Sample one completion on one of the servers; see `Backend.generate`."""
        await self.connect()
        tried: list[_Member] = []
        shown = False

        def show(chunk: TokenChunk) -> None:
            nonlocal shown
            shown = True
            if on_chunk is not None:
                on_chunk(chunk)

        async def one_try(attempt: Attempt) -> RawResponse:
            named = replace(request, request_id=attempt.name(request.request_id))
            async with self._chosen(request.session_id, named.request_id, tried) as member:
                try:
                    return await (
                        member.backend.generate(named) if on_chunk is None else member.backend.generate(named, show)
                    )
                except BackendError as error:
                    error.shown |= shown  # a third party's backend need not say so, and no other try is made then
                    raise

        return await self._retries(one_try)

    async def score(self, token_ids: TokenIds) -> RawScores:
        """Score a sequence on one of the servers; see `Backend.score`."""
        await self.connect()
        tried: list[_Member] = []

        async def one_try(attempt: Attempt) -> RawScores:
            async with self._chosen(None, f"score-{id(tried)}-{attempt.number}", tried) as member:
                return await member.backend.score(token_ids)

        return await self._retries(one_try)

    async def tokenize(self, text: str) -> TokenIds | None:
        """Encode text on every server; see `Backend.tokenize`.

        Raises:
            BadRequestError: They do not give the same ids, or only some of them encode text at all.
        """
        await self.connect()
        found = await self._each(lambda member: tokenize(member.backend, text))
        first, *_ = known = [None if ids is None else ids.tolist() for ids in found]
        for member, ids in zip(self._members, known, strict=True):
            if ids != first:
                raise BadRequestError(
                    f"The {self.name} servers are not alike: the ids of {text[:60]!r} are {_shown(first)} at "
                    f"{self._members[0].where} and {_shown(ids)} at {member.where}. Start them with the same "
                    "tokenizer, or leave one out of base_url.",
                    backend=self.name,
                )
        return found[0]

    @asynccontextmanager
    async def _chosen(self, session: str | None, running: str, tried: list[_Member]) -> AsyncIterator[_Member]:
        """Choose a server, count the request as its own, and note it as out when it cannot be reached."""
        with self._lock:
            member = self._choose(session, tried)
            tried.append(member)
            member.running.add(running)
            member.given += 1
        try:
            yield member
        except (EngineConnectionError, EngineTimeoutError, ServerError):
            member.out_until = self._clock() + OUT_S
            raise
        else:
            member.out_until = 0.0
        finally:
            member.running.discard(running)

    def _choose(self, session: str | None, tried: Sequence[_Member]) -> _Member:
        now = self._clock()
        there = [member for member in self._members if member.out_until <= now]
        known = None if session is None else self._sessions.get(session)
        if known is not None and known in there:
            member = known
        elif there:
            fresh = [one for one in there if one not in tried] or there
            member = min(fresh, key=lambda one: (len(one.running), one.given))
        else:  # one of those that are out, the one longest out first
            member = min(self._members, key=lambda one: one.out_until)
        if session is not None:
            self._sessions[session] = member
            self._sessions.move_to_end(session)
            if len(self._sessions) > SESSIONS:
                self._sessions.popitem(last=False)
        return member

    async def abort(self, request_id: str) -> None:
        """Stop a generation where it runs; on every server when none of ours is known to run it."""
        running = [member for member in self._members if request_id in member.running]
        outcomes = await asyncio.gather(
            *(member.backend.abort(request_id) for member in running or self._members), return_exceptions=True
        )
        if running:
            _raise_first(outcomes)

    async def aclose(self) -> None:
        """Close this event loop's connections to all servers."""
        await self._each(lambda member: member.backend.aclose())

    async def _each(self, work: Callable[[_Member], Awaitable[T]]) -> list[T]:
        """Do something on every server at once, to the end on each; then raise what failed first."""
        outcomes = await asyncio.gather(*map(work, self._members), return_exceptions=True)
        _raise_first(outcomes)
        return cast(list[T], outcomes)


class AdminReplicas(Replicas):
    """Replicas whose servers let their weights be changed: each call goes to all of them."""

    async def pause(self, running: Running = "keep") -> None:
        """See `EngineAdmin.pause`."""
        await self._each(lambda member: _admin(member).pause(running))

    async def resume(self) -> None:
        """See `EngineAdmin.resume`."""
        await self._each(lambda member: _admin(member).resume())

    async def load_weights(self, path: str, version: str, *, running: Running = "keep") -> None:
        """See `EngineAdmin.load_weights`; every server must see the folder. One that cannot load is left paused."""
        await self._each(lambda member: _admin(member).load_weights(path, version, running=running))

    async def weight_version(self) -> str | None:
        """Return the version that all servers name, or None where they differ."""
        found = set(await self._each(lambda member: _admin(member).weight_version()))
        return found.pop() if len(found) == 1 else None


def replicas_of(members: Sequence[Backend], addresses: Sequence[str], retries: Retries) -> Replicas:
    """Make one backend of several, which can change weights where all of them can."""
    administered = all(isinstance(member, EngineAdmin) for member in members)
    return (AdminReplicas if administered else Replicas)(members, addresses, retries)


async def agreed(
    backend: Backend, ask: Callable[[Backend], Awaitable[T]], facts: Callable[[T], Mapping[str, object]]
) -> Sequence[T]:
    """Ask a backend, or each of its servers where it has several, and give the answers, in which no fact differs.

    A fact that is None was not found out: it differs from none.

    Raises:
        BadRequestError: They differ; the sentence names the first thing in which they do.
    """
    members = backend.members if isinstance(backend, Replicas) else (backend,)
    async with together() as group:
        asked = [group.create_task(_asked(ask, member)) for member in members]
    found = [task.result() for task in asked]
    known: dict[str, tuple[object, int]] = {}
    for number, each in enumerate(map(facts, found), 1):
        for what, said in each.items():
            first, where = known.setdefault(what, (said, number)) if said is not None else (None, number)
            if first != said:
                raise BadRequestError(
                    f"The {backend.name} servers are not alike: {what} is {first!r} on number {where} of them and "
                    f"{said!r} on number {number}. Start them alike, or leave one out of base_url.",
                    backend=backend.name,
                )
    return found


def _shown(ids: list[int] | None) -> str:
    return "unknown (it does not encode text)" if ids is None else f"{ids[:8]}"


async def _asked(ask: Callable[[Backend], Awaitable[T]], member: Backend) -> T:
    return await ask(member)


def _admin(member: _Member) -> EngineAdmin:
    return cast(EngineAdmin, member.backend)


def _raise_first(outcomes: Sequence[object]) -> None:
    failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    # What is no error of an engine's says more than those.
    for error in sorted(failed, key=lambda one: isinstance(one, BackendError)):
        raise error
