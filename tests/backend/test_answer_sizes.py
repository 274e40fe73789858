"""Answers are read up to a size limit that depends on the request, and memory stays near it."""

from __future__ import annotations

import asyncio
import gzip
import json
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.backends import BACKENDS, KINDS, WIRES, Kind, Waits, engine_of, http_to, in_process_backend, request_of
from support.raw_server import RawServer
from tito_conformance.testing import ScriptedServer
from tito_core.backend import (
    AnswerTooLargeError,
    BackendError,
    BadRequestError,
    DamagedAnswerError,
    ProtocolViolationError,
    TokenRequest,
)
from tito_core.backend.generate import generate, score
from tito_core.backend.http.body import (
    BASE_BYTES,
    ERROR_BYTES,
    EXPERT_BYTES,
    IMAGE_TOKENS,
    INFO_BYTES,
    MASK_BYTES,
    SCORED_BYTES,
    TOKEN_BYTES,
    UNKNOWN_EXPERTS,
    BodyTooLargeError,
    answer_size,
    size_of,
)
from tito_core.backend.http.client import HttpRequest, HttpResponse
from tito_core.backend.images import PromptImages
from tito_core.backend.protocol import OptionalOutputs
from tito_core.backend.sampling import SamplingParams
from tito_core.ledger import Image
from tito_sglang.wire import stream_events

MIB = 1 << 20
CHUNK = b"%x\r\n" % MIB + b"1," * (MIB // 2) + b"\r\n"
CHUNKED = "Transfer-Encoding: chunked"


def head(*lines: str, status: str = "200 OK", kind: str = "application/json") -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", f"Content-Type: {kind}", "Connection: close", *lines, "", ""]).encode()


def endless(*lines: str, chunk: bytes = CHUNK, count: int = 600, **options: str) -> Iterator[bytes]:
    """An answer of 600 MiB."""
    yield head(CHUNKED, *lines, **options)
    for _ in range(count):
        yield chunk


@contextmanager
def held() -> Iterator[list[int]]:
    """Measure the peak of allocated bytes above those at the start."""
    peak: list[int] = []
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    try:
        yield peak
        peak.append(tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()


class Server(RawServer):
    """Answers one request without an end."""

    def __init__(self, *lines: str, **options: Any) -> None:
        super().__init__(b"")
        self._says = endless(*lines, **options)


async def refused(url: str, request: HttpRequest, method: str = "POST") -> BackendError:
    http = http_to("vllm", url, sleep=Waits())
    try:
        with pytest.raises(BackendError) as caught:
            await http.send(request, method=method)
    finally:
        await http.aclose()
    return caught.value


async def test_an_information_answer_is_read_up_to_its_limit() -> None:
    with Server() as server, held() as peak:
        error = await refused(server.url, HttpRequest("/v1/models"), "GET")
    assert isinstance(error, AnswerTooLargeError)
    assert error.limit == INFO_BYTES
    assert f"{INFO_BYTES:,} bytes" in str(error)
    assert error.status == 200
    assert len(server.heads) == 1  # which the next try would find alike
    assert server.sent < 4 * INFO_BYTES + 16 * MIB  # what the sockets' buffers took
    assert peak[0] < 2 * INFO_BYTES


async def test_an_answer_of_exactly_the_limit_is_read() -> None:
    body = b'"' + b"a" * (INFO_BYTES - 2) + b'"'
    for lines in ([f"Content-Length: {len(body)}"], []):
        with RawServer(head(*lines) + body) as server:
            http = http_to("vllm", server.url)
            assert (await http.send(HttpRequest("/v1/models"), method="GET")) == body
            await http.aclose()
        with RawServer(head(*lines).replace(b"%d" % len(body), b"%d" % (len(body) + 1)) + body + b" ") as server:
            assert isinstance(await refused(server.url, HttpRequest("/v1/models")), AnswerTooLargeError)


BOMB = b"0" * (16 * MIB)
BOMBS = {"gzip": gzip.compress, "x-gzip": gzip.compress, "deflate": zlib.compress}


@pytest.mark.parametrize("status", ["200 OK", "500 Broken"])
@pytest.mark.parametrize("packing", BOMBS)
async def test_a_decompression_bomb_is_decoded_up_to_the_limit(packing: str, status: str) -> None:
    packed = BOMBS[packing](BOMB)
    assert len(packed) < 100_000
    answer = head(f"Content-Encoding: {packing}", f"Content-Length: {len(packed)}", status=status) + packed
    with RawServer(answer) as server, held() as peak:
        error = await refused(server.url, HttpRequest("/v1/models"), "GET")
    assert isinstance(error, AnswerTooLargeError) == (status == "200 OK")
    assert peak[0] < 3 * INFO_BYTES


@pytest.mark.parametrize("status", ["200 OK", "400 Bad"])
@pytest.mark.parametrize("codings", [["gzip", "deflate"], ["deflate"] * 4, ["deflate"] * 1000], ids=len)
async def test_several_codings_are_refused_before_decoding(codings: list[str], status: str) -> None:
    body = b"{}"
    for coding in codings:
        body = gzip.compress(body) if coding == "gzip" else zlib.compress(body, 0)
    lines = [f"Content-Encoding: {','.join(codings)}", f"Content-Length: {len(body)}"]
    with RawServer(head(*lines, status=status) + body) as server:
        error = await refused(server.url, HttpRequest("/v1/models"))
    assert type(error) is DamagedAnswerError
    assert str(len(codings)) in str(error) or status != "200 OK"


async def test_the_body_of_an_error_is_cut_off() -> None:
    for lines in ([], ["Content-Encoding: identity"]):
        with Server(*lines, status="400 Bad") as server, held() as peak:
            error = await refused(server.url, HttpRequest("/x"))
        assert isinstance(error, BadRequestError)
        assert error.status == 400
        assert error.body == ("1," * 1000)
        assert peak[0] < 16 * ERROR_BYTES


@pytest.mark.parametrize("kind", KINDS)
async def test_a_generation_is_read_up_to_the_limit_of_its_request(kind: Kind) -> None:
    """The bound is small for a small request, whatever a server may send."""
    backend = await connected(kind)
    request = request_of(max_new_tokens=8)
    limit = answer_size(request).body
    assert limit < 2 * MIB
    with Server() as server, held() as peak:
        speaks_to(backend, server.url)
        with pytest.raises(AnswerTooLargeError) as caught:
            await generate(backend, request)
        await backend.aclose()
    assert caught.value.limit == limit
    assert peak[0] < 3 * limit
    generation, abort = server.heads
    assert b"generate" in generation
    assert b"abort" in abort  # the server may still be at work on what is read no further


@pytest.mark.parametrize("kind", KINDS)
async def test_scores_are_read_up_to_the_limit_of_their_request(kind: Kind) -> None:
    backend = await connected(kind)
    with Server() as server:
        speaks_to(backend, server.url)
        with pytest.raises(AnswerTooLargeError) as caught:
            await score(backend, [5] * 50)
        await backend.aclose()
    assert caught.value.limit < 2 * MIB


STREAMS = {
    "one line without an end": b"x" * (MIB - 1) + b"x",
    "comments without an end": (b": " + b"x" * 1021 + b"\n") * 1024,
}


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_stream_is_read_up_to_the_limit_of_its_request(kind: Kind, name: str) -> None:
    backend = await connected(kind)
    chunk = b"%x\r\n" % MIB + STREAMS[name] + b"\r\n"
    request = request_of(max_new_tokens=8)
    with Server(chunk=chunk, kind="text/event-stream") as server, held() as peak:
        speaks_to(backend, server.url)
        with pytest.raises(AnswerTooLargeError) as caught:
            await generate(backend, request, lambda _: None)
        await backend.aclose()
    size = answer_size(request)
    assert caught.value.limit >= size.body
    assert (caught.value.limit == size.body) == (name == "one line without an end")
    assert peak[0] < 4 * size.body


async def test_events_that_are_kept_hold_one_answer_at_most() -> None:
    """SGLang's incremental events are kept until the last has come."""
    backend = await connected("sglang")
    request = request_of(max_new_tokens=8)

    def pieces() -> Iterator[bytes]:
        yield head(CHUNKED, kind="text/event-stream")
        for count in range(1, 9):
            event = {"output_ids": [5], "meta_info": {"completion_tokens": count}, "text": "x" * (MIB // 2)}
            data = f"data: {json.dumps(event)}\n\n".encode()
            yield b"%x\r\n" % len(data) + data + b"\r\n"

    server = RawServer(b"")
    server._says = pieces()
    with server:
        speaks_to(backend, server.url)
        with pytest.raises(AnswerTooLargeError):
            await generate(backend, request, lambda _: None)
        await backend.aclose()


@pytest.mark.parametrize("charset", ["utf-7", "unicode_escape", "utf-16", "no\u017fuch", "utf-8\x01"])
async def test_an_error_body_that_is_not_text_is_read_as_far_as_possible(charset: str) -> None:
    body = b'{"message": "+2AA- \\ud800 \xff gone"}'
    answer = head(f"Content-Length: {len(body)}", status="500 Broken", kind=f"text/plain; charset={charset}")
    with RawServer(answer.decode().encode("utf-8") + body) as server:
        error = await refused(server.url, HttpRequest("/x"))
    assert error.status == 500
    assert charset == "utf-16" or "gone" in error.body
    assert (str(error) + error.body).encode()  # without lone surrogates


async def connected(kind: Kind) -> Any:
    engine = engine_of(kind)
    async with ScriptedServer(engine) as server:
        backend = BACKENDS[kind](server.base_url, sleep=Waits(), patience_s=0)
        await backend.connect()
        await backend.aclose()
    return backend


def speaks_to(backend: Any, url: str) -> None:
    """Let a backend that knows its server already send to another."""
    http = http_to(backend.name, url, sleep=Waits(), patience_s=0)
    backend.http = http


@pytest.mark.parametrize(
    "optional_outputs",
    [OptionalOutputs(), OptionalOutputs(top_logprobs=19, prompt_logprobs=True)],
    ids=["least", "most"],
)
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("kind", WIRES)
async def test_a_real_answer_is_far_below_its_limit(
    kind: Kind, streams: bool, optional_outputs: OptionalOutputs
) -> None:
    """It takes less than a quarter of the share of the limit that depends on its tokens."""
    for prompt, sampled in ((1, 1), (200, 60)):
        sampling = SamplingParams(max_new_tokens=sampled, ignore_eos=True)
        request = TokenRequest(np.full(prompt, 7, np.int32), sampling, "r", optional_outputs=optional_outputs)
        backend = in_process_backend(engine := engine_of(kind, max_model_len=1000))
        await generate(backend, request, (lambda _: None) if streams else None)
        length = len(engine.exchanges[-1].response.content)
        parts = 1 + (stream_events(request) if kind == "sglang" else 1) if streams else 1
        share = (answer_size(request).body - BASE_BYTES) * parts
        assert length < share / 4 + 2048 * parts


PACKINGS = {
    "": bytes,
    "identity": bytes,
    "gzip": gzip.compress,
    "Deflate": zlib.compress,
    "x-gzip, identity": gzip.compress,
}


@pytest.mark.parametrize("packing", PACKINGS)
@given(
    body=st.one_of(st.binary(max_size=2000), st.integers(0, 2**20).map(bytes)),
    cuts=st.lists(st.integers(0, 2**20), max_size=8),
    limit=st.integers(1, 2**20),
    after=st.binary(max_size=100),
)
@settings(deadline=None, max_examples=20)
def test_a_body_is_the_same_in_every_encoding_and_chunking(
    packing: str, body: bytes, cuts: list[int], limit: int, after: bytes
) -> None:
    packed = PACKINGS[packing](body) + (after if "gzip" in packing else b"")
    at = sorted(min(cut, len(packed)) for cut in cuts)

    async def pieces() -> AsyncIterator[bytes]:
        for start, stop in zip([0, *at], [*at, len(packed)], strict=True):
            yield packed[start:stop]

    async def release() -> None: ...

    def response() -> HttpResponse:
        return HttpResponse(200, {"content-encoding": packing}, pieces(), release)

    async def run() -> None:
        if max(len(body), len(packed)) <= limit:
            assert await response().read(limit) == body
            assert await response().text(limit) == body.decode("utf-8", "replace")
        else:
            with pytest.raises(BodyTooLargeError):
                await response().read(limit)

    asyncio.run(run())


SIZES = st.integers(0, 10**6)


@given(st.data())
def test_the_limit_is_the_sum_of_its_parts(data: st.DataObject) -> None:
    """The parts are those of the table in docs/errors.md."""
    prompt, sampled = data.draw(SIZES), data.draw(SIZES)
    top, repeats = data.draw(st.integers(0, 1024)), data.draw(SIZES)
    top_k = data.draw(st.just(-1) | st.integers(1, 10**5))
    shape: Any = data.draw(st.sampled_from([False, True, (3, 5)]))
    scores, prompt_logprobs = data.draw(st.booleans()), data.draw(st.booleans())
    request = OptionalOutputs(top_logprobs=top, prompt_logprobs=prompt_logprobs, routed_experts=shape)
    parts = [
        BASE_BYTES,
        TOKEN_BYTES * (prompt + sampled),
        SCORED_BYTES * top * sampled,
        MASK_BYTES * top_k * sampled if top_k > 0 else 0,
        SCORED_BYTES * prompt if scores or prompt_logprobs else 0,
        EXPERT_BYTES * (prompt + sampled) * {False: 0, True: UNKNOWN_EXPERTS, (3, 5): 15}[shape],
    ]
    found = size_of(prompt, sampled, request, top_k=top_k, repeats=repeats, scores=scores)
    assert (found.body, found.stream) == (sum(parts), sum(parts) * (1 + repeats))


@given(old=st.integers(0, 3), new=st.integers(0, 3), length=st.integers(1, 9))
def test_the_limit_counts_the_tokens_of_images(old: int, new: int, length: int) -> None:
    picture = Image(b"x", "png", 28, 28)
    request = request_of([7] * (old + new) + [5])
    images = PromptImages((picture,) * (old + new), 7, (length,) * old)
    more = old * (length - 1) + new * IMAGE_TOKENS
    assert answer_size(replace(request, images=images)).body == answer_size(request).body + more * TOKEN_BYTES


async def test_a_compressed_stream_is_refused() -> None:
    backend = await connected("sglang")
    packed = gzip.compress(b"data: [DONE]\n\n")
    lines = ["Content-Encoding: gzip", f"Content-Length: {len(packed)}"]
    with RawServer(head(*lines, kind="text/event-stream") + packed) as server:
        speaks_to(backend, server.url)
        with pytest.raises(ProtocolViolationError, match="'gzip', which a stream must not have"):
            await generate(backend, request_of(), lambda _: None)
        await backend.aclose()


async def test_a_body_of_an_announced_length_above_the_limit_is_not_read() -> None:
    read: list[int] = []

    async def raw() -> AsyncIterator[bytes]:
        read.append(1)
        yield b"x" * 10

    async def release() -> None: ...

    for length in ("11", "99999999999"):
        with pytest.raises(BodyTooLargeError) as caught:
            await HttpResponse(200, {"content-length": length}, raw(), release).read(10)
        assert (caught.value.limit, read) == (10, [])
    for headers in ({"content-length": "10"}, {"content-length": "?"}, {}):
        assert await HttpResponse(200, headers, raw(), release).read(10) == b"x" * 10


def test_the_docs_list_the_limits() -> None:
    page = (Path(__file__).parents[2] / "docs" / "errors.md").read_text(encoding="utf-8")
    for row in (
        f"tokenize, admin | {INFO_BYTES // MIB} MiB |",
        f"the body of an error | {ERROR_BYTES // 1024} KiB,",
        f"a generation | {BASE_BYTES // MIB} MiB + {TOKEN_BYTES // 1024} KiB for each token",
        f"top logprobs | {SCORED_BYTES} bytes",
        f"or a score | {SCORED_BYTES} bytes",
        f"a sampling mask | {MASK_BYTES} bytes",
        f"routed experts | {EXPERT_BYTES} bytes",
        f"{UNKNOWN_EXPERTS:,} of them where only the server knows",
    ):
        assert row in page
