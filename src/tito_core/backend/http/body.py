"""The body of an answer: how large it may be for its request, and how it is read no further than that.

An id, its logprob and its share of a stream's event take about 50 to 300 bytes on both engines. The limits are several
times the largest answers of either engine: they only protect our memory from a faulty server.
"""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator

import msgspec

from tito_core.backend.protocol import NO_OPTIONAL_OUTPUTS, OptionalOutputs, TokenRequest

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
IMAGE_TOKENS = 1 << 14
"""Maximum number of tokens of a new image: that of Qwen-VL's image processors."""
INFO_BYTES = 4 << 20
"""Size limit of answers that do not depend on the request: models, version, health, model info, admin."""
ERROR_BYTES = 1 << 18
"""Length to which the body of an error is cut."""


class AnswerSize(msgspec.Struct, frozen=True):
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
    scores: int = 0,
) -> AnswerSize:
    """Return the size limits for a number of prompt and output tokens.

    Args:
        prompt: Tokens of the prompt.
        sampled: Maximum number of tokens of the answer.
        optional_outputs: The requested optional outputs.
        top_k: The sampling parameter, which limits the width of a sampling mask.
        repeats: See `answer_size`.
        scores: Logprobs of each prompt token that are requested besides `optional_outputs`.
    """
    tokens = prompt + sampled
    body = BASE_BYTES + tokens * TOKEN_BYTES
    body += optional_outputs.top_logprobs * sampled * SCORED_BYTES
    body += max(top_k, 0) * sampled * MASK_BYTES
    body += prompt * (scores or int(optional_outputs.prompt_logprobs)) * SCORED_BYTES
    if optional_outputs.routed_experts:
        layers, experts = optional_outputs.expert_shape or (1, UNKNOWN_EXPERTS)
        body += tokens * layers * experts * EXPERT_BYTES
    return AnswerSize(body, body * (1 + repeats))


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


def decompressed(body: bytes, encoding: str, limit: int) -> bytes:
    """Return a body without its Content-Encoding: at most `limit` bytes and one more.

    Requests ask for an unencoded answer, so only what a careless proxy may do is decoded: gzip or deflate, once.

    Raises:
        UndecodableBodyError: The body does not match its encoding, or the encoding is another one.
    """
    if not encoding:
        return body
    codings = [coding for coding in encoding.lower().replace(" ", "").split(",") if coding not in ("", "identity")]
    if not codings:
        return body
    if len(codings) > 1 or codings[0] not in ("gzip", "x-gzip", "deflate"):
        raise UndecodableBodyError(
            f"its Content-Encoding is {encoding[:40]!r} ({len(codings)} codings), but the request accepts only an "
            "unencoded answer"
        )
    try:
        return zlib.decompressobj(zlib.MAX_WBITS | 32).decompress(body, limit + 1)  # 32: the header decides
    except zlib.error as error:
        raise UndecodableBodyError(f"it is not {codings[0]}, as its Content-Encoding says") from error
