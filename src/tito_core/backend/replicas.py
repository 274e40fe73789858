"""Several servers of one model as one backend: least loaded first, sticky sessions, failed servers are paused."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import numpy as np

from tito_core.backend.errors import (
    BackendError,
    BadRequestError,
    EngineConnectionError,
    EngineTimeoutError,
    ServerError,
    ThrottledError,
    UnsupportedByServerError,
)
from tito_core.backend.generate import connected, score, tokenize
from tito_core.backend.images import PromptImages
from tito_core.backend.protocol import (
    Backend,
    EngineAdmin,
    EngineInfo,
    OnChunk,
    RawResponse,
    RawScores,
    Running,
    TokenChunk,
    TokenRequest,
)
from tito_core.backend.retries import Retries, attempt_id, is_paused
from tito_core.ledger.columns import Logprobs, TokenIds

T = TypeVar("T")
OUT_S = 10.0
"""Seconds without requests for a server that was unreachable, failed or timed out, or refused all (429, 503) for as
long."""
SESSIONS = 1 << 16
"""Maximum number of sessions whose server is remembered; the least recently used is forgotten first."""

OTHER_WEIGHTS_NATS = 0.5
"""Scores are of other weights if a quarter of the tokens differ by more than this: bfloat16 and the other requests of a
batch move most tokens by less than 0.1 nats."""
UPDATE_S = 5.0
"""Seconds until servers with other weights are asked again."""


class Replicas:
    """Balances requests over backends of equal servers. Threads and event loops may share it.

    A session stays with its server, whose prefix cache holds its history, also while the server is paused or briefly
    busy (429, 503). If the server fails, the session moves to another one and stays there. A request without a session
    goes to the server with the fewest running requests. Patience is counted over all servers.

    Args:
        members: One backend per server, without retries of its own.
        addresses: The address of each server, for errors.
        retries: How long a request is tried, and the waits between tries.
        clock: Returns seconds; measures how long a server is left out.
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
        self.addresses = tuple(addresses)
        self._members = [_Member(*pair) for pair in zip(members, addresses, strict=True)]
        self._retries = retries
        self._clock = clock
        self._sessions: OrderedDict[str, _Member] = OrderedDict()
        self._lock = threading.Lock()
        self._info: EngineInfo | None = None

    async def connect(self) -> EngineInfo:
        """Query all servers. Return the shortest context, and a weight version only if all servers agree.

        Raises:
            BadRequestError: The servers differ in model, engine version or capabilities.
            BackendError: A server could not be queried.
        """
        if self._info is None:
            infos = await self.on_each(connected)
            self._check_equal(infos)
            lengths = [info.max_model_len for info in infos if info.max_model_len is not None]
            weights = {info.weight_version for info in infos}
            self._info = replace(
                infos[0],
                max_model_len=min(lengths, default=None),
                weight_version=weights.pop() if len(weights) == 1 else None,
            )
        return self._info

    def _check_equal(self, infos: Sequence[EngineInfo]) -> None:
        first = infos[0]
        for member, info in zip(self._members, infos, strict=True):
            for name in ("model", "version", "vocab_size", "endpoints", "capabilities", "unreported", "images"):
                one, other = getattr(first, name), getattr(info, name)
                if one != other:
                    raise BadRequestError(
                        f"The {self.name} servers differ, so a rollout cannot move between them: "
                        f"{name} is {one!r} at {self._members[0].address} and {other!r} at {member.address}. "
                        "Start them with the same settings, or remove one from base_url.",
                        backend=self.name,
                    )

    async def check_weights(self, ids: TokenIds) -> None:
        """Check that servers of one weight version, or of unknown ones, score a prompt alike.

        Args:
            ids: The prompt, int32, shape (n,).

        Raises:
            BadRequestError: They have other weights.
            BackendError: A server could not be queried.
        """
        room = (await self.connect()).max_model_len
        if room is not None and room <= len(ids):  # scoring needs room for one more token on vLLM
            return

        async def difference() -> str | None:
            return self._other_weights(await self.on_each(lambda backend: _weighed(backend, ids)))

        if await difference():
            await self._retries.sleep(UPDATE_S)  # the servers may be getting new weights, one after the other
            if problem := await difference():
                raise BadRequestError(problem, backend=self.name)

    def _other_weights(self, found: Sequence[_Weighed]) -> str | None:
        """Return which servers of one version have scores of other weights, or None."""
        first: dict[str | None, tuple[str, Logprobs]] = {}
        for address, (before, version, scores) in zip(self.addresses, found, strict=True):
            if before != version:
                continue
            holder, known = first.setdefault(version, (address, scores))
            apart = float(np.nanquantile(np.abs(scores - known), 0.75))
            if apart > OTHER_WEIGHTS_NATS:
                named = "do not report their weight version" if version is None else f"report the weights {version!r}"
                return (
                    f"The {self.name} servers at {holder} and {address} have other weights, though both {named}: a "
                    f"quarter of {len(scores)} tokens score {apart:.3g} nats apart or more. Load the same checkpoint "
                    "on both, or remove one from base_url."
                )
        return None

    async def generate(self, request: TokenRequest, on_chunk: OnChunk | None = None) -> RawResponse:
        """Sample one completion on one of the servers; see `Backend.generate`."""
        await self.connect()
        tried: list[_Member] = []
        was_streamed = False

        def show(chunk: TokenChunk) -> None:
            nonlocal was_streamed
            was_streamed = True
            if on_chunk is not None:
                on_chunk(chunk)

        async def one_try(number: int) -> RawResponse:
            named = replace(request, request_id=attempt_id(request.request_id, number))
            async with self._chosen(request.session_id, request.request_id, tried, named.request_id) as member:
                try:
                    return await (
                        member.backend.generate(named) if on_chunk is None else member.backend.generate(named, show)
                    )
                except BackendError as error:
                    error.was_streamed |= was_streamed  # a third party's backend need not set it; it prevents a retry
                    raise

        return await self._retries(one_try)

    async def score(self, token_ids: TokenIds, **adapter: Any) -> RawScores:
        """Score a sequence on one of the servers; see `Backend.score`."""
        return await self._scored(lambda backend: backend.score(token_ids, **adapter))

    async def score_with_images(self, token_ids: TokenIds, images: PromptImages, **adapter: Any) -> RawScores:
        """Score a sequence with images on one of the servers; see `ImageScorer`."""
        return await self._scored(lambda backend: _able(backend, "score_with_images")(token_ids, images, **adapter))

    async def score_ids(self, token_ids: TokenIds, of: TokenIds) -> RawScores:
        """Score on one of the servers; see `IdScorer`."""
        return await self._scored(lambda backend: _able(backend, "score_ids")(token_ids, of))

    async def _scored(self, score: Callable[[Backend], Awaitable[RawScores]]) -> RawScores:
        await self.connect()
        tried: list[_Member] = []

        async def one_try(number: int) -> RawScores:
            async with self._chosen(None, f"score-{id(tried)}-{number}", tried) as member:
                return await score(member.backend)

        return await self._retries(one_try)

    async def tokenize(self, text: str) -> TokenIds | None:
        """Encode text on every server; see `Backend.tokenize`.

        Raises:
            BadRequestError: They return different ids, or only some of them can encode text.
        """
        await self.connect()
        found = await self.on_each(lambda backend: tokenize(backend, text))
        first, *_ = known = [None if ids is None else ids.tolist() for ids in found]
        for member, ids in zip(self._members, known, strict=True):
            if ids != first:
                raise BadRequestError(
                    f"The {self.name} servers differ: the ids of {text[:60]!r} are {_shown(first)} at "
                    f"{self._members[0].address} and {_shown(ids)} at {member.address}. Start them with the same "
                    "tokenizer, or remove one from base_url.",
                    backend=self.name,
                )
        return found[0]

    @asynccontextmanager
    async def _chosen(
        self, session: str | None, request_id: str, tried: list[_Member], running: str = ""
    ) -> AsyncIterator[_Member]:
        """Choose a server, count the request as running on it, and leave the server out for a while if it fails."""
        with self._lock:
            member = self._choose(session, tried)
            tried.append(member)
            member.running[request_id] = running
            member.assigned += 1
        try:
            yield member
        except (EngineConnectionError, EngineTimeoutError, ServerError):
            member.out_until = self._clock() + OUT_S
            raise
        except ThrottledError as error:
            self._busy(member, error)
            raise
        else:
            member.out_until, member.busy_since = 0.0, None
        finally:
            member.running.pop(request_id, None)

    def _busy(self, member: _Member, error: ThrottledError) -> None:
        """Leave a server out that has answered nothing but 429 and 503 for a while; a paused one keeps its sessions."""
        now = self._clock()
        if is_paused(error):
            member.busy_since = None
        elif member.busy_since is None:
            member.busy_since = now
        elif now - member.busy_since >= OUT_S:
            member.out_until, member.busy_since = now + OUT_S, None

    def _choose(self, session: str | None, tried: Sequence[_Member]) -> _Member:
        now = self._clock()
        available = [member for member in self._members if member.out_until <= now]
        known = None if session is None else self._sessions.get(session)
        if known is not None and known in available:
            member = known
        elif available:
            fresh = [one for one in available if one not in tried] or available
            member = min(fresh, key=lambda one: (len(one.running), one.assigned))
        else:  # every server is left out: choose the one that failed first
            member = min(self._members, key=lambda one: one.out_until)
        if session is not None:
            self._sessions[session] = member
            self._sessions.move_to_end(session)
            if len(self._sessions) > SESSIONS:
                self._sessions.popitem(last=False)
        return member

    async def abort(self, request_id: str) -> None:
        """Stop a generation on its server; on all servers if its server is not known."""
        running = [member for member in self._members if request_id in member.running]
        outcomes = await asyncio.gather(
            *(member.backend.abort(member.running.get(request_id, request_id)) for member in running or self._members),
            return_exceptions=True,
        )
        if running:
            _raise_first(outcomes)

    async def aclose(self) -> None:
        """Close this event loop's connections to all servers."""
        await self._each(lambda member: member.backend.aclose())

    async def on_each(self, work: Callable[[Backend], Awaitable[T]]) -> list[T]:
        """Call `work` for all servers concurrently, each as long as the patience lasts; then raise the first error."""
        return await self._each(lambda member: self._retries(lambda _: work(member.backend)))

    async def _each(self, work: Callable[[_Member], Awaitable[T]]) -> list[T]:
        """Call `work` for all servers concurrently, wait for all, then raise the first error."""
        outcomes = await asyncio.gather(*map(work, self._members), return_exceptions=True)
        _raise_first(outcomes)
        return cast(list[T], outcomes)


class AdminReplicas(Replicas):
    """Replicas whose servers can change their weights: each call goes to all servers."""

    async def pause(self, running: Running = "keep") -> None:
        """See `EngineAdmin.pause`."""
        await self._each(lambda member: _admin(member).pause(running))

    async def resume(self) -> None:
        """See `EngineAdmin.resume`."""
        await self._each(lambda member: _admin(member).resume())

    async def load_weights(
        self, path: str, version: str, *, running: Running = "keep", images_uncached: bool = False
    ) -> None:
        """See `EngineAdmin.load_weights`; every server must see the folder. A server that fails stays paused."""
        more = {"images_uncached": True} if images_uncached else {}  # a third party's backend may lack it
        await self._each(lambda member: _admin(member).load_weights(path, version, running=running, **more))

    async def weight_version(self) -> str | None:
        """Return the version that all servers report, or None if they differ."""
        versions = set(await self._each(lambda member: _admin(member).weight_version()))
        return versions.pop() if len(versions) == 1 else None

    async def load_adapter(self, name: str, path: str) -> None:
        """See `EngineAdmin.load_adapter`; every server must see the folder.

        After a failure, call it again: servers that have loaded the adapter from this folder are left out.
        """
        lacking = [member for member in self._members if member.adapters.get(name) != path] or self._members

        async def load(member: _Member) -> None:
            if member in lacking:
                await _admin(member).load_adapter(name, path)
                member.adapters[name] = path

        await self._each(load)

    async def unload_adapter(self, name: str) -> None:
        """See `EngineAdmin.unload_adapter`."""

        async def unload(member: _Member) -> None:
            await _admin(member).unload_adapter(name)
            member.adapters.pop(name, None)

        await self._each(unload)


def replicas_of(members: Sequence[Backend], addresses: Sequence[str], retries: Retries) -> Replicas:
    """Return one backend for several; it is an `EngineAdmin` if all of them are."""
    administered = all(isinstance(member, EngineAdmin) for member in members)
    return (AdminReplicas if administered else Replicas)(members, addresses, retries)


def servers_of(backend: Backend) -> tuple[Backend, ...]:
    """Return the backend of each server."""
    return backend.members if isinstance(backend, Replicas) else (backend,)


def addresses_of(backend: Backend) -> tuple[str, ...]:
    """Return the address of each server, for errors; the backend's name where it has one server."""
    return backend.addresses if isinstance(backend, Replicas) else (backend.name,)


async def on_each(backend: Backend, work: Callable[[Backend], Awaitable[T]]) -> list[T]:
    """Call `work` for a backend, or for each server of `Replicas`; see `Replicas.on_each`."""
    return await backend.on_each(work) if isinstance(backend, Replicas) else [await work(backend)]


async def agreed(
    backend: Backend, ask: Callable[[Backend], Awaitable[T]], facts: Callable[[T], Mapping[str, object]]
) -> Sequence[T]:
    """Query a backend, or each server of `Replicas`; return the answers after checking that their facts agree.

    A fact that is None is unknown and agrees with any value.

    Raises:
        BadRequestError: The servers differ; the message names the first different fact.
    """
    answers = await on_each(backend, ask)
    known: dict[str, tuple[object, int]] = {}
    for number, each in enumerate(map(facts, answers), 1):
        for name, value in each.items():
            first, holder = known.setdefault(name, (value, number)) if value is not None else (None, number)
            if first != value:
                raise BadRequestError(
                    f"The {backend.name} servers differ: {name} is {first!r} on server {holder} and {value!r} on "
                    f"server {number}. Start them with the same settings, or remove one from base_url.",
                    backend=backend.name,
                )
    return answers


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """Open an `asyncio.TaskGroup` that raises its first error itself, not an `ExceptionGroup` that holds it.

    The first error cancels the group's other tasks.
    """
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None


@dataclass(slots=True, eq=False)
class _Member:
    backend: Backend
    address: str
    running: dict[str, str] = field(default_factory=dict)
    """Its requests, each with the id of the try that runs on it."""
    assigned: int = 0
    out_until: float = 0.0
    busy_since: float | None = None
    adapters: dict[str, str] = field(default_factory=dict)
    """The folder of each adapter that was loaded from here."""


def _shown(ids: list[int] | None) -> str:
    return "unknown (it does not encode text)" if ids is None else f"{ids[:8]}"


_Weighed = tuple[str | None, str | None, Logprobs]
"""A server's weight version before and after its scores, and these."""


async def _weighed(backend: Backend, ids: TokenIds) -> _Weighed:
    if isinstance(backend, EngineAdmin):
        before, scores = await backend.weight_version(), await score(backend, ids)
        return before, await backend.weight_version(), scores
    version = (await connected(backend)).weight_version
    return version, version, await score(backend, ids)


def _able(backend: Backend, method: str) -> Callable[..., Awaitable[RawScores]]:
    """Return an optional method of a backend.

    Raises:
        UnsupportedByServerError: A third party's backend lacks it.
    """
    found: Callable[..., Awaitable[RawScores]] | None = getattr(backend, method, None)
    if found is None:
        problem = f"The backend {backend.name!r} cannot score this: it has no {method}()."
        raise UnsupportedByServerError(f"{problem} Score tokens alone.", backend=backend.name)
    return found


def _admin(member: _Member) -> EngineAdmin:
    return cast(EngineAdmin, member.backend)


def _raise_first(outcomes: Sequence[object]) -> None:
    failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    # Errors of our own code are more informative than those of an engine.
    for error in sorted(failed, key=lambda one: isinstance(one, BackendError)):
        raise error
