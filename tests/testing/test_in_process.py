"""A scripted engine behaves the same in process and behind a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from support.backends import TRIES, WIRES, Kind, Waits, backend_of, engine_of, in_process, over_socket, request_of, soon
from tito_conformance.testing import THROTTLED, UNAVAILABLE, Fault, always
from tito_core.backend import BackendError
from tito_core.backend.generate import generate

pytestmark = pytest.mark.suite

CARRIERS: tuple[Callable[[Any], Any], ...] = (in_process, over_socket)
FAULTS = {
    "none": Fault(),
    "throttled": THROTTLED,
    "unavailable": UNAVAILABLE,
    "failed": Fault(status=500, body=b"oops"),
    "refused": Fault(status=400, body=b'{"error": {"message": "no"}}', content_type="application/json"),
    "redirected": Fault(status=307, headers={"location": "http://elsewhere/"}),
    "no content": Fault(status=204),
    "reset": Fault(reset_after=0),
    "closed": Fault(close_after=0),
    "reset in the body": Fault(reset_after=20),
    "closed in the body": Fault(close_after=20),
    "hung": Fault(hang=True, emitted=2),
    "late": Fault(delay=60.0),
    "slow": Fault(drip=(1, 0.05)),
    "in pieces": Fault(drip=(7, 0.0)),
    "a page": Fault(body=b"<html>hello</html>", content_type="text/html"),
    "cut JSON": Fault(body=b'{"choices": [', content_type="application/json"),
    "empty": Fault(body=b""),
    "not compressed": Fault(headers={"content-encoding": "gzip"}),
    "compressed otherwise": Fault(headers={"content-encoding": "br"}),
    "odd headers": Fault(headers={"Retry-After": "7", "X-Other": "\u00e9"}, status=429),
    "dead": Fault(),
}
TIMED = ("hung", "late", "slow")


async def outcome(kind: Kind, name: str, carried: Callable[[Any], Any], streams: bool) -> Any:
    """Return the client's result and the requests that the engine received."""
    engine = engine_of(kind, fault=always(FAULTS[name]), max_running=4)
    options = {"timeout_s": 2.0} if name in TIMED else {}  # in which a busy machine connects too
    backend = backend_of(
        engine, http_transport=carried(engine), patience_s=TRIES[2], sleep=(waits := Waits()), **options
    )
    backend._info = await backend_of(engine_of(kind), http_transport=carried(engine_of(kind))).connect()
    engine.state.dead = name == "dead"
    shown: list[int] = []
    on_chunk = (lambda chunk: shown.extend(chunk.output_ids.tolist())) if streams else None
    try:
        response = await generate(backend, request_of(), on_chunk)
        seen: Any = (response.output_ids.tolist(), response.logprobs.tolist(), response.finish, shown)
    except BackendError as error:
        details = {name: getattr(error, name, None) for name in ("reason", "retry_after_s", "limit", "was_streamed")}
        seen = (type(error), error.status, error.body, error.sent, error.request_id, details)
    assert await soon(lambda: engine.running == 0)
    await backend.aclose()
    requests = [(request.request_id, request.prompt_ids) for request in engine.requests]
    aborts = [exchange.body for exchange in engine.exchanges if "abort" in exchange.path]
    return seen, len(waits.seconds), requests, aborts


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("kind", WIRES)
async def test_a_fault_is_the_same_in_process_and_over_a_socket(kind: Kind, name: str, streams: bool) -> None:
    inside, outside = await asyncio.gather(*(outcome(kind, name, carried, streams) for carried in CARRIERS))
    assert inside == outside
    assert (name in ("none", "in pieces")) == isinstance(inside[0][0], list)
