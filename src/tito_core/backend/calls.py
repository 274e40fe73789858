"""Every call of a backend: checks before, validation after.

No backend vouches for itself (law 4): all code outside `tito_core.backend` that generates or scores calls these
functions. They never send a request that can crash a server, and never accept an answer that would lead to one.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Sequence

import numpy as np
from strands.types.exceptions import ContextWindowOverflowException

from tito_core.backend.engine_info import EngineInfo
from tito_core.backend.errors import (
    BackendError,
    BadRequestError,
    ProtocolViolationError,
    UnsupportedByServerError,
    hide_causes,
)
from tito_core.backend.images import PromptImages, check_images, expanded
from tito_core.backend.protocol import (
    Backend,
    ImageScorer,
    OnChunk,
    RawResponse,
    RawScores,
    TokenChunk,
    TokenRequest,
    TokenResponse,
)
from tito_core.backend.raw_values import INT32_MAX, RawReader, integer, integers
from tito_core.backend.request_check import check_input_ids, clamp_new_tokens, read_only, sendable
from tito_core.backend.typed_values import short_repr, utf8_or_none
from tito_core.backend.validation import validated
from tito_core.ledger.columns import Logprobs, TokenIds
from tito_core.ledger.errors import LawViolationError

ABORT_WITHIN_S = 5.0
"""Longest time for the abort of a request that got another one's answer, in seconds."""


def validated_scores(raw: object, sent: TokenIds, info: EngineInfo, placeholder: int | None = None) -> Logprobs:
    """Check law 4 on teacher-forced scores: the ids equal those sent, and all but the first have a logprob.

    Args:
        raw: What `Backend.score` returned.
        sent: The sequence, int32, shape (n,); expanded.
        info: The server's properties.
        placeholder: Id of the placeholders of its images, for which servers report other ids and meaningless scores.

    Returns:
        float32, shape (n,); the first and placeholders are NaN.

    Raises:
        ProtocolViolationError: `raw` is not a `RawScores`, or contradicts the request.
    """
    request_id = utf8_or_none(raw.request_id) if isinstance(raw, RawScores) else None
    reader = RawReader(info.backend, request_id or "")
    with reader.reading(raw):
        if not isinstance(raw, RawScores):
            raise reader.violation(f"Law 4: score() must return a RawScores, not {short_repr(raw)}.")
        if raw.request_id is not None and (raw.response_id is not None or "response_id" not in info.unreported):
            reader.same_request(raw.request_id, raw.response_id)
        scored = reader.floats("scores", raw.logprobs)
        if len(scored) != len(sent):
            raise reader.violation(f"Law 4: {len(sent)} ids were sent for scoring, the server scored {len(scored)}.")
        if raw.token_ids is not None:
            _same_ids(reader, raw.token_ids, sent.tolist(), placeholder)
        inside = sent == placeholder if placeholder is not None else np.zeros(len(sent), np.bool_)
        if inside.any():
            scored = [0.0 if is_inside else score for score, is_inside in zip(scored, inside.tolist(), strict=True)]
        for offset, (token, logprob) in enumerate(zip(sent.tolist(), scored, strict=True)):
            absent = logprob is None or (offset == 0 and math.isnan(logprob))
            if absent != (offset == 0):
                raise reader.violation(
                    f"Law 4: the server scored id {token} at offset {offset} with {logprob}; only the first is None."
                )
        logprobs = reader.logprobs([0.0, *scored[1:]])
        logprobs[0] = np.nan
        logprobs[inside] = np.nan
        return logprobs


def validated_ids(raw: object, info: EngineInfo) -> TokenIds | None:
    """Check the ids that `Backend.tokenize` returned; None if the server cannot encode text.

    Returns:
        int32, shape (n,).

    Raises:
        ProtocolViolationError: `raw` is not a list of token ids.
    """
    if raw is None:
        return None
    reader = RawReader(info.backend, "")
    with reader.reading(raw):
        return reader.token_ids(reader.integers("ids of a text", raw), "id")


def _same_ids(reader: RawReader, ids: object, sent: list[int], placeholder: int | None) -> None:
    found = list(ids) if isinstance(ids, Sequence | np.ndarray) else []
    if len(found) != len(sent):
        raise reader.violation(f"Law 4: {len(sent)} ids were sent for scoring, the server scored {len(found)}.")
    for offset, (token, other) in enumerate(zip(sent, found, strict=True)):
        if integer(other) != token and not (offset == 0 and other is None) and token != placeholder:
            raise reader.violation(
                f"Law 4: id {token} at offset {offset} was sent, the server scored {short_repr(other)}."
            )


async def connected(backend: Backend) -> EngineInfo:
    """Return the properties of a backend's server.

    Raises:
        BackendError: The server could not be queried.
        ProtocolViolationError: `connect` did not return an `EngineInfo`, which checks its own fields.
    """
    info: object = await backend.connect()
    if isinstance(info, EngineInfo):
        return info
    raise ProtocolViolationError(
        f"connect() of the backend {backend.name!r} must return an EngineInfo, not {short_repr(info)}.",
        backend=backend.name,
    )


async def generate(backend: Backend, request: TokenRequest, on_chunk: OnChunk | None = None) -> TokenResponse:
    """Sample one completion.

    Args:
        backend: Any backend.
        request: A prompt that does not fit the context is refused; `max_new_tokens` is clamped to it.
        on_chunk: See `Backend.generate`. Ids that were not streamed follow in one chunk after the response, because
            optional outputs can rule out a stream of one part of a resumed answer and not of the next.

    Raises:
        BackendError: The request cannot be sent, or failed. What else the backend raises is its cause.
        ProtocolViolationError: The answer breaks law 2, 4 or 10.
        LawViolationError, ContextWindowOverflowException: From the backend, unchanged.
        Exception: What `on_chunk` raised.
    """
    info = await connected(backend)
    sent = sendable(request, info, backend=backend.name)
    if on_chunk is None:
        try:
            raw: object = await backend.generate(sent)
        except Exception as error:
            raise _typed(error, backend, sent, was_streamed=False)  # noqa: B904  # it is the cause already
        return await _own(backend, raw, sent, info)

    reader, seen, callers_own = RawReader(info.backend, request.request_id), list[int](), False

    def show(chunk: TokenChunk) -> None:
        nonlocal callers_own
        with reader.reading(chunk):
            read = _readable(chunk, info.backend, request.request_id)
        seen.extend(read.output_ids.tolist())
        callers_own = True
        on_chunk(read)
        callers_own = False

    try:
        raw = await backend.generate(sent, show)
    except Exception as error:
        if callers_own:
            raise
        raise _typed(error, backend, sent, was_streamed=bool(seen))  # noqa: B904
    response = await _own(backend, raw, sent, info)
    if response.output_ids[: len(seen)].tolist() != seen:
        raise reader.violation(
            f"Law 4: the streamed chunks hold the ids {short_repr(seen)}, but the whole answer begins with "
            f"{short_repr(response.output_ids[: len(seen)].tolist())}. The answer was discarded."
        )
    if len(seen) < len(response.output_ids):
        on_chunk(TokenChunk(response.output_ids[len(seen) :].astype(np.int64)))
    return response


def _typed(error: Exception, backend: Backend, sent: TokenRequest, *, was_streamed: bool) -> Exception:
    """Return an error of `Backend.generate` as it is where its type is known, else as the cause of a `BackendError`.

    A client's own errors, such as those of an RPC, would be taken for errors of the agent's code.
    """
    if isinstance(error, BackendError | LawViolationError | ContextWindowOverflowException):
        return error
    typed = BackendError(
        f"{backend.name}'s client raised {type(error).__name__}: {' '.join(str(error).split())}",
        backend=backend.name,
        request_id=sent.request_id,
    )
    typed.was_streamed = was_streamed
    typed.__cause__ = error
    return hide_causes(typed)


async def _own(backend: Backend, raw: object, sent: TokenRequest, info: EngineInfo) -> TokenResponse:
    """Validate an answer. Where it is that of another request, abort ours, which the engine may still be running."""
    try:
        return validated(raw, sent, info)
    except ProtocolViolationError as error:
        if error.sent and isinstance(raw, RawResponse):
            with contextlib.suppress(Exception):
                async with asyncio.timeout(ABORT_WITHIN_S):
                    await backend.abort(utf8_or_none(raw.request_id) or sent.request_id)
        raise


async def score(backend: Backend, token_ids: Sequence[int] | TokenIds, images: PromptImages | None = None) -> Logprobs:
    """Score a sequence teacher-forced: log p(token i | tokens before i), raw, at temperature 1.

    Args:
        backend: Any backend.
        token_ids: The sequence; collapsed if it has images.
        images: Its images, with all their lengths.

    Returns:
        float32, shape (n,) of the expanded sequence; NaN for the first, since no token precedes it, and for
        placeholders of images, whose scores mean nothing.

    Raises:
        BackendError: The sequence cannot be sent, or scoring failed.
        ProtocolViolationError: The scores break law 4.
    """
    info = await connected(backend)
    ids = read_only(check_input_ids(token_ids, info.vocab_size, backend=backend.name))
    # vLLM cannot score without sampling one token.
    if images is None:
        clamp_new_tokens(1, len(ids), info.max_model_len, backend=backend.name)
        return validated_scores(await backend.score(ids), ids, info)
    check_images(images, ids, info.images, backend=backend.name)
    if images.new:
        raise BadRequestError(
            f"Scoring needs the lengths of all {len(images.images)} images, but only {len(images.lengths)} are given.",
            backend=backend.name,
        )
    if not isinstance(backend, ImageScorer):
        raise UnsupportedByServerError(
            f"The backend {backend.name!r} cannot score a sequence with images: it has no score_with_images().",
            backend=backend.name,
        )
    whole = expanded(ids, images.placeholder, images.lengths)
    clamp_new_tokens(1, len(whole), info.max_model_len, backend=backend.name)
    return validated_scores(await backend.score_with_images(ids, images), whole, info, images.placeholder)


async def tokenize(backend: Backend, text: str) -> TokenIds | None:
    """Encode text with the server's own tokenizer (law 15).

    Returns:
        int32, shape (n,); None if the server cannot encode text.

    Raises:
        BackendError: The server could not be queried.
        ProtocolViolationError: The result is not a list of token ids.
    """
    return validated_ids(await backend.tokenize(text), await connected(backend))


def _readable(chunk: object, backend: str, request_id: str) -> TokenChunk:
    ids = integers(chunk.output_ids) if isinstance(chunk, TokenChunk) else None
    if ids is None or not all(0 <= token <= INT32_MAX for token in ids):
        raise ProtocolViolationError(
            f"Law 4: on_chunk must be called with a TokenChunk of token ids, not {short_repr(chunk)}.",
            backend=backend,
            request_id=request_id,
        )
    return TokenChunk(np.array(ids, np.int64))
