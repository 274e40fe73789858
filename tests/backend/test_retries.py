"""Transient failures are retried while the patience lasts; other failures never."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.backends import (
    KINDS,
    NO_ANSWER,
    TRIES,
    WIRES,
    Kind,
    Received,
    Waits,
    answering,
    backend_of,
    engine_name,
    engine_of,
    http_response,
    http_to,
    in_process,
    request_of,
    soon,
)
from tito_conformance.testing import THROTTLED, UNAVAILABLE, Fault, WireResponse, always, first
from tito_core.backend import (
    AuthenticationError,
    BackendError,
    BadRequestError,
    EngineConnectionError,
    EngineTimeoutError,
    ServerError,
    ThrottledError,
)
from tito_core.backend.generate import generate
from tito_core.backend.retries import Retries, backoff_s
from tito_core.backend.values import InvalidValueError


async def outcome_of(kind: Kind, patience_s: float = 60.0, **options: Any) -> tuple[Any, Waits, BackendError | None]:
    """Connect, then generate once. Return the engine, the waits, and the error or None."""
    engine, waits = engine_of(kind, **options), Waits()
    backend = backend_of(engine, patience_s=patience_s, sleep=waits)
    await backend.connect()
    try:
        await generate(backend, request_of())
    except BackendError as error:
        return engine, waits, error
    return engine, waits, None


RETRIED: dict[str, tuple[Fault, type[BackendError]]] = {
    "429": (THROTTLED, ThrottledError),
    "503": (UNAVAILABLE, ThrottledError),
    "500": (Fault(status=500, body=b"oops"), ServerError),
    "502": (Fault(status=502), ServerError),
    "522": (Fault(status=522), ServerError),
    "reset": (Fault(reset_after=0), EngineConnectionError),
    "closed": (Fault(close_after=0), EngineConnectionError),
    "reset in the body": (Fault(reset_after=20), EngineConnectionError),
    "closed in the body": (Fault(close_after=20), EngineConnectionError),
}


@pytest.mark.parametrize("tries", [1, 3])
@pytest.mark.parametrize("name", RETRIED)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_lasting_failure_is_tried_while_the_patience_lasts(kind: Kind, name: str, tries: int) -> None:
    fault, expected = RETRIED[name]
    engine, waits, error = await outcome_of(kind, TRIES[tries], fault=always(fault))
    assert type(error) is expected
    assert len(engine.requests) == tries
    assert len(waits.seconds) == tries - 1
    assert waits.clock() == pytest.approx(TRIES[tries]), "the last try comes when the patience ends"


@pytest.mark.parametrize("name", RETRIED)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_may_be_away_for_a_minute_by_default(kind: Kind, name: str) -> None:
    """strands-sglang and slime wait as long; only a 500, which may be of the request, is retried three times."""
    fault, expected = RETRIED[name]
    waits = Waits()
    back_at = 59.0
    engine = engine_of(kind, fault=lambda number, _: fault if waits.clock() < back_at else None)
    backend = backend_of(engine, sleep=waits)
    await backend.connect()
    if name == "500":
        with pytest.raises(expected):
            await generate(backend, request_of())
        assert len(engine.requests) == 4
        return
    await generate(backend, request_of())
    assert back_at <= waits.clock() <= 60
    waits.seconds.clear()
    back_at = 999.0
    with pytest.raises(expected):
        await generate(backend, request_of(request_id="s"))
    assert waits.clock() == pytest.approx(60)


async def test_a_try_that_takes_time_uses_patience_too() -> None:
    """A proxy cuts off every answer after 40 s."""
    waits, tries = Waits(), []

    async def cut_off(number: int) -> None:
        tries.append(number)
        waits.seconds.append(40.0)
        raise ThrottledError("cut off", backend="vllm", status=503)

    with pytest.raises(ThrottledError):
        await Retries(60, sleep=waits, clock=waits.clock)(cut_off)
    assert tries == [0, 1, 2]


PAUSED = Fault(
    status=503,
    content_type="application/json",
    body=b'{"error":{"message":"Generation is paused. Please retry after it resumes.","code":503}}',
)
"""How vLLM 0.33 refuses requests during a pause of its default mode (`v1/engine/core.py`)."""


@pytest.mark.parametrize("kind", KINDS)
async def test_a_pause_uses_no_patience_and_is_named_once(kind: Kind, caplog: pytest.LogCaptureFixture) -> None:
    waits = Waits()
    engine = engine_of(
        kind, fault=lambda number, _: PAUSED if 5 < waits.clock() < 500 else THROTTLED if number < 6 else None
    )
    backend = backend_of(engine, sleep=waits, patience_s=20.0)
    await backend.connect()
    with caplog.at_level("WARNING", "tito_core.backend.retries"):
        await generate(backend, request_of())
    assert waits.clock() >= 500
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if "paused" in line] == [
        f"{engine_name(kind)} is paused, as for new weights: request r waits until it resumes"
    ]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_pause_longer_than_the_timeout_is_an_error_that_says_so(kind: Kind) -> None:
    engine, waits = engine_of(kind, fault=always(PAUSED)), Waits()
    backend = backend_of(engine, sleep=waits, timeout_s=90.0)
    await backend.connect()
    with pytest.raises(ThrottledError, match=r"is paused.*Resume the server, or raise timeout_s"):
        await generate(backend, request_of())
    assert waits.clock() == pytest.approx(90)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 409, 413, 422])
@pytest.mark.parametrize("kind", KINDS)
async def test_another_4xx_is_never_retried(kind: Kind, status: int) -> None:
    engine, waits, error = await outcome_of(kind, fault=always(Fault(status=status, headers={"retry-after": "1"})))
    assert isinstance(error, BadRequestError | AuthenticationError)
    assert len(engine.requests) == 1
    assert waits.seconds == []


@pytest.mark.parametrize("kind", WIRES)
async def test_every_try_has_an_id_of_its_own(kind: Kind) -> None:
    """SGLang refuses an id that still runs, and a lost try may still run."""
    engine = engine_of(kind, fault=first(2, Fault(reset_after=20)))
    response = await generate(backend_of(engine, sleep=Waits()), request_of())
    assert [request.request_id for request in engine.requests] == ["r", "r-retry1", "r-retry2"]
    assert response.request_id == "r-retry2"


@pytest.mark.parametrize("status", [None, 502, 520])
async def test_a_running_try_on_sglang_does_not_block_the_next(status: int | None) -> None:
    lost: list[str] = []

    async def handler(request: Received) -> WireResponse:
        """A proxy that loses the first answer while the server goes on with it."""
        response = await engine.handle(request.method, request.path, request.headers, request.content)
        if request.path == "/generate" and not lost:
            lost.append("once")
            return NO_ANSWER if status is None else http_response(status)
        return response

    engine = engine_of("sglang")
    await generate(answering("sglang", handler), request_of())
    aborts = [exchange.body for exchange in engine.exchanges if exchange.path == "/abort_request"]
    assert aborts == [b'{"rid":"r"}'], "the lost try was aborted before the next was sent"
    assert [request.request_id for request in engine.requests] == ["r", "r-retry1"]


async def test_a_gateways_own_replay_does_not_end_the_turn() -> None:
    """It sends a request whose answer it lost again, under the same id, while that still runs: the server's 400."""
    replayed: list[asyncio.Task[WireResponse]] = []

    async def handler(request: Received) -> WireResponse:
        arguments = (request.method, request.path, request.headers, request.content)
        if request.path == "/generate" and not replayed:
            replayed.append(asyncio.create_task(engine.handle(*arguments)))
            assert await soon(lambda: engine.running == 1)
        return await engine.handle(*arguments)

    engine = engine_of("sglang", fault=first(1, Fault(hang=True)))
    response = await generate(answering("sglang", handler), request_of())
    aborts = [exchange.body for exchange in engine.exchanges if exchange.path == "/abort_request"]
    assert aborts == [b'{"rid":"r"}'], "what still ran was aborted before the next try"
    assert response.request_id == "r-retry1"
    await replayed[0]


def throttling(header: str | None) -> Callable[[Received], WireResponse]:
    counts: Counter[str] = Counter()

    def handler(request: Received) -> WireResponse:
        counts[request.path] += 1
        if counts[request.path] == 1:
            return http_response(429, headers={} if header is None else {"retry-after": header})
        return http_response(200, json={"data": [{"id": "m"}], "version": "1"})

    return handler


@pytest.mark.parametrize(
    ("header", "least", "most"),
    [
        ("0", 0.25, 0.5),
        ("1", 1, 1),
        ("2.5", 2.5, 2.5),
        ("7200", 60, 60),
        ("-5", 0.25, 0.5),
        (None, 0.25, 0.5),
        ("nan", 0.25, 0.5),
        ("inf", 0.25, 0.5),
        ("Sun, 06 Nov 1994 08:49:37 GMT", 0.25, 0.5),
        ("Sun, 06 Nov 2094 08:49:37 GMT", 60, 60),
        ("soon", 0.25, 0.5),
    ],
)
async def test_retry_after_is_honoured_within_bounds(header: str | None, least: float, most: float) -> None:
    waits = Waits()
    await answering("vllm", throttling(header), sleep=waits).connect()
    assert len(waits.seconds) == 3  # /v1/models, /version and /weight_info
    assert all(least <= seconds <= most for seconds in waits.seconds)


async def test_backoff_grows_and_is_bounded() -> None:
    _, waits, error = await outcome_of("vllm", fault=always(UNAVAILABLE))
    assert isinstance(error, ThrottledError)
    base = [min(2.0, 0.25 * 2**n) for n in range(len(waits.seconds))]
    assert all(low <= seconds <= 2 * low for low, seconds in zip(base[:-1], waits.seconds[:-1], strict=True))
    assert 0 < waits.seconds[-1] <= 4.0
    assert backoff_s(10**6) <= 4.0


async def test_backoff_is_jittered() -> None:
    seen = set()
    for _ in range(5):
        _, waits, _ = await outcome_of("vllm", fault=first(1, UNAVAILABLE))
        seen.update(waits.seconds)
    assert len(seen) == 5


@pytest.mark.parametrize("kind", KINDS)
async def test_a_timeout_is_never_retried_and_is_aborted_on_the_server(kind: Kind) -> None:
    engine, waits = engine_of(kind, fault=always(Fault(hang=True, emitted=2))), Waits()
    backend = backend_of(engine, timeout_s=0.1, sleep=waits)
    backend._info = await backend_of(engine).connect()  # which a busy machine may answer later than that
    path = {"vllm": "/inference/v1/generate", "sglang": "/generate"}[kind]
    with pytest.raises(EngineTimeoutError, match=rf"{path} did not answer within 0\.1 s.*timeout_s") as caught:
        await generate(backend, request_of())
    assert (caught.value.backend, caught.value.request_id) == (kind, "r")
    assert len(engine.requests) == 1
    assert waits.seconds == []
    assert await soon(lambda: not engine.running)
    assert [e.path for e in engine.exchanges if "abort" in e.path] == [
        {"vllm": "/inference/v1/abort_requests", "sglang": "/abort_request"}[engine_name(kind)]
    ]


@pytest.mark.parametrize("status", [408, 504, 524])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_gateways_timeout_is_one_too(kind: Kind, status: int) -> None:
    """Another sample would be one of the answers that are short enough for the gateway."""
    engine, waits, error = await outcome_of(kind, fault=first(1, Fault(status=status, body=b"Gateway Time-out")))
    assert type(error) is EngineTimeoutError
    assert "Raise the gateway's timeout, lower max_new_tokens" in str(error)
    assert len(engine.requests) == 1
    assert waits.seconds == []
    aborts = [exchange.body for exchange in engine.exchanges if "abort" in exchange.path]
    assert len(aborts) == 1
    assert b'r"' in aborts[0]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_slow_drip_is_a_timeout_too(kind: Kind) -> None:
    """Each byte comes in time, the whole does not."""
    engine = engine_of(kind, fault=always(Fault(drip=(1, 0.02))))
    with pytest.raises(EngineTimeoutError):
        await generate(backend_of(engine, timeout_s=0.2), request_of())


@pytest.mark.parametrize("kind", KINDS)
@given(plan=st.lists(st.sampled_from(["ok", "429", "503", "500", "reset", "400"]), min_size=1, max_size=6))
@settings(deadline=None, max_examples=15)
def test_attempts_follow_the_plan_of_faults(kind: Kind, plan: list[str]) -> None:
    faults = {**{name: fault for name, (fault, _) in RETRIED.items()}, "400": Fault(status=400)}
    engine = engine_of(kind, fault=lambda number, _: faults.get(plan[number]) if number < len(plan) else None)
    backend = backend_of(engine, patience_s=TRIES[3], http_transport=in_process(engine))
    ends = next((n for n, step in enumerate(plan) if step in ("ok", "400")), len(plan))

    async def run() -> None:
        await generate(backend, request_of())

    if ends < 3 and (ends == len(plan) or plan[ends] == "ok"):
        asyncio.run(run())
    else:
        with pytest.raises(BackendError):
            asyncio.run(run())
    assert len(engine.requests) == min(ends + 1, 3)


def test_invalid_retry_settings_are_refused() -> None:
    bad = [0, -1.5, float("inf"), float("nan"), True, 10**400, 10**5000]
    for name in ("timeout_s", "connect_timeout_s"):
        for value in bad:
            with pytest.raises(InvalidValueError, match=f"^{name} must be a positive number.{{1,120}}\n"):
                http_to("vllm", "http://h", **{name: value})
    for value in (-1, *bad[1:]):
        with pytest.raises(InvalidValueError, match=r"^patience_s must be a number of seconds, or 0, not "):
            Retries(value)
    for value in (-1, True, 1.5, None):
        with pytest.raises(InvalidValueError, match=f"max_connections .*at least 0.* {value}"):
            http_to("vllm", "http://h", max_connections=value)
    http = http_to("vllm", "http://h", timeout_s=0.5)
    assert (http.connection.timeout_s, http.connection.connect_timeout_s) == (0.5, 0.5)
    assert http_to("vllm", "http://h").connection.connect_timeout_s == 5.0


async def test_a_retry_is_logged_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    async def fails(_: Any) -> None:
        raise ServerError("It is\n  down,\n say.", backend="vllm")

    with caplog.at_level("WARNING", "tito_core.backend.retries"), pytest.raises(ServerError):
        await Retries(TRIES[2], sleep=(waits := Waits()), clock=waits.clock)(fails)
    [record] = caplog.records
    assert record.getMessage().endswith("ServerError: It is down, say.")
