"""Both backends on scripted engines behind real sockets, with the users' connection pool and instant waits."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType, SimpleNamespace
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

import msgspec
import numpy as np

from tito_conformance.testing import (
    HashPolicy,
    InProcessTransport,
    ScriptedEngine,
    ScriptedServer,
    WireResponse,
    scripted_engine,
)
from tito_conformance.testing.script import Script
from tito_conformance.testing.wire import JSON_HEADERS
from tito_core.backend import SamplingParams, TokenRequest
from tito_core.backend.http.backend import HttpBackend
from tito_core.backend.http.client import ConnectionPool, EngineHttp, HttpResponse
from tito_core.backend.http.connection import Connection
from tito_core.backend.id_text import Pieces
from tito_sglang.backend import SGLangBackend
from tito_vllm.backend import VLLMBackend
from tito_vllm.wire import TOO_MANY_LOGPROBS

Kind = Literal["vllm", "vllm-completions", "sglang"]
KINDS: tuple[Kind, ...] = ("vllm", "sglang")
WIRES: tuple[Kind, ...] = (*KINDS, "vllm-completions")
"""The wires; "vllm-completions" is vLLM without `/inference/v1/generate`."""
BACKENDS: dict[str, type[HttpBackend]] = {"vllm": VLLMBackend, "vllm-completions": VLLMBackend, "sglang": SGLangBackend}
VOCAB, EOS = 1000, 2
TRIES = {1: 0.0, 2: 0.2, 3: 0.7, 4: 1.7, 5: 3.7}
"""The patience with which a request that always fails is tried so often, whatever the jitter of its waits."""
SOON_S = 60.0
"""How long a test waits for an event before it fails: far longer than the slowest machine takes."""
PROMPT = (11, 12, 13, 14, 15)


@dataclass
class Waits:
    """A sleep that returns at once and records its seconds, and the clock that it moves."""

    seconds: list[float] = field(default_factory=list)

    def clock(self) -> float:
        return sum(self.seconds)

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


def instant(options: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Return a backend's options with waits that take no time, unless they have a sleep of their own."""
    waits = options.get("sleep", Waits())
    return {"sleep": waits, **({"clock": waits.clock} if isinstance(waits, Waits) else {}), **options}


def hash_policy() -> HashPolicy:
    return HashPolicy(VOCAB, eos_ids=[EOS])


def reserved(kind: Kind) -> int:
    """Return how many tokens of the context the client does not count: SGLang wants them free after each prompt."""
    return 6 if kind == "sglang" else 0


def engine_of(kind: Kind, script: Script | None = None, **options: Any) -> ScriptedEngine:
    defaults: dict[str, Any] = {"vocab_size": VOCAB, "eos_ids": [EOS], "scale_out": kind == "vllm"}
    return scripted_engine(engine_name(kind), script or hash_policy(), **{**defaults, **options})


def engine_name(kind: str) -> Literal["vllm", "sglang"]:
    return "sglang" if kind == "sglang" else "vllm"


class OverSockets:
    """The users' connection pool to engines that listen on loopback, each in its own thread.

    Args:
        engines: Engines by host name; "" is for every other name.
    """

    _open: ClassVar[set[OverSockets]] = (
        set()
    )  # a test's error keeps its backend in a reference cycle, which must not warn

    def __init__(self, engines: Mapping[str, Any]) -> None:
        self._servers = {name: ScriptedServer(engine) for name, engine in engines.items()}
        self._died: set[ScriptedServer] = set()
        self._pool = ConnectionPool()
        self._open.add(self)
        if len(self._servers) == 1:  # a backend makes its transport before it starts the clock of a request
            self._start(*self._servers.values())

    async def send(self, method: str, url: str, headers: Mapping[str, str], body: bytes | Pieces) -> HttpResponse:
        where = urlsplit(url)
        server = self._servers.get(where.hostname or "") or self._servers[""]
        if server in self._died and not server.engine.state.dead:  # the test revived it
            self._died.discard(server)
            server.__exit__(None, None, None)
            server.__enter__()
        if not server.port:
            self._start(server)
        rest = url.removeprefix(f"{where.scheme}://{where.netloc}")
        try:
            return await self._pool.send(method, server.base_url + rest, headers, body)
        finally:
            if server.engine.state.dead:
                self._died.add(server)

    def _start(self, server: ScriptedServer) -> None:
        server.__enter__()
        if server.engine.state.dead:
            self._died.add(server)

    async def aclose(self) -> None:
        for server in self._servers.values():  # first and without awaiting: a loop that ends may cancel this
            if server.port:
                server.__exit__(None, None, None)
        self._open.discard(self)
        await self._pool.aclose()


def over_socket(engine: Any) -> Callable[[], OverSockets]:
    """Return the `http_transport` of a backend with one engine behind a socket."""
    return lambda: OverSockets({"": engine})


def over_sockets(engines: Sequence[Any]) -> Callable[[], OverSockets]:
    """Return the `http_transport` of backends at http://server0, http://server1, ..."""
    return lambda: OverSockets({f"server{n}": engine for n, engine in enumerate(engines)})


def in_process(engine: Any) -> Callable[[], InProcessTransport]:
    """Return the `http_transport` of one engine without a socket, for thousands of cases."""
    return lambda: InProcessTransport(engine)


def http_to(backend: str, url: Any, **options: Any) -> EngineHttp:
    """Return the HTTP of a backend: options of a connection, or of `EngineHttp`."""
    own = {name: options.pop(name) for name in ("http_transport", "sleep", "clock") if name in options}
    return EngineHttp(backend, Connection.to(url, backend=backend, **options), **own)


def backend_of(engine: ScriptedEngine, **options: Any) -> HttpBackend:
    cls = BACKENDS[engine.wire.name]
    options = {"http_transport": over_socket(engine), **options}
    return cls("http://scripted", **instant(options))


def in_process_backend(engine: ScriptedEngine, **options: Any) -> HttpBackend:
    """Return a backend without sockets, for tests of anything but connections."""
    return backend_of(engine, **{"http_transport": in_process(engine), **options})


@dataclass
class Received:
    """One request as a server receives it; header names are in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    content: bytes


class Handler:
    """Serves requests in place of an engine, by a function from a request to a response."""

    def __init__(self, respond: Callable[[Received], Any]) -> None:
        self.state = SimpleNamespace(dead=False)
        self._respond = respond

    async def handle(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> WireResponse:
        response = self._respond(Received(method, path, headers, body))
        found: WireResponse = await response if inspect.isawaitable(response) else response
        return found


NO_ANSWER = WireResponse(500, reset_after=0)
"""The server resets the connection instead of answering."""


def http_response(
    status: int = 200,
    *,
    json: Any = None,
    text: str = "",
    content: bytes = b"",
    headers: Mapping[str, str] | None = None,
) -> WireResponse:
    """Return a response; JSON and text set the content type."""
    if json is not None:
        return WireResponse(status, {**JSON_HEADERS, **(headers or {})}, msgspec.json.encode(json))
    kind = {"content-type": "text/plain; charset=utf-8"} if text else {}
    return WireResponse(status, {**kind, **(headers or {})}, text.encode() or content)


def answering(kind: Kind, handler: Any, *, refuses: int | None = None, **options: Any) -> HttpBackend:
    """Return a backend whose server is a function from a request to a response, and refuses probes with `refuses`.

    A recorded answer names the recorded request; here it names the one that was sent, as a server does. SGLang then
    does not report its vocabulary, and vLLM has no `/inference/v1/generate` unless it refuses with 400.
    """
    refused = refuses or (400 if kind == "sglang" else 404)

    def respond(request: Received) -> Any:
        if request.method == "POST" and is_probe(json.loads(request.content)):
            return http_response(refused)
        response = handler(request)
        return response if inspect.isawaitable(response) else naming(request, response)

    options = {"http_transport": in_process(Handler(respond)), **options}
    return BACKENDS[kind]("http://scripted", **instant(options))


_NAMED = re.compile(rb'("(?:request_)?id" *: *"(?:generate-tokens-|cmpl-)|"meta_info" *: *{ *"id" *: *")[^"]*')


def naming(request: Received, response: WireResponse) -> WireResponse:
    """Return a response whose ids are that of the request."""
    sent = request.headers.get("x-request-id")
    if sent is None and request.content:
        sent = json.loads(request.content).get("rid")
    if sent is None or response.status != 200 or not isinstance(response.body, bytes):
        return response
    return replace(response, body=_NAMED.sub(rb"\g<1>" + sent.encode(), response.body))


async def soon(holds: Callable[[], bool]) -> bool:
    """Wait until a condition holds: servers run in their own threads."""
    until = time.monotonic() + SOON_S
    while not holds() and time.monotonic() < until:
        await asyncio.sleep(0.01)
    return holds()


def request_of(ids: Sequence[int] = PROMPT, request_id: str = "r", **sampling: Any) -> TokenRequest:
    settings = {"max_new_tokens": 8, "stop_token_ids": (EOS,), **sampling}
    return TokenRequest(np.array(ids, np.int32), SamplingParams(**settings), request_id)


def bodies(engine: ScriptedEngine) -> list[Any]:
    """Return the bodies of generation and scoring requests, also refused ones, without probes."""
    paths = ("/v1/completions", "/inference/v1/generate", "/generate")
    sent = [json.loads(e.body) for e in engine.exchanges if e.path in paths]
    return [body for body in sent if not is_probe(body)]


def is_probe(body: Any) -> bool:
    """Return whether a body is a probe at connect: SGLang's vocabulary, vLLM's endpoint, top logprobs and grammars."""
    if body.get("prompt") == [0] and ("thinking_token_budget" in body or "structured_outputs" in body):
        return True
    if TOO_MANY_LOGPROBS in (body.get("logprobs"), (body.get("sampling_params") or {}).get("logprobs")):
        return True
    return "rid" not in body and "prompt" not in body and not body.get("token_ids")


def choice(answer: Any) -> Any:
    """Return the part of an answer of either wire that holds the ids."""
    return answer["choices"][0] if "choices" in answer else answer
