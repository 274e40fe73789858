"""Bodies of answers: how large one may be, by what was asked for; read up to that bound, also after decompression.

An id, its logprob and its share of a stream's event take about 50 to 300 bytes on both engines. The bounds are several
times what the most talkative of them writes, so that no honest answer meets them, and no server fills our memory.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from email.message import Message

from tito_core.backend.optional_outputs import NO_OPTIONAL_OUTPUTS, OptionalOutputs
from tito_core.backend.protocol import TokenRequest

BASE_BYTES = 1 << 20
"""What an answer says apart from its tokens."""
TOKEN_BYTES = 2048
"""For each token of prompt and answer: id, logprob, text, and experts that a server adds unasked."""
SCORED_BYTES = 512
"""For each optional logprob: the top ones, and those of the prompt."""
MASK_BYTES = 16
"""For each id of a sampling mask."""
EXPERT_BYTES = 8
"""For each expert of a token and layer: as base64 of four bytes, or as a JSON number."""
UNKNOWN_EXPERTS = 2048
"""Experts of a token over all layers, where only the server knows them: 94 layers of 8 are 752."""


@dataclass(frozen=True, slots=True)
class AnswerSize:
    """Bounds on one answer.

    Attributes:
        body: Most bytes of the body, or of one event of a stream.
        stream: Most bytes of a whole stream.
    """

    body: int
    stream: int


def answer_size(request: TokenRequest, *, repeats: int = 1) -> AnswerSize:
    """Return the bounds on the answer to a generation.

    Args:
        request: What is asked; its `max_new_tokens` fits the context.
        repeats: How many events of its stream repeat all of the answer so far.
    """
    sampling = request.sampling
    return size_of(
        len(request.input_ids), sampling.max_new_tokens, request.optional_outputs, top_k=sampling.top_k, repeats=repeats
    )


def size_of(
    prompt: int,
    sampled: int,
    optional_outputs: OptionalOutputs = NO_OPTIONAL_OUTPUTS,
    *,
    top_k: int = 0,
    repeats: int = 1,
    scores: bool = False,
) -> AnswerSize:
    """Return the bounds for so many tokens of prompt and answer.

    Args:
        prompt: Tokens of the prompt.
        sampled: Most tokens of the answer.
        wanted: What is wanted beside.
        top_k: The sampling parameter, as wide as a sampling mask gets.
        repeats: See `answer_size`.
        scores: Whether the prompt's own logprobs are asked for, whatever is wanted.
    """
    tokens = prompt + sampled
    body = BASE_BYTES + tokens * TOKEN_BYTES
    body += optional_outputs.top_logprobs * sampled * SCORED_BYTES
    body += max(top_k, 0) * sampled * MASK_BYTES
    if scores or optional_outputs.prompt_logprobs:
        body += prompt * SCORED_BYTES
    if optional_outputs.routed_experts:
        layers, experts = optional_outputs.expert_shape or (1, UNKNOWN_EXPERTS)
        body += tokens * layers * experts * EXPERT_BYTES
    return AnswerSize(body, body * (1 + repeats))


INFO_BYTES = 4 << 20
"""Bound on an answer whose size follows from nothing that was asked: models, version, health, model info, admin."""
ERROR_BYTES = 1 << 18
"""Bound on the body of an error. What is longer is cut off there: the status still tells."""
_SLICE_BYTES = 1 << 18
"""Most bytes that one step of decompression takes, and that it gives."""


class BodyTooLargeError(Exception):
    """A body is longer than its bound.

    Attributes:
        limit: The bound, in bytes.
    """

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.limit = limit


class UndecodableBodyError(Exception):
    """A body is not encoded as its Content-Encoding says, or in a way that was not asked for."""


async def read_whole(pieces: AsyncIterator[bytes], limit: int) -> bytes:
    """Read a body to its end.

    Raises:
        BodyTooLargeError: It is longer than `limit` bytes. No more than one piece past them was read.
    """
    found: list[bytes] = []
    length = 0
    async for piece in pieces:
        length += len(piece)
        if length > limit:
            raise BodyTooLargeError(limit)
        found.append(piece)
    return b"".join(found)


async def read_start(pieces: AsyncIterator[bytes], limit: int) -> bytes:
    """Read a body to its end, or to its first `limit` bytes."""
    found: list[bytes] = []
    length = 0
    async for piece in pieces:
        found.append(piece)
        length += len(piece)
        if length >= limit:
            break
    return b"".join(found)[:limit]


class _Inflate:
    """Decompresses gzip or deflate, a slice at a time: one compressed piece may hold a thousand times its size."""

    def __init__(self, coding: str) -> None:
        self._coding = coding
        self._inflate = zlib.decompressobj(zlib.MAX_WBITS | 16) if coding == "gzip" else None

    def __call__(self, piece: bytes) -> Iterator[bytes]:
        """Yield what a piece holds, in steps of bounded work: a step that gives nothing yields an empty one."""
        for start in range(0, len(piece), _SLICE_BYTES):
            yield from self._slice(piece[start : start + _SLICE_BYTES])

    def _slice(self, piece: bytes) -> Iterator[bytes]:
        if self._inflate is None and piece:  # deflate comes with zlib's header, or without: zlib's names method 8
            self._inflate = zlib.decompressobj(zlib.MAX_WBITS if piece[0] & 15 == zlib.DEFLATED else -zlib.MAX_WBITS)
        while piece and self._inflate is not None and not self._inflate.eof:
            try:
                out = self._inflate.decompress(piece, _SLICE_BYTES)
            except zlib.error as error:
                raise UndecodableBodyError(f"it is not the {self._coding} that its Content-Encoding says") from error
            piece = self._inflate.unconsumed_tail
            yield out


def _decoder(encoding: str) -> Callable[[bytes], Iterator[bytes]]:
    """Return what undoes a Content-Encoding of at most one coding.

    Of several, each could multiply the work of the next by a thousand, and no server needs them: an unencoded answer
    was asked for.

    Raises:
        UndecodableBodyError: It names several codings, or one that is neither gzip nor deflate.
    """
    codings = [coding.strip().lower() for coding in encoding.split(",")]
    codings = [coding for coding in codings if coding not in ("", "identity")]
    if len(codings) > 1:
        raise UndecodableBodyError(
            f"its Content-Encoding names {len(codings)} codings, though an unencoded answer was asked for"
        )
    if not codings:
        return lambda piece: iter((piece,))
    if codings[0] not in ("gzip", "x-gzip", "deflate"):
        raise UndecodableBodyError(
            f"its Content-Encoding is {codings[0][:40]!r}, though an unencoded answer was asked for"
        )
    return _Inflate(codings[0].removeprefix("x-"))


async def decode_pieces(pieces: AsyncIterator[bytes], encoding: str) -> AsyncIterator[bytes]:
    """Yield the pieces of a body decompressed, each of at most a quarter of a mebibyte.

    The event loop runs between two of them, so that a deadline ends also a body whose bytes are all there.

    Raises:
        UndecodableBodyError: See there.
    """
    decode = _decoder(encoding)
    async for piece in pieces:
        for part in decode(piece):
            if part:
                yield part
            await asyncio.sleep(0)


def text_of(raw: bytes, encoding: str, content_type: str, limit: int) -> str:
    """Return the start of a body as text: by its charset, else as UTF-8, with U+FFFD for what is not text.

    Args:
        raw: As it came.
        encoding: Its Content-Encoding. A body that is not encoded so is taken as it is.
        content_type: Its Content-Type, which may name a charset.
        limit: Most bytes after decompression.
    """
    body = raw
    try:
        parts, length = [], 0
        for part in _decoder(encoding)(raw):
            parts.append(part)
            length += len(part)
            if length >= limit:
                break
        body = b"".join(parts)[:limit]
    except UndecodableBodyError:
        pass
    header = Message()
    header["Content-Type"] = content_type
    try:
        text = body.decode(header.get_content_charset() or "utf-8", "replace")
    except (LookupError, ValueError):  # the charset encodes no text, or not so
        text = body.decode("utf-8", "replace")
    return text.encode("utf-8", "replace").decode()  # UTF-7 spells lone surrogates, which nothing could write down
