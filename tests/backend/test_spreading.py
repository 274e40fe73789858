"""`Replicas` over recording fakes: which server gets which request, and which error is raised."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.backends import TRIES, Waits, request_of
from tito_core.backend import (
    BadRequestError,
    EngineConnectionError,
    EngineInfo,
    RawResponse,
    RawScores,
    ThrottledError,
    create_backend,
)
from tito_core.backend import replicas as module
from tito_core.backend.generate import score
from tito_core.backend.replicas import OUT_S, Replicas, replicas_of
from tito_core.backend.retries import Retries

INFO = EngineInfo("fake", "m", 100, "1", "w1")


class Member:
    """A backend that answers at once, or after `act`."""

    name = "fake"

    def __init__(self, info: EngineInfo = INFO, act: Callable[[], Awaitable[Any]] | None = None) -> None:
        self.info, self.act = info, act
        self.calls: list[tuple[Any, ...]] = []
        self.watchers: list[Any] = []

    async def _done(self, *call: Any) -> None:
        self.calls.append(call)
        if self.act is not None:
            await self.act()

    async def connect(self) -> EngineInfo:
        await self._done("connect")
        return self.info

    async def generate(self, request: Any, on_chunk: Any = None) -> RawResponse:
        self.watchers.append(on_chunk)
        await self._done("generate", request.request_id)
        return RawResponse(
            finish="stop",
            stop=7,
            output_ids=[7],
            logprobs=[-1.0],
            echoed=request.input_ids,
            prompt_tokens=len(request.input_ids),
            completion_tokens=1,
            request_id=request.request_id,
            response_id=request.request_id,
        )

    async def score(self, token_ids: Any) -> Any:
        await self._done("score", list(token_ids))
        return RawScores(logprobs=[None, *[0.0] * (len(token_ids) - 1)])

    async def tokenize(self, text: str) -> Any:
        await self._done("tokenize", text)
        return np.array([len(text)], np.int32)

    async def abort(self, request_id: str) -> None:
        await self._done("abort", request_id)

    async def aclose(self) -> None:
        await self._done("aclose")


class Trained(Member):
    """One whose weights can be changed."""

    async def pause(self, running: str = "keep") -> None:
        await self._done("pause", running)

    async def resume(self) -> None:
        await self._done("resume")

    async def load_weights(self, path: str, version: str, *, running: str = "keep", **more: bool) -> None:
        await self._done("load", path, version, running, *more)

    async def weight_version(self) -> str | None:
        await self._done("version")
        return self.info.weight_version

    async def load_adapter(self, name: str, path: str) -> None:
        await self._done("load adapter", name, path)

    async def unload_adapter(self, name: str) -> None:
        await self._done("unload adapter", name)


def spread(*members: Member, attempts: int = 4) -> Replicas:
    addresses = [f"http://s{n}" for n in range(len(members))]
    waits = Waits()
    return replicas_of(members, addresses, Retries(TRIES[attempts], sleep=waits, clock=waits.clock))


async def ask(backend: Replicas, request_id: str, session: str | None = None, on_chunk: Any = None) -> RawResponse:
    request = replace(request_of(request_id=request_id), session_id=session)
    return await (backend.generate(request) if on_chunk is None else backend.generate(request, on_chunk))


def generated(member: Member) -> list[str]:
    return [call[1] for call in member.calls if call[0] == "generate"]


async def fails(error: BaseException) -> None:
    raise error


def test_replicas_have_the_name_and_members_of_their_servers() -> None:
    first, second = Member(), Trained()
    first.name = "one"
    backend = spread(first, second)
    assert (backend.name, backend.members) == ("one", (first, second))
    assert type(backend) is Replicas, "not all of them can change their weights"
    assert type(spread(Trained(), Trained())) is module.AdminReplicas
    with pytest.raises(ValueError, match="zip"):
        Replicas([first, second], ["http://a"], Retries())


def test_patience_is_counted_over_all_servers_and_not_by_each() -> None:
    waits = Waits()
    backend: Any = create_backend(
        "vllm", ["http://a", "http://b"], patience_s=7, sleep=waits, clock=waits.clock, timeout_s=3.0
    )
    retries = backend._retries
    assert (retries.patience_s, retries.pause_s, retries.sleep, retries._clock) == (7, 3.0, waits, waits.clock)
    assert [member.http.retries.patience_s for member in backend.members] == [0, 0]
    assert [(member.http.base_url, member.http.connection.timeout_s) for member in backend.members] == [
        ("http://a", 3.0),
        ("http://b", 3.0),
    ]
    assert [member.address for member in backend._members] == ["http://a", "http://b"]
    alone: Any = create_backend("vllm", "http://a", timeout_s=3.0)
    assert (alone.http.base_url, alone.http.connection.timeout_s) == ("http://a", 3.0)
    plain: Any = create_backend("vllm", ["http://a"])
    assert (plain._retries.patience_s, plain._retries.pause_s) == (60, 600)


@given(lengths=st.lists(st.none() | st.integers(1, 9), min_size=1, max_size=4), weights=st.data())
def test_connect_reports_what_all_servers_share(lengths: list[int | None], weights: st.DataObject) -> None:
    versions = [weights.draw(st.sampled_from(["w1", "w2", None])) for _ in lengths]
    members = [
        Member(replace(INFO, max_model_len=length, weight_version=version))
        for length, version in zip(lengths, versions, strict=True)
    ]
    info = asyncio.run(spread(*members).connect())
    known = [length for length in lengths if length is not None]
    assert info.max_model_len == (min(known) if known else None)
    assert info.weight_version == (versions[0] if len(set(versions)) == 1 else None)
    assert replace(info, max_model_len=None, weight_version=None) == replace(
        INFO, max_model_len=None, weight_version=None
    )


async def test_connect_is_retried_per_server_and_cached() -> None:
    shy = Member()
    tries = iter([EngineConnectionError("not yet", backend="fake"), None])

    async def act() -> None:
        if (error := next(tries, None)) is not None:
            raise error

    shy.act = act
    backend = spread(Member(), shy)
    assert await backend.connect() is await backend.connect()
    assert [member.calls for member in backend.members] == [[("connect",)], [("connect",)] * 2]


@pytest.mark.parametrize("what", ["model", "version", "vocab_size", "endpoints", "capabilities"])
async def test_servers_that_differ_are_refused(what: str) -> None:
    capabilities = replace(INFO.capabilities, top_logprobs=1)
    other = {"vocab_size": 5, "endpoints": ("/x",), "capabilities": capabilities}.get(what, "other")
    backend = spread(Member(), Member(replace(INFO, **{what: other})))
    with pytest.raises(BadRequestError) as caught:
        await backend.connect()
    assert f"{what} is {getattr(INFO, what)!r} at http://s0 and {other!r} at http://s1." in str(caught.value)
    assert "base_url" in str(caught.value)
    assert caught.value.backend == "fake"


async def test_on_chunk_is_passed_on_only_if_given() -> None:
    member = Member()
    backend = spread(member, Member())
    watcher: list[Any] = []
    await ask(backend, "a", "s", watcher.append)
    await ask(backend, "b", "s")
    given, none = member.watchers
    given("a chunk")
    assert watcher == ["a chunk"]
    assert none is None


async def test_a_retry_goes_to_another_server_with_its_own_id() -> None:
    members = [Member() for _ in range(3)]
    backend = spread(*members)
    now = [0.0]
    backend._clock = lambda: now[0]
    await backend.connect()
    for member in members[:2]:
        member.act = lambda: fails(EngineConnectionError("gone", backend="fake"))
    response = await ask(backend, "r", "mine")
    assert response.request_id == "r-retry2"
    assert [generated(member) for member in members] == [["r"], ["r-retry1"], ["r-retry2"]]
    # the two are out, and back when their time is over; what they then do well clears them
    for n in range(4):
        await ask(backend, f"n{n}")
    assert len(generated(members[2])) == 5
    for member in members[:2]:
        member.act = None
    now[0] = OUT_S
    for n in range(4):
        await ask(backend, f"m{n}")
    assert [len(generated(member)) for member in members] == [3, 3, 5]


async def test_a_throttled_request_without_session_goes_to_another_server() -> None:
    members = [Member(act=lambda: fails(ThrottledError("busy", backend="fake"))), Member(), Member()]
    backend = spread(*members)
    backend._info = INFO
    backend._members[1].assigned = backend._members[2].assigned = 5
    assert (await ask(backend, "r")).request_id == "r-retry1"
    assert [generated(member) for member in members] == [["r"], ["r-retry1"], []]
    # where all were tried, any of them is asked again
    alone = spread(Member(act=lambda: fails(ThrottledError("busy", backend="fake"))), attempts=3)
    alone._info = INFO
    with pytest.raises(ThrottledError):
        await ask(alone, "r")
    assert generated(alone.members[0]) == ["r", "r-retry1", "r-retry2"]


async def test_a_backend_that_cannot_stream_gets_no_on_chunk() -> None:
    class Old(Member):
        async def generate(self, request: Any) -> RawResponse:
            return await super().generate(request)

    assert (await ask(spread(Old(), Old()), "r")).request_id == "r"


async def test_of_left_out_servers_the_one_out_longest_is_tried() -> None:
    members = [Member(act=lambda: fails(EngineConnectionError("gone", backend="fake"))) for _ in range(2)]
    backend = spread(*members, attempts=1)
    backend._info = INFO
    now = [0.0]
    backend._clock = lambda: now[0]
    for name in "abcd":
        with pytest.raises(EngineConnectionError):
            await ask(backend, name)
        now[0] += 1.0
    assert [generated(member) for member in members] == [["a", "c"], ["b", "d"]]


async def test_a_busy_server_gets_no_requests_without_session() -> None:
    gate = asyncio.Event()
    members = [Member(act=gate.wait), Member(act=gate.wait), Member(act=gate.wait)]
    backend = spread(*members)
    backend._info = INFO
    tasks = [asyncio.ensure_future(ask(backend, f"r{n}")) for n in range(7)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [len(generated(member)) for member in members] == [3, 2, 2]
    gate.set()
    await asyncio.gather(*tasks)
    # nothing runs now: the one that was given the fewest is next
    await ask(backend, "next")
    assert generated(members[1])[-1] == "next"


async def test_the_least_recent_session_is_forgotten_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SESSIONS", 2)
    backend = spread(Member(), Member())
    backend._info = INFO
    await ask(backend, "none")
    assert list(backend._sessions) == []
    for n, session in enumerate(["a", "b", "a", "c"]):
        await ask(backend, f"r{n}", session)
        assert len(backend._sessions) <= 2
    assert list(backend._sessions) == ["a", "c"]


async def test_concurrent_scores_count_as_two() -> None:
    gate = asyncio.Event()
    members = [Member(act=gate.wait), Member(act=gate.wait)]
    backend = spread(*members)
    backend._info = INFO
    tasks = [asyncio.ensure_future(score(backend, [n, n])) for n in range(4)]
    for _ in range(3):
        await asyncio.sleep(0)
    assert [sorted(len(member.running) for member in backend._members)] == [[2, 2]]
    gate.set()
    assert [len(await task) for task in tasks] == [2] * 4
    assert [sorted(call[1] for call in member.calls) for member in members] == [[[0, 0], [2, 2]], [[1, 1], [3, 3]]]
    assert [member.running for member in backend._members] == [{}, {}]


async def test_a_failed_abort_is_raised_only_by_the_running_server() -> None:
    gate = asyncio.Event()
    members = [Member(act=gate.wait), Member()]
    backend = spread(*members)
    backend._info = INFO
    task = asyncio.ensure_future(ask(backend, "r"))
    await asyncio.sleep(0)
    members[0].act = members[1].act = lambda: fails(EngineConnectionError("gone", backend="fake"))
    with pytest.raises(EngineConnectionError):
        await backend.abort("r")
    await backend.abort("unknown")
    assert [member.calls[-1] for member in members] == [("abort", "unknown")] * 2
    gate.set()
    await task


async def test_work_on_all_servers_completes_and_raises_our_own_errors_first() -> None:
    members = [
        Trained(act=lambda: fails(EngineConnectionError("gone", backend="fake"))),
        Trained(act=lambda: fails(KeyError("strange"))),
        Trained(),
    ]
    backend: Any = spread(*members)
    for call in (backend.aclose, backend.pause, backend.resume, backend.weight_version):
        with pytest.raises(KeyError, match="strange"):
            await call()
    assert [len(member.calls) for member in members] == [4, 4, 4]
    members[1].act = None
    with pytest.raises(EngineConnectionError, match="gone"):
        await backend.aclose()


async def test_load_weights_passes_its_arguments_to_all() -> None:
    members = [Trained(), Trained()]
    backend: Any = spread(*members)
    await backend.pause()
    await backend.pause("abort")
    await backend.load_weights("/w", "v2", running="abort")
    await backend.load_weights("/w", "v3")
    await backend.load_weights("/w", "v4", images_uncached=True)
    await backend.resume()
    expected = [("pause", "keep"), ("pause", "abort"), ("load", "/w", "v2", "abort"), ("load", "/w", "v3", "keep")]
    expected.append(("load", "/w", "v4", "keep", "images_uncached"))
    assert [member.calls for member in members] == [[*expected, ("resume",)]] * 2
    assert await backend.weight_version() == "w1"
    members[1].info = replace(INFO, weight_version="w2")
    assert await backend.weight_version() is None
