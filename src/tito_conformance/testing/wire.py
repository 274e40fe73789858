"""Parts that all wires share: an engine's settings and state, responses, and generation requests."""

from __future__ import annotations

import asyncio
import secrets
import time
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar
from urllib.parse import parse_qs

import msgspec

from tito_conformance.testing.pictures import ImageSettings
from tito_conformance.testing.script import Decode, ScriptedRequest, Settled

JSON_HEADERS = {"content-type": "application/json"}
SSE_HEADERS = {"content-type": "text/event-stream; charset=utf-8"}
Encode = Callable[[str, bool], Sequence[int]]
"""Converts a text, and whether to add special tokens such as a BOS, to ids."""


def bracketed(ids: Sequence[int]) -> str:
    """Decode every id as `<id>`; the default `decode`."""
    return "".join(f"<{i}>" for i in ids)


FRESH = "fresh"
"""The folder of an adapter without an effect, as before its first training step."""
_MOVED = 1000
"""Distance of the weights' numbers under two adapters."""
_BLOCK = 32
_CAPACITY = 4_000_000  # tokens before the cache starts over: a memory limit, not a model of eviction


class PrefixCache:
    """Finds the longest cached prefix of a prompt, in whole pages. The last prompt token is never cached.

    `page` is 1 on SGLang (measured: a repeated prompt of 37 has 36 cached) and the block size on vLLM (measured with
    blocks of 32: a repeated prompt of 4000 has 3968 cached). The lookup uses chained block hashes, then compares token
    by token with the last sequence that contained the matched block.
    """

    def __init__(self, page: int = 1) -> None:
        self.page = page
        self._through: dict[int, array[int]] = {}
        self._held = 0

    def admit(self, prompt_ids: Sequence[int], output_ids: Sequence[int], salt: str = "") -> int:
        """Return the number of leading prompt tokens that were cached, and cache the finished sequence.

        The last output token is left out: the engine sampled it but never computed its KV entry. Ids may be stamped,
        see `ScriptedRequest.context`: another image is another prompt.
        """
        if self._held > _CAPACITY:
            self.clear()
        sequence = array("q", prompt_ids)
        chain = list(_chain(sequence, 0, hash(salt)))
        found = self._match(sequence, chain)
        sequence.extend(output_ids[:-1])
        self._held += len(sequence)
        done = _BLOCK * (len(chain) - 1)
        for known in (*chain, *_chain(sequence, done, chain[-1])):
            self._through[known] = sequence
        return found

    def clear(self) -> None:
        """Empty the cache, as a flush or a pause does."""
        self._through.clear()
        self._held = 0

    def _match(self, prompt: array[int], chain: Sequence[int]) -> int:
        matched, other = 0, None
        for blocks, known in enumerate(chain):
            found = self._through.get(known)
            if found is None:
                break
            matched, other = blocks * _BLOCK, found
        if other is not None:
            stop = min(len(prompt), len(other))
            while matched < stop and prompt[matched] == other[matched]:
                matched += 1
        matched = min(matched, len(prompt) - 1)
        return max(0, matched - matched % self.page)


@dataclass(slots=True)
class EngineState:
    """A server's settings and current state. Only admin calls and the engine change it."""

    vocab_size: int = 1000
    max_model_len: int = 4096
    eos_ids: tuple[int, ...] = ()
    model: str = "scripted"
    api_key: str | None = None
    decode: Decode = bracketed
    encode: Encode | None = None
    skip_tokenizer_init: bool = False
    scale_out: bool = True
    adapters: dict[str, str] = field(default_factory=dict)
    """The folder of each LoRA adapter that is loaded, by its name."""
    release: str = "0.32.0"
    model_runner: int = 1
    ranks: int = 1
    reasoning: tuple[int, int] | None = None
    raw_logprobs: bool | None = None
    truncated_logprobs: bool = False
    max_logprobs: int = 20
    experts: tuple[int, int] | None = None
    sampling_masks: bool = False
    priorities: bool = False
    images: ImageSettings | None = None
    known_images: dict[str, bytes] = field(default_factory=dict)
    """Pictures that the server keeps, by the client's name for each."""
    cache: PrefixCache = field(default_factory=PrefixCache)
    weight_version: str = "default"
    folders: list[str] = field(default_factory=list)
    """The folders whose weights were loaded, in the order of their first load."""
    renamed: str | None = None
    """The model's name since SGLang loaded weights: their folder."""
    weights: int = 0
    """Index of the current weights' folder. The first folder has the weights that the server started with."""
    paused_since: float | None = None
    dead: bool = False
    running: Callable[[], int] = lambda: 0
    """Returns the number of generations in progress. The engine sets this and the next three."""
    abort: Callable[[Callable[[ScriptedRequest], bool]], int] = lambda matches: 0
    """Aborts the running generations that match, and returns their number."""
    version_changed: Callable[[str], None] = lambda version: None
    """Called with the new version after a weight update."""
    _adapter_folders: list[str] = field(default_factory=list)
    in_use: Callable[[str], bool] = lambda request_id: False
    """Returns whether a running generation has this server id."""

    @property
    def paused(self) -> bool:
        """Whether new generations wait until `resume`."""
        return self.paused_since is not None

    def pause(self) -> None:
        """Let new generations wait, and forget prefixes and pictures, as both servers do."""
        self.paused_since = time.monotonic()
        self.cache.clear()
        self.known_images.clear()

    def resume(self) -> None:
        """Let the waiting generations continue."""
        self.paused_since = None

    def load(self, folder: str) -> None:
        """Take the weights of a folder. Generations in progress take them at the next `set_version`."""
        if folder not in self.folders:
            self.folders.append(folder)
        self.weights = self.folders.index(folder)

    def load_adapter(self, name: str, folder: str) -> None:
        """Load a LoRA adapter, whose effect depends on its folder alone; one in `FRESH` has none."""
        self.adapters[name] = folder
        if folder not in self._adapter_folders:
            self._adapter_folders.append(folder)

    def weights_of(self, adapter: str | None) -> int:
        """Return `ScriptedRequest.weights` of a request: those of the model, moved by its adapter."""
        folder = FRESH if adapter is None else self.adapters[adapter]
        return self.weights + (0 if folder == FRESH else _MOVED * (1 + self._adapter_folders.index(folder)))

    def set_version(self, version: str) -> None:
        """Change the weight version. Generations in progress get a second version span."""
        self.version_changed(version)
        self.weight_version = version

    def admits(self, headers: Mapping[str, str]) -> bool:
        """Return whether the request has the API key, if the server has one."""
        return self.api_key is None or headers.get("authorization") == f"Bearer {self.api_key}"

    def piece(self, token_id: int) -> str:
        """Return the text of one token."""
        return self.decode((token_id,))


@dataclass(frozen=True, slots=True)
class WireResponse:
    """One HTTP response, and how it is sent.

    Attributes:
        status: The status.
        headers: The headers.
        body: The whole body, or one piece for each event of a stream.
        reset_after: Reset the connection after so many bytes of the body; 0 sends no response at all.
        close_after: Close the connection likewise.
        drip: (bytes, seconds): send the body in small pieces with a pause after each.
    """

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | Sequence[bytes] | AsyncIterator[bytes] = b""
    reset_after: int | None = None
    close_after: int | None = None
    drip: tuple[int, float] | None = None

    @property
    def dropped(self) -> bool:
        """Whether the connection ends without a response."""
        return self.reset_after == 0 or self.close_after == 0

    @property
    def content(self) -> bytes:
        """All bytes of the body.

        Raises:
            TypeError: The body is a stream in progress.
        """
        if isinstance(self.body, AsyncIterator):
            raise TypeError("This body is a stream in progress. Read it with `pieces`.")
        return self.body if isinstance(self.body, bytes) else b"".join(self.body)

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the bytes that are sent, up to where the connection ends."""
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
        """Close a stream after its reader has left."""
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
    """A valid generation request.

    Attributes:
        requests: The requests for the script.
        render: Makes the response from one `Settled` for each request, in order, and the seconds that it took.
        stream: Whether the response is a stream.
    """

    requests: Sequence[ScriptedRequest]
    render: Callable[[Sequence[Settled], float], WireResponse]
    stream: bool = False


Answer = WireResponse | Generation
"""A wire's result for a request: a response, or a generation to run."""


class Refused(Exception):
    """The request is answered with this error and does not reach the script."""

    def __init__(self, response: WireResponse) -> None:
        super().__init__(response.status)
        self.response = response


class Wire(Protocol):
    """One engine's HTTP interface. Synchronous and without I/O; `state` is its only memory."""

    name: str
    state: EngineState

    def route(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """Return the response to an information or admin call or an invalid request, or the requested generation.

        `path` includes the query string; header names are lower case.
        """

    def script_error(self, message: str) -> WireResponse:
        """Return this wire's 400, for a script that cannot answer."""

    def queue_full(self) -> WireResponse | None:
        """Return the response of a server with a full queue; None if this kind's queue has no limit."""


@dataclass(frozen=True, slots=True)
class Routes:
    """A server's other paths, for information and admin calls. They answer as FastAPI does, which both engines use.

    Attributes:
        get: Handlers of GET, by path.
        post: Handlers of POST, by path; they take the fields of the JSON body.
        invalid_json: Makes the response to a body that is not a JSON object.
    """

    get: Mapping[str, Callable[[], Answer]]
    post: Mapping[str, Callable[[dict[str, Any]], Answer]]
    invalid_json: Callable[[bytes], WireResponse]

    def answer(self, method: str, path: str, body: bytes, query: str = "") -> Answer:
        """Return the response. Parameters of `query` count as fields of the body."""
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


G = TypeVar("G")


@dataclass(frozen=True, slots=True)
class WireKit(Generic[G]):
    """One engine's wire: a reader for the conformance suite, and a scripted server.

    An engine's package registers it in the entry-point group `tito.wires`, under its backend's name.

    Attributes:
        read: Reads one HTTP exchange (`tito_conformance.wire.WireExchange`), and returns its
            `WireGeneration`, or None if it is not a generation. It judges the backend, so it must share no code with
            it.
        wire: Makes the scripted server's HTTP interface; None if the engine has no scripted server.
        cache_page: Page size of the server's prefix cache, in tokens.
    """

    read: Callable[[Any], G | None]
    wire: Callable[[EngineState], Wire] | None = None
    cache_page: int = 1


def json_response(value: Any, status: int = 200) -> WireResponse:
    """Return a response with a compact JSON body, as both servers write it."""
    return WireResponse(status, JSON_HEADERS, msgspec.json.encode(value))


def sse_response(events: Sequence[Any]) -> WireResponse:
    """Return a response of server-sent events, one `data:` line each, and `[DONE]`."""
    return WireResponse(200, SSE_HEADERS, sse_text([msgspec.json.encode(event) for event in events]))


def sse_text(events: Sequence[bytes]) -> tuple[bytes, ...]:
    """Return encoded events as the pieces of a body."""
    return (*(b"data: " + event + b"\n\n" for event in events), b"data: [DONE]\n\n")


def scripted_request(
    state: EngineState, body: Mapping[str, Any], params: Mapping[str, Any], ids: Sequence[int], **own: Any
) -> ScriptedRequest:
    """Return a request with the sampling fields that all engines name alike; `own` are its other fields."""
    stop = params.get("stop") or ()
    floats = {name: params[name] for name in ("temperature", "top_p") if params.get(name) is not None}
    return ScriptedRequest(
        prompt_ids=tuple(ids),
        top_k=max(0, params.get("top_k") or 0),
        min_p=params.get("min_p") or 0.0,
        stop_token_ids=tuple(params.get("stop_token_ids") or ()),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        eos_ids=state.eos_ids,
        ignore_eos=bool(params.get("ignore_eos")),
        reported_truncated=state.truncated_logprobs,
        vocab_size=state.vocab_size,
        body=body,
        **floats,
        **own,
    )


def cached_tokens(state: EngineState, answer: Settled, salt: str = "", limit: int | None = None) -> int:
    """Return the cached prompt tokens, at most `limit`, and cache the finished sequence."""
    request = replace(answer.request, weights=0)  # a cache does not know which weights filled it, but which adapter
    salt = salt if request.adapter is None else f"{salt}/{request.adapter}"
    whole, start = request.whole(answer.output_ids), len(request.prompt_ids)
    found = state.cache.admit(whole[:start], whole[start:], salt)
    if answer.completion.cached_tokens is not None:
        return answer.completion.cached_tokens
    return found if limit is None else min(found, limit)


def version_spans(state: EngineState, answer: Settled) -> list[dict[str, Any]]:
    """Return `[{version, start, end}]` over the output ids: the script's, or one span of the current version."""
    spans = answer.completion.weight_versions
    if spans is None:
        spans = [(state.weight_version, 0, len(answer.output_ids))]
    return [{"version": version, "start": start, "end": end} for version, start, end in spans]


def now() -> int:
    """Return seconds since the epoch, for `created` fields."""
    return int(time.time())


def random_id(length: int) -> str:
    """Return a random hexadecimal id, as servers make for requests without one."""
    return secrets.token_hex((length + 1) // 2)[:length]


def _chain(sequence: array[int], start: int, known: int) -> Iterator[int]:
    """Yield the hash of all tokens up to the end of each full block after `start`; `known` is the hash before it."""
    if not start:
        yield known
    content = sequence.tobytes()
    width = _BLOCK * sequence.itemsize
    for end in range(start * sequence.itemsize + width, len(content) + 1, width):
        known = hash((known, content[end - width : end]))
        yield known
