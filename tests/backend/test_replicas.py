"""Several servers as one backend: balancing, sessions and failed servers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.backends import (
    EOS,
    KINDS,
    PROMPT,
    SOON_S,
    TRIES,
    VOCAB,
    Kind,
    Waits,
    engine_name,
    engine_of,
    hash_policy,
    instant,
    over_sockets,
    request_of,
    soon,
)
from tito_conformance.testing import (
    THROTTLED,
    UNAVAILABLE,
    Fault,
    ScriptedEngine,
    always,
    first,
    scripted_server,
)
from tito_core.backend import BadRequestError, EngineConnectionError, ServerError, create_backend
from tito_core.backend.generate import generate, score
from tito_core.backend.protocol import Backend, EngineInfo, TokenChunk, TokenRequest
from tito_core.backend.replicas import OUT_S, Replicas, agreed
from tito_core.backend.retries import Retries
from tito_core.ledger.turn import Finish


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def replicas(kind: Kind, engines: Sequence[ScriptedEngine], **options: Any) -> tuple[Replicas, Clock]:
    addresses = [f"http://server{n}" for n in range(len(engines))]
    backend = create_backend(kind, addresses, http_transport=over_sockets(engines), **instant(options))
    assert isinstance(backend, Replicas)
    backend._clock = clock = Clock()
    return backend, clock


def of_session(session: str | None, request_id: str = "r") -> TokenRequest:
    return replace(request_of(request_id=request_id), session_id=session)


def taken(engines: Sequence[ScriptedEngine]) -> list[int]:
    return [len(engine.requests) for engine in engines]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_request_goes_where_the_fewest_are_running(kind: Kind) -> None:
    engines = [engine_of(kind) for _ in range(2)]
    backend, _ = replicas(kind, engines)
    await backend.connect()
    engines[0].state.pause()
    held = [asyncio.create_task(generate(backend, of_session(None, "held")))]
    await asyncio.sleep(0.02)
    for n in range(5):
        await generate(backend, of_session(None, f"free{n}"))
    assert taken(engines) == [1, 5]
    engines[0].state.resume()
    await asyncio.gather(*held)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_dead_server_is_left_out_for_a_while_and_its_sessions_move_for_good(kind: Kind) -> None:
    engines = [engine_of(kind) for _ in range(2)]
    waits = Waits()
    backend, clock = replicas(kind, engines, sleep=waits)
    await generate(backend, of_session("mine", "r0"))
    assert taken(engines) == [1, 0]
    engines[0].state.dead = True
    response = await generate(backend, of_session("mine", "r1"))
    assert response.request_id == "r1-retry1"
    assert taken(engines) == [1, 1]
    for n in range(3):
        await generate(backend, of_session(f"new{n}", f"n{n}"))
    assert taken(engines) == [1, 4]
    assert len(waits.seconds) == 1, "the dead one got no more requests"
    engines[0].state.dead = False
    clock.now += OUT_S
    await generate(backend, of_session("mine", "r2"))
    await generate(backend, of_session("later", "l"))
    assert taken(engines) == [2, 5]
    assert engines[0].requests[-1].request_id == "l"


@pytest.mark.parametrize("kind", KINDS)
async def test_with_all_servers_dead_tries_are_limited(kind: Kind) -> None:
    engines = [engine_of(kind, fault=always(Fault(reset_after=0))) for _ in range(3)]
    backend, _ = replicas(kind, engines, patience_s=TRIES[5])
    with pytest.raises(EngineConnectionError):
        await generate(backend, of_session("mine"))
    assert sum(taken(engines)) == 5
    assert min(taken(engines)) == 1
    assert await soon(lambda: [engine.running for engine in engines] == [0, 0, 0])


@pytest.mark.parametrize("kind", KINDS)
async def test_a_busy_server_keeps_its_sessions(kind: Kind) -> None:
    engines = [engine_of(kind, fault=first(2, THROTTLED)), engine_of(kind)]
    backend, _ = replicas(kind, engines)
    await generate(backend, of_session("mine"))
    assert taken(engines) == [3, 0]


@pytest.mark.parametrize("kind", KINDS)
async def test_one_server_away_while_others_live(kind: Kind) -> None:
    """A router in front of a server that is gone answers 503 for as long: its sessions move before they are lost."""
    engines = [engine_of(kind), engine_of(kind)]
    waits = Waits()
    backend, _ = replicas(kind, engines, sleep=waits)
    backend._clock = waits.clock
    await generate(backend, of_session("mine", "r0"))
    engines[0].fault = always(UNAVAILABLE)
    response = await generate(backend, of_session("mine", "r1"))
    assert OUT_S <= waits.clock() < 20
    assert (taken(engines)[1], response.request_id) == (1, engines[1].requests[0].request_id)
    before = taken(engines)
    await generate(backend, of_session("mine", "r2"))
    assert taken(engines) == [before[0], 2]


async def test_a_failed_server_is_left_out_and_a_refused_request_is_not_retried() -> None:
    engines = [engine_of("vllm", fault=always(Fault(status=500, body=b"oops"))), engine_of("vllm")]
    backend, _ = replicas("vllm", engines)
    await generate(backend, of_session("mine"))
    assert taken(engines) == [1, 1]
    engines[1].fault = always(Fault(status=422, body=b"no"))
    with pytest.raises(BadRequestError):
        await generate(backend, of_session("mine"))
    assert taken(engines) == [1, 2]


@pytest.mark.parametrize("kind", KINDS)
async def test_scores_and_samples_are_those_of_one_server(kind: Kind) -> None:
    engines = [engine_of(kind) for _ in range(2)]
    backend, _ = replicas(kind, engines)
    alone = create_backend(kind, "http://server0", http_transport=over_sockets(engines[:1]))
    for _ in range(2):
        several, one = await generate(backend, request_of(seed=7)), await generate(alone, request_of(seed=7))
        assert several.output_ids.tolist() == one.output_ids.tolist()
        assert (await score(backend, PROMPT))[1:].tolist() == (await score(alone, PROMPT))[1:].tolist()
    assert isinstance(backend, Backend)


@pytest.mark.parametrize("kind", KINDS)
async def test_an_unreachable_server_at_connect_is_named(kind: Kind) -> None:
    engines = [engine_of(kind), engine_of(kind)]
    engines[1].state.dead = True
    backend, _ = replicas(kind, engines, patience_s=TRIES[2])
    with pytest.raises(EngineConnectionError, match="http://server1"):
        await backend.connect()


@pytest.mark.parametrize("kind", KINDS)
async def test_an_abort_reaches_the_server_that_runs_it(kind: Kind) -> None:
    engines = [engine_of(kind, latency=60.0) for _ in range(2)]
    backend, _ = replicas(kind, engines)
    await backend.connect()
    tasks = [asyncio.create_task(generate(backend, of_session(None, f"r{n}"))) for n in range(2)]
    while [engine.running for engine in engines] != [1, 1]:
        await asyncio.sleep(0.01)
    await backend.abort("r1")
    await backend.abort("unknown")
    await asyncio.wait({tasks[1]})
    assert await soon(lambda: [engine.running for engine in engines] == [1, 0])
    tasks[0].cancel()
    await asyncio.wait(tasks)
    assert await soon(lambda: [engine.running for engine in engines] == [0, 0])


@pytest.mark.parametrize("kind", KINDS)
async def test_an_abort_reaches_the_server_that_a_retry_runs_on(kind: Kind) -> None:
    engines = [engine_of(kind, latency=60.0, fault=always(Fault(status=503))), engine_of(kind, latency=60.0)]
    backend, _ = replicas(kind, engines)
    await backend.connect()
    task = asyncio.create_task(generate(backend, of_session(None)))
    assert await soon(lambda: engines[1].running == 1)
    assert len(engines[0].requests) == 1
    await backend.abort("r")
    assert (await asyncio.wait_for(task, SOON_S)).finish == Finish.ABORT


@pytest.mark.parametrize("kind", KINDS)
def test_real_sockets_a_killed_server_and_a_loop_for_each_call(kind: Kind) -> None:
    settings: dict[str, Any] = {"vocab_size": VOCAB, "eos_ids": [EOS]}
    name = engine_name(kind)
    with (
        scripted_server(name, hash_policy(), **settings) as one,
        scripted_server(name, hash_policy(), **settings) as two,
    ):
        backend = create_backend(kind, [one.base_url, two.base_url], sleep=Waits())
        for n in range(4):
            asyncio.run(generate(backend, of_session(f"s{n}", f"r{n}")))
        assert taken([one.engine, two.engine]) == [2, 2]
        assert one._loop is not None
        asyncio.run_coroutine_threadsafe(one._die(), one._loop).result()
        for n in range(4):
            asyncio.run(generate(backend, of_session(f"s{n}", f"again{n}")))
        assert taken([one.engine, two.engine]) == [2, 6]


def test_a_list_of_addresses_is_checked() -> None:
    with pytest.raises(ValueError, match="base_url is an empty list"):
        create_backend("vllm", [])
    with pytest.raises(ValueError, match="base_url lists 'http://a' twice"):
        create_backend("vllm", ["http://a", "http://b", "http://a"])
    for one, other in (("http://a:80", "http://a:80/"), ("http://A", "http://a:80"), ("unix:///a", " unix:///a")):
        with pytest.raises(ValueError, match=f"one server twice, as '{one}' and '{other}': list each server once"):
            create_backend("vllm", [one, other])
    assert len(create_backend("vllm", ["unix:///a", "unix:///b"]).members) == 2  # type: ignore[attr-defined]


async def test_different_logprob_modes_are_refused_at_connect() -> None:
    from support.scripted import tokenizer
    from tito_core import Policy

    loaded = tokenizer()
    engines = [
        engine_of("vllm", vocab_size=len(loaded), raw_logprobs=raw, eos_ids=[loaded.eos_token_id])
        for raw in (True, False)
    ]
    for engine in engines:
        engine.script = type(hash_policy())(len(loaded), eos_ids=[loaded.eos_token_id])
    backend, _ = replicas("vllm", engines)
    with pytest.raises(BadRequestError, match="False on server 1 and True on server 2"):
        await Policy.connect_async(backend=backend, tokenizer=loaded)


class Update:
    """Loads new weights on all servers when one of them begins its last scores of connecting."""

    def __init__(self, backend: Any, of: int) -> None:
        self.backend, self.left, self.score = backend, of, backend.members[1].score
        backend.members[1].score = self

    async def __call__(self, *args: Any, **options: Any) -> Any:
        self.left -= 1
        if not self.left:
            await self.backend.load_weights("/w/1", "step-1")
        return await self.score(*args, **options)


@pytest.mark.parametrize("kind", KINDS)
async def test_replicas_of_one_version_with_other_weights_are_refused_at_connect(kind: Kind) -> None:
    """As after a restart from a stale checkpoint. Servers whose versions differ are told apart by each answer's."""
    from support.scripted import tokenizer
    from tito_core import Policy

    loaded = tokenizer()
    script = type(hash_policy())(len(loaded), alphabet=range(40, 90), eos_ids=[loaded.eos_token_id])
    engines = [engine_of(kind, script, vocab_size=len(loaded), eos_ids=[loaded.eos_token_id]) for _ in range(2)]
    for engine in engines:
        engine.state.load("/w/0")
    policy = await Policy.connect_async(backend=replicas(kind, engines)[0], tokenizer=loaded)
    scored = sum(request.scoring or not request.max_new_tokens for request in engines[1].requests)
    backend, _ = replicas(kind, engines)
    Update(backend, scored)
    await Policy.connect_async(backend=backend, tokenizer=loaded)
    assert await backend.weight_version() == "step-1"  # type: ignore[attr-defined]

    engines[1].state.load("/w/0")
    stale = "http://server0 and http://server1 have other weights, though both report the weights 'step-1'"
    with pytest.raises(BadRequestError, match=stale):
        await Policy.connect_async(backend=replicas(kind, engines)[0], tokenizer=loaded)
    engines[1].state.set_version("default")
    await Policy.connect_async(backend=replicas(kind, engines)[0], tokenizer=loaded)
    assert policy.info.weight_version == "default"


class Member:
    """A third party's backend, which fails with a given error."""

    name = "third"

    def __init__(self, error: Exception | None = None, shows: bool = False) -> None:
        self.error, self.shows, self.calls = error, shows, 0

    async def connect(self) -> EngineInfo:
        return EngineInfo("third", "m", 100, "1")

    async def generate(self, request: Any, on_chunk: Any = None) -> Any:
        self.calls += 1
        if self.shows:
            on_chunk(TokenChunk(np.array([5])))
        raise self.error or AssertionError

    score = tokenize = generate

    async def abort(self, request_id: str) -> None: ...

    async def aclose(self) -> None: ...


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("shows", [True, False])
async def test_what_was_streamed_is_not_sent_again(marked: bool, shows: bool) -> None:
    """Whether the backend marked its error, or only showed a chunk."""
    error = ServerError("down", backend="third")
    error.was_streamed = marked
    members: list[Any] = [Member(error, shows) for _ in range(2)]
    backend = Replicas(members, ["a", "b"], Retries(TRIES[2], sleep=(waits := Waits()), clock=waits.clock))
    seen: list[int] = []
    with pytest.raises(ServerError) as caught:
        await backend.generate(request_of(), lambda chunk: seen.extend(chunk.output_ids.tolist()))
    assert caught.value.was_streamed == (marked or shows)
    assert sum(member.calls for member in members) == (1 if marked or shows else 2)
    assert seen == [5] * shows


@given(st.lists(st.none() | st.integers(0, 1), min_size=1, max_size=4))
def test_servers_agree_in_every_known_fact(values: list[int | None]) -> None:
    members: list[Any] = [Member() for _ in values]
    backend = Replicas(members, [f"http://{number}" for number in range(len(members))], Retries(0))

    async def ask(member: Any) -> int | None:
        return values[members.index(member)]

    async def run() -> Any:
        return await agreed(backend, ask, lambda value: {"same": 5, "fact": value})

    known = {number: value for number, value in enumerate(values, 1) if value is not None}
    if len(set(known.values())) < 2:
        assert asyncio.run(run()) == values
        return
    holder, first = next(iter(known.items()))
    other = next(number for number, value in known.items() if value != first)
    with pytest.raises(BadRequestError, match=f"fact is {first} on server {holder} and {1 - first} on server {other}"):
        asyncio.run(run())


async def test_one_backend_agrees_with_itself() -> None:
    only: Any = Member()

    async def ask(member: Any) -> Any:
        return member

    assert await agreed(only, ask, lambda _: {"fact": 1}) == [only]
