"""What the two wires share: the engine's settings and state, a response, and a generation waiting for its answer."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Generic, Protocol, TypeVar
from urllib.parse import parse_qs

import msgspec

from strands_tito.testing.prefix_cache import PrefixCache
from strands_tito.testing.script import ScriptedRequest
from strands_tito.testing.settle import Decode, Settled

JSON_HEADERS = {"content-type": "application/json"}
SSE_HEADERS = {"content-type": "text/event-stream; charset=utf-8"}


def bracketed(ids: Sequence[int]) -> str:
    """The default `decode`: every id as `<id>`."""
    return "".join(f"<{i}>" for i in ids)


Encode = Callable[[str, bool], Sequence[int]]
"""Text, and whether special tokens such as a BOS are added around it, to ids."""


@dataclass(slots=True)
class EngineState:
    """A server's settings and what changes while it lives. Only admin calls and the engine write it."""

    vocab_size: int = 1000
    max_model_len: int = 4096
    eos_ids: tuple[int, ...] = ()
    model: str = "scripted"
    api_key: str | None = None
    decode: Decode = bracketed
    encode: Encode | None = None
    skip_tokenizer_init: bool = False
    scale_out: bool = True
    raw_logprobs: bool | None = None
    truncated_logprobs: bool = False
    max_logprobs: int = 20
    experts: tuple[int, int] | None = None
    sampling_masks: bool = False
    priorities: bool = False
    cache: PrefixCache = field(default_factory=PrefixCache)
    weight_version: str = "default"
    paused_since: float | None = None
    dead: bool = False
    running: Callable[[], int] = lambda: 0
    """Number of generations in progress; set by the engine that owns the state, as the next two are."""
    abort: Callable[[Callable[[ScriptedRequest], bool]], int] = lambda matches: 0
    """Aborts the running generations that match and returns how many."""
    version_changed: Callable[[str], None] = lambda version: None
    in_use: Callable[[str], bool] = lambda request_id: False
    """Whether a running generation has this server id."""

    @property
    def paused(self) -> bool:
        """New generations wait until `resume`."""
        return self.paused_since is not None

    def pause(self) -> None:
        """Hold new generations back and clear the prefix cache, as both servers do."""
        self.paused_since = time.monotonic()
        self.cache.clear()

    def resume(self) -> None:
        """Let the waiting generations continue."""
        self.paused_since = None

    def set_version(self, version: str) -> None:
        """New weights: generations in progress get a second span."""
        self.version_changed(version)
        self.weight_version = version

    def admits(self, headers: Mapping[str, str]) -> bool:
        """Whether the request brings the api key, if the server has one."""
        return self.api_key is None or headers.get("authorization") == f"Bearer {self.api_key}"

    def piece(self, token_id: int) -> str:
        """The text of one token."""
        return self.decode((token_id,))


@dataclass(frozen=True, slots=True)
class WireResponse:
    """One HTTP answer and how it travels.

    `body` is whole, or for a stream one piece per event. After `reset_after` or `close_after` bytes of the body the
    connection is reset or closed; 0 means without any response. `drip` is (bytes, seconds): the body in small pieces.
    """

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | Sequence[bytes] | AsyncIterator[bytes] = b""
    reset_after: int | None = None
    close_after: int | None = None
    drip: tuple[int, float] | None = None

    @property
    def dropped(self) -> bool:
        """The connection ends without a response."""
        return self.reset_after == 0 or self.close_after == 0

    @property
    def content(self) -> bytes:
        """All of the body's bytes, when they are known beforehand."""
        if isinstance(self.body, AsyncIterator):
            raise TypeError("This body is streamed as it is made; read it with `pieces`.")
        return self.body if isinstance(self.body, bytes) else b"".join(self.body)

    async def pieces(self) -> AsyncIterator[bytes]:
        """The bytes that travel, cut where the connection ends."""
        left = min((n for n in (self.reset_after, self.close_after) if n is not None), default=None)
        try:
            async for piece in self._paced():
                if left is not None and len(piece) >= left:
                    yield piece[:left]
                    return
                left = None if left is None else left - len(piece)
                yield piece
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Close a stream that will not be read further."""
        if isinstance(self.body, AsyncIterator) and hasattr(self.body, "aclose"):
            await self.body.aclose()

    async def _paced(self) -> AsyncIterator[bytes]:
        if isinstance(self.body, AsyncIterator):
            async for piece in self.body:
                yield piece
            return
        whole = [self.body] if isinstance(self.body, bytes) else self.body
        if self.drip is None:
            for piece in whole:
                yield piece
            return
        size, seconds = self.drip
        content = self.content
        for start in range(0, len(content), size):
            yield content[start : start + size]
            await asyncio.sleep(seconds)


@dataclass(frozen=True, slots=True)
class Generation:
    """A valid generation request: what to ask the script, and how this wire writes the answers down.

    `render` takes one `Settled` per request, in order, and the seconds the generation took.
    """

    requests: Sequence[ScriptedRequest]
    render: Callable[[Sequence[Settled], float], WireResponse]
    stream: bool = False


Answer = WireResponse | Generation
"""What a wire makes of a request."""


@dataclass(frozen=True, slots=True)
class Routes:
    """A server's other paths, information and admin calls, answered as FastAPI does: both engines use it.

    Attributes:
        get: Paths that take GET.
        post: Paths that take POST, with the fields of its JSON body.
        invalid_json: The response to a body that is not a JSON object.
    """

    get: Mapping[str, Callable[[], Answer]]
    post: Mapping[str, Callable[[dict[str, Any]], Answer]]
    invalid_json: Callable[[bytes], WireResponse]

    def answer(self, method: str, path: str, body: bytes, query: str = "") -> Answer:
        """Return the response; the parameters of `query` count as fields of the body."""
        if path not in self.get and path not in self.post:
            return json_response({"detail": "Not Found"}, 404)
        if method == "GET" and path in self.get:
            return self.get[path]()
        if method != "POST" or path not in self.post:
            return json_response({"detail": "Method Not Allowed"}, 405)
        try:
            fields = msgspec.json.decode(body, type=dict[str, Any]) if body else {}
        except msgspec.DecodeError:
            return self.invalid_json(body)
        return self.post[path](fields | {name: values[-1] for name, values in parse_qs(query).items()})


class Wire(Protocol):
    """One engine's HTTP surface. Synchronous and without I/O; the state is its only memory."""

    name: str
    state: EngineState

    def route(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """Return the response to information, admin calls and errors, or the generation that the request asks for.

        `path` includes the query string; header names are lower case.
        """

    def script_error(self, message: str) -> WireResponse:
        """This wire's 400, for a script that cannot answer."""

    def queue_full(self) -> WireResponse | None:
        """What a server with a full queue answers; None when this kind's queue has no limit."""


def json_response(value: Any, status: int = 200) -> WireResponse:
    """A JSON body in the compact form that both servers use."""
    return WireResponse(status, JSON_HEADERS, msgspec.json.encode(value))


def sse_response(events: Sequence[Any]) -> WireResponse:
    """Server-sent events, one `data:` line each, closed by `[DONE]`."""
    return WireResponse(200, SSE_HEADERS, sse_text([msgspec.json.encode(event) for event in events]))


def sse_text(events: Sequence[bytes]) -> tuple[bytes, ...]:
    """Encoded events as the pieces of a body."""
    return (*(b"data: " + event + b"\n\n" for event in events), b"data: [DONE]\n\n")


def cached_tokens(state: EngineState, answer: Settled, salt: str = "", limit: int | None = None) -> int:
    """Prompt tokens found in the prefix cache; the finished sequence is then put there. `limit` caps the match."""
    found = state.cache.admit(answer.request.prompt_ids, answer.output_ids, salt)
    if answer.said.cached_tokens is not None:
        return answer.said.cached_tokens
    return found if limit is None else min(found, limit)


def version_spans(state: EngineState, answer: Settled) -> list[dict[str, Any]]:
    """`[{version, start, end}]` over the output ids: the script's, else one span of the live version."""
    spans = answer.said.weight_versions
    if spans is None:
        spans = [(state.weight_version, 0, len(answer.output_ids))]
    return [{"version": version, "start": start, "end": end} for version, start, end in spans]


def now() -> int:
    """Seconds since the epoch, as `created` fields have it."""
    return int(time.time())


def random_id(length: int) -> str:
    """A random hexadecimal id, as servers make for requests that bring none."""
    return secrets.token_hex((length + 1) // 2)[:length]


GROUP = "tito.wires"
Heard = TypeVar("Heard")


@dataclass(frozen=True, slots=True)
class WireKit(Generic[Heard]):
    """One engine's wire: how the conformance suite reads it, and how a scripted server speaks it.

    An engine's package names one in the entry-point group `tito.wires`, under its backend's name.

    Attributes:
        read: Reads one HTTP exchange for the suite, a `strands_tito.conformance.wire_reading.Seen`: returns its
            generation as a `Heard`, or None where the exchange is something else. It judges the backend, and shares
            no code with it.
        wire: Makes the scripted server's HTTP surface; None where the engine cannot be scripted.
        cache_page: Tokens of one page of the server's prefix cache.
    """

    read: Callable[[Any], Heard | None]
    wire: Callable[[EngineState], Wire] | None = None
    cache_page: int = 1


def installed_wires() -> list[str]:
    """Return the names of the installed wires."""
    return sorted({point.name for point in entry_points(group=GROUP)})


@cache
def find_wire(name: str) -> WireKit[Any]:
    """Return the wire of that name.

    Raises:
        ValueError: No installed package offers it; the message lists those installed.
    """
    for point in entry_points(group=GROUP):
        if point.name == name:
            kit = point.load()
            if not isinstance(kit, WireKit):
                raise ValueError(f"The entry point {point.value} is a {type(kit).__name__}, not a WireKit.")
            return kit
    raise ValueError(f"Unknown wire {name!r}. Installed wires: {', '.join(installed_wires())}.")
