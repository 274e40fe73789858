"""`Workers`: the servers behind a router are compared, and each gets new weights, pauses and adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from support.backends import EOS, KINDS, VOCAB, Kind, engine_of, hash_policy, instant, over_sockets
from tito_conformance.testing import ScriptedEngine
from tito_conformance.testing.wire import FRESH
from tito_core.backend import (
    AdapterNotInEffectError,
    BadRequestError,
    EngineAdmin,
    EngineConnectionError,
    Workers,
    create_backend,
)
from tito_core.backend.values import InvalidValueError
from tito_core.ledger.turn import Adapter

IDS = np.arange(10, 40, dtype=np.int32)
ADDRESSES = ["http://server0", "http://server1", "http://server2"]


def served(kind: Kind, **options: Any) -> ScriptedEngine:
    alphabet = {"vocab_size": VOCAB, "eos_ids": [EOS], "adapters": ("one", "two"), **options}
    return engine_of(kind, hash_policy(), **alphabet)


def workers_of(kind: Kind, engines: list[ScriptedEngine]) -> Workers:
    return Workers(kind, ADDRESSES[: len(engines)], http_transport=over_sockets(engines), **instant({}))


def loaded(version: str) -> Callable[[ScriptedEngine], None]:
    def load(engine: ScriptedEngine) -> None:
        for folder in ("/w/0", "/w/1"):  # the first is that of the weights that it started with
            engine.state.load(folder)
        engine.state.set_version(version)

    return load


def named(adapter: str) -> Callable[[ScriptedEngine], None]:
    return lambda engine: engine.state.adapters.update(one=adapter)


@pytest.mark.parametrize(
    ("kind", "options", "change", "adapter", "match"),
    [
        ("sglang", {}, None, "one", ""),
        ("vllm", {"max_model_len": 999}, None, None, ""),
        ("vllm", {"model": "other"}, None, None, "model is 'scripted' at {0} and 'other' at {1}"),
        ("sglang", {}, loaded("new"), None, "weight_version is 'default' at {0} and 'new' at {1}"),
        ("vllm", {}, loaded("default"), None, "{0} and {1} have other weights: a quarter of 30"),
        ("sglang", {}, named("two"), "one", "{0} and {1} have other weights for one"),
        ("vllm", {}, named(FRESH), "one", "scores as the model alone"),
    ],
)
async def test_servers_are_compared(
    kind: Kind,
    options: dict[str, Any],
    change: Callable[[ScriptedEngine], None] | None,
    adapter: str | None,
    match: str,
) -> None:
    engines = [served(kind), served(kind), served(kind, **options)]
    workers = workers_of(kind, engines)
    given = None if adapter is None else Adapter(adapter)
    if not options:
        await workers.check(IDS, given)
    if change is not None:
        change(engines[2])  # after the check, as a server that was replaced
    if not match:
        await workers.check(IDS, given)
    else:
        error = BadRequestError if given is None else AdapterNotInEffectError
        with pytest.raises(error, match=match.format(ADDRESSES[0], ADDRESSES[2])):
            await workers.check(IDS, given)
    await workers.aclose()


async def test_the_meaning_of_logprobs_is_compared() -> None:
    workers = workers_of("vllm", [served("vllm"), served("vllm", raw_logprobs=False)])
    with pytest.raises(BadRequestError, match="processed_logprobs is False at http://server0 and True at"):
        await workers.check(IDS)
    await workers.aclose()


@pytest.mark.parametrize("kind", KINDS)
async def test_each_call_goes_to_all_servers(kind: Kind) -> None:
    engines = [served(kind), served(kind), served(kind)]
    workers = workers_of(kind, engines)
    assert isinstance(workers, EngineAdmin)
    await workers.load_weights("/w/1", "step-1")
    assert await workers.weight_version() == "step-1"
    await workers.load_adapter("three", "three")
    assert all("three" in engine.state.adapters for engine in engines)
    await workers.check(IDS, Adapter("three"))
    await workers.unload_adapter("three")
    assert not any("three" in engine.state.adapters for engine in engines)
    await workers.pause()
    assert all(engine.state.paused for engine in engines)
    engines[1].state.dead = True
    with pytest.raises(EngineConnectionError, match="server1"):
        await workers.resume()
    assert [engine.state.paused for engine in engines] == [False, True, False], "the others are not left behind"
    engines[1].state.dead = False
    await workers.resume()
    engines[0].state.set_version("step-2")
    assert await workers.weight_version() is None
    await workers.aclose()


def test_addresses_are_a_list_and_a_backend_has_one() -> None:
    for none in ([], "http://a"):
        with pytest.raises(InvalidValueError, match="addresses must be a list"):
            Workers("vllm", none)
    with pytest.raises(InvalidValueError, match="of one server, or of a router before several, not"):
        create_backend("vllm", ["http://a", "http://b"])  # type: ignore[arg-type]
