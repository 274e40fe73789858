"""A large request never holds up the event loop, whoever wrote its body, and any transport of httpx's can send it."""

from __future__ import annotations

import json
import warnings
from typing import Any

import httpx
import numpy as np
import pytest

from support.backends import WIRES, Kind, Waits, backend_of, engine_of
from tito_core.backend.checked import score
from tito_core.backend.id_text import PIECE_BYTES, IdText
from tito_core.backend.transport import EngineHttp, HttpRequest
from tito_core.testing import ScriptedServer

LONG = np.full(400_000, 12345, np.int32)


@pytest.mark.parametrize("kind", WIRES)
async def test_a_long_sequence_is_scored_without_holding_up_the_loop(kind: Kind) -> None:
    """aiohttp warns of a body of more than a mebibyte in one piece."""
    engine = engine_of(kind, max_model_len=10**6)
    async with ScriptedServer(engine) as server:
        backend = type(backend_of(engine))(server.base_url, sleep=Waits())
        with warnings.catch_warnings():
            warnings.simplefilter("error", ResourceWarning)
            scored = await score(backend, [3 + n % 900 for n in range(400_000)])
        await backend.aclose()
    assert len(scored) == 400_000


@pytest.mark.parametrize("written", ["pieces", "bytes"])
async def test_a_transport_of_the_users_gets_bytes_and_all_of_them(written: str) -> None:
    """As httpx promises: a transport in this process hands them on to an application, of which ASGI says the same."""
    kinds: set[type] = set()
    lengths: list[int] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            kinds.add(type(message["body"]))
            lengths.append(len(message["body"]))
            body, more = body + message["body"], message.get("more_body", False)
        said = json.dumps(len(json.loads(body)["ids"])).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": said})

    body = IdText.of(LONG).body({"a": 1}, "ids")
    if written == "bytes":
        body = b"".join([body] if isinstance(body, bytes) else body)
    http = EngineHttp("vllm", "http://h", http_transport=lambda: httpx.ASGITransport(application))
    assert (await http.send(HttpRequest("/x", body))).body == b"400000"
    assert kinds == {bytes}
    assert max(lengths) == PIECE_BYTES
    await http.aclose()


@pytest.mark.parametrize("body", [b"", b'{"a": 1}'])
async def test_a_transport_of_the_users_may_look_at_a_small_body(body: bytes) -> None:
    seen: list[bytes] = []

    class Looking(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            seen.append(request.content)  # which httpx has not read of a stream
            return httpx.Response(200, content=b"{}")

    http = EngineHttp("vllm", "http://h", http_transport=Looking)
    await http.send(HttpRequest("/x", body))
    assert seen == [body]
    await http.aclose()
