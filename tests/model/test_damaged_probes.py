"""One damaged answer is a fault: a probe is sent again, and changes nothing that a policy finds out about a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import cache
from itertools import cycle
from typing import Any

import aiohttp
import pytest
from strands import Agent

from model.test_replaced_server import BACKENDS, Address
from support.backends import engine_of, in_process_backend, instant
from support.scripted import tokenizer
from tito_core import Policy
from tito_core.backend import Backend, DamagedAnswerError, EngineInfo, ServerChangedError
from tito_core.backend.http.client import HttpResponse
from tito_core.backend.http.watch import ServerWatch
from tito_core.backend.semantics import measure
from tito_core.policy import probe_ids
from tito_core.vocabulary import compare

DAMAGES: dict[str, Callable[[int, bytes], tuple[int, bytes, str]]] = {
    "cut": lambda status, body: (status, body[: len(body) // 2], "application/json"),
    "cut, of a gateway": lambda status, body: (200, b'{"status"', "application/json"),
    "another object": lambda status, body: (200, b'{"status": "starting"}', "application/json"),
    "another shape": lambda status, body: (200, b"[]", "application/json"),
    "empty": lambda status, body: (200, b"", ""),
    "502": lambda status, body: (502, b"<html>Bad Gateway</html>", "text/html"),
    "503": lambda status, body: (503, b"no healthy upstream", "text/plain"),
}
AWAY = ("closed", "502", "503")


class Damaged(Address):
    """A server of which the answer number `at` is damaged on its way."""

    def __init__(self, kind: str, damage: str = "", at: int = -1) -> None:
        super().__init__(kind)
        self.damage, self.at = damage, at

    async def send(self, *request: Any) -> Any:
        response = await super().send(*request)
        self.at -= 1
        if self.at != -1:
            return response
        if self.damage == "closed":
            raise aiohttp.ServerDisconnectedError
        status, body, kind = DAMAGES[self.damage](response.status, await response.read(1 << 22))

        async def raw() -> AsyncIterator[bytes]:
            yield body

        return HttpResponse(status, {"content-type": kind}, raw(), response.aclose)

    def backend(self, **options: Any) -> Any:
        return BACKENDS[self.kind]("http://scripted", **instant({"http_transport": lambda: self, **options}))


@cache
def connected(kind: str) -> Policy:
    return Policy.connect(backend=Damaged(kind).backend(), tokenizer=tokenizer())


async def found(backend: Backend, parts: Policy) -> Any:
    """Return what connecting finds out: the properties, how the vocabulary was compared, and the semantics."""
    info = await backend.connect()
    how = await compare(backend, info, parts.tokenizer, parts.template, parts.parser)
    return how, await measure(backend, info, probe_ids(parts.template))


@pytest.mark.parametrize("kind", BACKENDS)
async def test_a_damaged_answer_at_connect_changes_nothing_that_is_found(kind: str) -> None:
    """Each answer in turn, with one of the eight damages. Only a server that is away needs patience."""
    sound, parts = Damaged(kind), await asyncio.to_thread(connected, kind)
    expected = await found(sound.backend(), parts)
    damages = [*DAMAGES, "closed"]
    for at in range(sound.requests):
        damage = damages[(at + 3 * [*BACKENDS].index(kind)) % len(damages)]
        backend = Damaged(kind, damage, at).backend(patience_s=60 if damage in AWAY else 0)
        assert await found(backend, parts) == expected, (at, damage)


@pytest.mark.parametrize("kind", BACKENDS)
async def test_a_damaged_answer_to_the_check_of_an_interruption_is_no_other_server(kind: str) -> None:
    """Each answer of the check in turn, with one damage after the other."""
    address = Damaged(kind)
    policy = await Policy.connect_async(backend=address.backend(), tokenizer=tokenizer())
    backend: Any = policy.backend
    known, connects = await backend.connect(), address.requests
    for at, damage in zip(range(connects), cycle((*DAMAGES, "closed")), strict=False):
        backend.http.interruptions += 1
        address.at, address.damage, before = at, damage, address.requests
        await backend.watch.after(backend, known, backend.discover, None)
        assert backend.watch.due == (damage in AWAY), "a connection that breaks in a check makes another due"
        assert address.requests > before + at


@pytest.mark.parametrize("damage", AWAY)
@pytest.mark.parametrize("kind", BACKENDS)
async def test_a_restart_behind_a_gateway_is_noticed(kind: str, damage: str) -> None:
    """The gateway's connection broke and not ours: it answered a page, and the next server has another logprob mode."""
    address = Damaged(kind)
    policy = await Policy.connect_async(backend=address.backend(), tokenizer=tokenizer())
    model = policy.model()
    address.engine, address.at, address.damage = address.started(raw_logprobs=kind == "sglang"), 0, damage
    with pytest.raises(ServerChangedError, match=r"Law 11: .*processed_logprobs was"):
        await Agent(model=model, callback_handler=None).invoke_async("How are you?")
    assert len(model.ledger) == 0


async def test_a_check_that_began_before_an_interruption_is_followed_by_another() -> None:
    """The first may have measured the server before it."""
    seen, checked, began, go = [1], list[int](), asyncio.Event(), asyncio.Event()
    server = in_process_backend(engine_of("vllm"))
    known = await server.connect()

    async def check(server: Backend, info: EngineInfo) -> None:
        checked.append(seen[0])
        began.set()
        await go.wait()

    async def discover() -> EngineInfo:
        return known

    watch = ServerWatch(lambda: seen[0])
    watch.add("policy", check)
    first = asyncio.create_task(watch.after(server, known, discover, None))
    await began.wait()
    seen[0] += 1
    second = asyncio.create_task(watch.after(server, known, discover, None))
    await asyncio.sleep(0)
    go.set()
    await asyncio.gather(first, second)
    assert checked == [1, 2]


@pytest.mark.parametrize("kind", BACKENDS)
async def test_a_damaged_answer_to_a_turn_is_an_error(kind: str) -> None:
    """It is not sampled again: that would select the answers that are not damaged."""
    address = Damaged(kind)
    policy = await Policy.connect_async(backend=address.backend(), tokenizer=tokenizer())
    model, sent = policy.model(), address.requests
    address.at, address.damage = 0, "cut"
    with pytest.raises(DamagedAnswerError):
        await Agent(model=model, callback_handler=None).invoke_async("How are you?")
    assert (len(model.ledger), address.requests) == (0, sent + 1)
