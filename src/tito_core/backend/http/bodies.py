"""Read response bodies up to a size limit that depends on the request, also after decompression.

An id, its logprob and its share of a stream's event take about 50 to 300 bytes on both engines. The limits are several
times the largest answers of either engine: they only protect our memory from a faulty server.
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
"""Everything besides tokens."""
TOKEN_BYTES = 2048
"""Per token of prompt and answer: id, logprob, text, and experts that a server adds unrequested."""
SCORED_BYTES = 512
"""Per top logprob and prompt logprob."""
MASK_BYTES = 16
"""Per id of a sampling mask."""
EXPERT_BYTES = 8
"""Per expert of a token and layer, as base64 of four bytes or as a JSON number."""
UNKNOWN_EXPERTS = 2048
"""Assumed experts per token over all layers if unknown; 94 layers of 8 are 752."""


@dataclass(frozen=True, slots=True)
class AnswerSize:
    """Size limits of one answer.

    Attributes:
        body: Maximum number of bytes of the body, or of one event of a stream.
        stream: Maximum number of bytes of a whole stream.
    """

    body: int
    stream: int


def answer_size(request: TokenRequest, *, repeats: int = 1) -> AnswerSize:
    """Return the size limits of the answer to a generation.

    Args:
        request: Its `max_new_tokens` fits the context.
        repeats: How many events of its stream repeat the whole answer so far.
    """
    sampling, images = request.sampling, request.images
    new = 0 if images is None else len(images.new)
    return size_of(
        request.least_length + new * IMAGE_TOKENS,
        sampling.max_new_tokens,
        request.optional_outputs,
        top_k=sampling.top_k,
        repeats=repeats,
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
    """Return the size limits for a number of prompt and output tokens.

    Args:
        prompt: Tokens of the prompt.
        sampled: Maximum number of tokens of the answer.
        optional_outputs: The requested optional outputs.
        top_k: The sampling parameter, which limits the width of a sampling mask.
        repeats: See `answer_size`.
        scores: Whether prompt logprobs are requested besides `optional_outputs`.
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


IMAGE_TOKENS = 1 << 14
"""Maximum number of tokens of a new image: that of Qwen-VL's image processors."""
INFO_BYTES = 4 << 20
"""Size limit of answers that do not depend on the request: models, version, health, model info, admin."""
ERROR_BYTES = 1 << 18
"""Length to which the body of an error is cut."""
_SLICE_BYTES = 1 << 18
"""Maximum number of input bytes and of output bytes in one step of decompression."""


class BodyTooLargeError(Exception):
    """A body exceeds its size limit.

    Attributes:
        limit: The limit, in bytes.
    """

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.limit = limit


class UndecodableBodyError(Exception):
    """A body does not match its Content-Encoding, or the encoding is not supported."""


async def read_whole(pieces: AsyncIterator[bytes], limit: int) -> bytes:
    """Read a body to its end.

    Raises:
        BodyTooLargeError: It exceeds `limit` bytes. At most one piece beyond the limit was read.
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
    """Decompresses gzip or deflate in slices, as a compressed piece may expand to a thousand times its size."""

    def __init__(self, coding: str) -> None:
        self._coding = coding
        self._inflate = zlib.decompressobj(zlib.MAX_WBITS | 16) if coding == "gzip" else None

    def __call__(self, piece: bytes) -> Iterator[bytes]:
        """Yield a piece decompressed, in steps of bounded work; a step without output yields empty bytes."""
        for start in range(0, len(piece), _SLICE_BYTES):
            yield from self._slice(piece[start : start + _SLICE_BYTES])

    def _slice(self, piece: bytes) -> Iterator[bytes]:
        if self._inflate is None and piece:  # deflate may lack the zlib header, whose method is 8
            self._inflate = zlib.decompressobj(zlib.MAX_WBITS if piece[0] & 15 == zlib.DEFLATED else -zlib.MAX_WBITS)
        while piece and self._inflate is not None and not self._inflate.eof:
            try:
                out = self._inflate.decompress(piece, _SLICE_BYTES)
            except zlib.error as error:
                raise UndecodableBodyError(f"it is not {self._coding}, as its Content-Encoding says") from error
            piece = self._inflate.unconsumed_tail
            yield out


def _decoder(encoding: str) -> Callable[[bytes], Iterator[bytes]]:
    """Return the decoder for a Content-Encoding of at most one coding.

    Several codings are refused: each could multiply the work of the next by a thousand, and requests ask for an
    unencoded answer anyway.

    Raises:
        UndecodableBodyError: Several codings, or one that is neither gzip nor deflate.
    """
    codings = [coding.strip().lower() for coding in encoding.split(",")]
    codings = [coding for coding in codings if coding not in ("", "identity")]
    if len(codings) > 1:
        raise UndecodableBodyError(
            f"its Content-Encoding names {len(codings)} codings, but the request accepts only an unencoded answer"
        )
    if not codings:
        return lambda piece: iter((piece,))
    if codings[0] not in ("gzip", "x-gzip", "deflate"):
        raise UndecodableBodyError(
            f"its Content-Encoding is {codings[0][:40]!r}, but the request accepts only an unencoded answer"
        )
    return _Inflate(codings[0].removeprefix("x-"))


async def decode_pieces(pieces: AsyncIterator[bytes], encoding: str) -> AsyncIterator[bytes]:
    """Yield the pieces of a body decompressed, each of at most 256 KiB.

    The event loop runs between pieces, so that a deadline also ends the decoding of a body that has fully arrived.

    Raises:
        UndecodableBodyError: The body cannot be decoded.
    """
    decode = _decoder(encoding)
    async for piece in pieces:
        for part in decode(piece):
            if part:
                yield part
            await asyncio.sleep(0)


def text_of(raw: bytes, encoding: str, content_type: str, limit: int) -> str:
    """Return the start of a body as text in its charset, else as UTF-8, with U+FFFD for invalid bytes.

    Args:
        raw: The body as received.
        encoding: Its Content-Encoding. A body that does not match it is not decoded.
        content_type: Its Content-Type, which may name a charset.
        limit: Maximum number of bytes after decompression.
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
    except (LookupError, ValueError):  # unknown charset, or not one of text
        text = body.decode("utf-8", "replace")
    return text.encode("utf-8", "replace").decode()  # UTF-7 can encode lone surrogates, which cannot be printed
