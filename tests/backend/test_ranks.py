"""The turns of a rollout go to one data-parallel rank, where the server has several."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import AsyncMock

import pytest

from support.backends import WIRES, Kind, backend_of, engine_of, request_of
from tito_conformance.testing import Completion, ScriptedRequest
from tito_core.backend.generate import generate
from tito_core.backend.values import InvalidValueError


def rank(request: ScriptedRequest) -> str | None:
    found = request.body.get("routed_dp_rank", request.headers.get("x-data-parallel-rank"))
    return None if found is None else str(found)


@pytest.mark.parametrize("kind", WIRES)
async def test_a_session_stays_on_its_rank_and_sessions_spread_over_all(kind: Kind) -> None:
    engine = engine_of(kind, lambda _: Completion([5, 2]), ranks=4)
    options = {} if kind == "sglang" else {"data_parallel_size": 4}  # SGLang reports it
    backend = backend_of(engine, **options)
    await backend.connect()
    found: dict[str, set[str | None]] = {}
    for session in map(str, range(64)):
        for number in range(2):
            request = replace(request_of(request_id=f"{session}.{number}"), session_id=session)
            await generate(backend, request)
            found.setdefault(session, set()).add(rank(engine.requests[-1]))
    assert all(len(ranks) == 1 for ranks in found.values())
    assert set().union(*found.values()) == {"0", "1", "2", "3"}


@pytest.mark.parametrize("kind", WIRES)
async def test_no_rank_is_named_to_a_server_with_one_or_without_a_session(kind: Kind) -> None:
    for ranks, session in ((1, "a"), (4, None)):
        engine = engine_of(kind, lambda _: Completion([5, 2]), ranks=ranks)
        backend = backend_of(engine, **({} if ranks == 1 else {"data_parallel_size": ranks}))
        await generate(backend, replace(request_of(), session_id=session))
        assert rank(engine.requests[-1]) is None


@pytest.mark.parametrize("given", [None, 4])
async def test_a_restarted_sglang_gets_the_ranks_that_it_has_now(given: int | None) -> None:
    engine = engine_of("sglang", lambda _: Completion([5, 2]), ranks=4)
    backend = backend_of(engine, data_parallel_size=given)
    await backend.connect()
    backend.watch.add("policy", AsyncMock())
    for ranks in (4, 2, 1, 8):
        engine.state.ranks = max(ranks, given or 0)
        backend.http.interruptions += 1  # the connections of a server that ends are closed
        found: set[str | None] = set()
        for session in map(str, range(64)):
            await generate(backend, replace(request_of(request_id=f"{ranks}.{session}"), session_id=session))
            found.add(rank(engine.requests[-1]))
        assert found == ({None} if given is None and ranks == 1 else set(map(str, range(given or ranks))))


def test_a_bad_size_is_refused() -> None:
    for size in (0, -1, 1.5, True):
        with pytest.raises(InvalidValueError, match="data_parallel_size must be a number of ranks"):
            backend_of(engine_of("vllm"), data_parallel_size=size)
