"""Every call of a backend: checks before, and validation after.

No backend vouches for itself (law 4): all code outside `tito_core.backend` that generates or scores calls these
functions. They never send a request that can crash a server, and never accept an answer that would lead to one.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from strands.types.exceptions import ContextWindowOverflowException

from tito_core.backend.errors import (
    OUT_OF_VOCABULARY,
    BackendError,
    BadRequestError,
    ContextLengthError,
    ProtocolViolationError,
    UnsupportedByServerError,
    hide_causes,
)
from tito_core.backend.id_text import IdText
from tito_core.backend.images import PromptImages, check_images, clamp_for_images, expanded
from tito_core.backend.optional_columns import read_npy
from tito_core.backend.protocol import (
    Backend,
    EngineInfo,
    IdScorer,
    ImageScorer,
    OnChunk,
    RawResponse,
    RawScores,
    TokenChunk,
    TokenRequest,
    TokenResponse,
)
from tito_core.backend.retries import ABORT_WITHIN_S
from tito_core.backend.sampling import SamplingParams
from tito_core.backend.validation import validated
from tito_core.backend.values import (
    INT32_MAX,
    RawReader,
    integer,
    integers,
    short_repr,
    utf8_or_none,
)
from tito_core.ledger.columns import Logprobs, TokenIds
from tito_core.ledger.errors import LawViolationError
from tito_core.ledger.turn import Adapter


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
            raise _typed(error, backend, sent)  # noqa: B904  # it is the cause already
        return await _own(backend, raw, sent, info)

    reader, seen, callers_own = RawReader(info.backend, request.request_id), list[int](), False

    def show(chunk: TokenChunk) -> None:
        nonlocal callers_own
        try:
            ids = _readable(chunk, reader)
        except Exception as error:
            raise reader.unreadable(chunk, error)  # noqa: B904  # it is the cause already
        seen.extend(ids)
        callers_own = True
        on_chunk(TokenChunk(np.array(ids, np.int64)))
        callers_own = False

    try:
        raw = await backend.generate(sent, show)
    except Exception as error:
        if callers_own:
            raise
        raise _typed(error, backend, sent)  # noqa: B904
    response = await _own(backend, raw, sent, info)
    if response.output_ids[: len(seen)].tolist() != seen:
        raise reader.violation(
            f"Law 4: the streamed chunks hold the ids {short_repr(seen)}, but the whole answer begins with "
            f"{short_repr(response.output_ids[: len(seen)].tolist())}. The answer was discarded."
        )
    if len(seen) < len(response.output_ids):
        on_chunk(TokenChunk(response.output_ids[len(seen) :].astype(np.int64)))
    return response


async def score(
    backend: Backend,
    token_ids: Sequence[int] | TokenIds,
    images: PromptImages | None = None,
    adapter: Adapter | None = None,
    of: Sequence[int] | TokenIds = (),
) -> Logprobs:
    """Score a sequence teacher-forced: log p(token i | tokens before i), raw, at temperature 1.

    Args:
        backend: Any backend.
        token_ids: The sequence; collapsed if it has images.
        images: Its images, with all their lengths.
        adapter: The LoRA adapter that scores; None for the model alone.
        of: Ids to score in the place of each token as well, by a server that can (`IdScorer`); not with images or an
            adapter.

    Returns:
        float32, shape (n,) of the expanded sequence; NaN for the first, since no token precedes it, and for
        placeholders of images, whose scores mean nothing. With k ids `of`, shape (n, 1 + k): the logprob of the token,
        then log p(of[j] | tokens before i).

    Raises:
        BackendError: The sequence cannot be sent, or scoring failed.
        ProtocolViolationError: The scores break law 4.
    """
    info = await connected(backend)
    ids = read_only(check_input_ids(token_ids, info.vocab_size, backend=backend.name))
    info.capabilities.check_adapter(adapter, backend=backend.name)
    named: dict[str, Any] = {} if adapter is None else {"adapter": adapter}  # backends without adapters lack the option
    # vLLM cannot score without sampling one token.
    if images is None:
        clamp_new_tokens(1, len(ids), info.max_model_len, backend=backend.name)
    if len(of):
        given = read_only(check_input_ids(of, info.vocab_size, backend=backend.name, what="Given id"))
        if not isinstance(backend, IdScorer) or images is not None or adapter is not None:
            problem = f"{len(of)} given ids cannot be scored by {backend.name!r}, with images or by an adapter."
            raise UnsupportedByServerError(f"{problem} Score the tokens alone.", backend=backend.name)
        return validated_scores(await backend.score_ids(ids, given), ids, info, of=given)
    if images is None:
        return validated_scores(await backend.score(ids, **named), ids, info)
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
    return validated_scores(await backend.score_with_images(ids, images, **named), whole, info, images.placeholder)


async def tokenize(backend: Backend, text: str) -> TokenIds | None:
    """Encode text with the server's own tokenizer (law 15).

    Returns:
        int32, shape (n,); None if the server cannot encode text.

    Raises:
        BackendError: The server could not be queried.
        ProtocolViolationError: The result is not a list of token ids.
    """
    return validated_ids(await backend.tokenize(text), await connected(backend))


def sendable(request: TokenRequest, info: EngineInfo, *, backend: str) -> TokenRequest:
    """Check a request before it is passed to a backend, and clamp `max_new_tokens` to the context.

    Args:
        request: The request.
        info: The server's properties.
        backend: Name for errors.

    Returns:
        The request with read-only int32 ids, clamped `max_new_tokens`, and the text of its ids.

    Raises:
        BadRequestError: Ids, parameters or the text cannot be sent.
        ContextLengthError: The prompt leaves no room for a single token.
        UnsupportedByServerError: The server does not support an optional output.
    """
    ids = read_only(check_input_ids(request.input_ids, info.vocab_size, backend=backend))
    check_sampling(request.sampling, info.vocab_size, backend=backend)
    if not request.is_probe:
        info.capabilities.check(request.optional_outputs, request.sampling, backend=backend)
    if request.adapter is not None:
        info.capabilities.check_adapter(request.adapter, backend=backend)
    if request.images is not None:
        check_images(request.images, ids, info.images, backend=backend)
    room = room_of(request, info.max_model_len, backend=backend)
    id_text = IdText.of(ids) if request.id_text is None else request.id_text
    if not id_text.matches(ids):
        raise BadRequestError(
            f"Law 4: the request's cached text of {id_text.length} ids does not match its {len(ids)} input ids, so it "
            "was not sent. Leave `id_text` out of the request: the core encodes the ids itself.",
            backend=backend,
            request_id=request.request_id,
        )
    echo, sampling = request.echo or request.images is not None, request.sampling.within(room)
    if (
        ids is request.input_ids
        and sampling is request.sampling
        and id_text is request.id_text
        and echo == request.echo
    ):
        return request  # a turn's own, whose ids are read-only and whose text was kept
    return replace(request, input_ids=ids, sampling=sampling, id_text=id_text, echo=echo)


def room_of(request: TokenRequest, max_model_len: int | None, *, backend: str) -> int:
    """Return how many tokens a request may sample: at most its limit, and what the context leaves.

    Room is left for new images; see `clamp_for_images`.

    Raises:
        ContextLengthError: The prompt leaves no room for a single token.
    """
    limit, length = request.sampling.max_new_tokens, request.least_length
    room = clamp_new_tokens(limit, length, max_model_len, backend=backend)
    return room if request.images is None else clamp_for_images(request.images.new, room, length, max_model_len)


def check_input_ids(
    input_ids: Sequence[int] | TokenIds, vocab_size: int | None, *, backend: str, what: str = "Prompt token"
) -> TokenIds:
    """Check a prompt before it is sent: an id outside the vocabulary, or an empty prompt, crashes an SGLang server.

    Args:
        input_ids: The prompt.
        vocab_size: Ids must be below it; None if unknown, then int32 is the bound.
        backend: Name for the error.
        what: One of the ids, for the error.

    Returns:
        int32, shape (len(input_ids),).

    Raises:
        BadRequestError: Empty, not a list of integers, or an id outside `0 <= id < vocab_size`.
    """
    try:
        ids = np.asarray(input_ids)
    except ValueError:  # lists of different lengths
        ids = np.asarray(input_ids, object)
    if ids.ndim != 1 or not len(ids) or ids.dtype.kind not in "iu":
        raise BadRequestError(
            f"A prompt must be a non-empty list of token ids, got shape {ids.shape} of {ids.dtype}.", backend=backend
        )
    highest = INT32_MAX if vocab_size is None else min(vocab_size - 1, INT32_MAX)
    if not _all_below(ids, highest):
        wrong = np.flatnonzero((ids < 0) | (ids > highest))
        of = "" if vocab_size is None else f" of {vocab_size} tokens"
        raise BadRequestError(
            f"{what} {int(ids[wrong[0]])} at offset {int(wrong[0])} is outside the vocabulary{of}, so it was "
            f"not sent. {OUT_OF_VOCABULARY}",
            backend=backend,
        )
    return ids.astype(np.int32, copy=False)


def read_only(ids: TokenIds) -> TokenIds:
    """Return ids that a backend cannot modify, since its answer is compared with them; a turn's ids already are."""
    if ids.flags.writeable:
        ids = ids.copy()
        ids.flags.writeable = False
    return ids


def _all_below(ids: npt.NDArray[np.integer], highest: int) -> bool:
    """Return whether all ids are in 0..highest; int32 in one pass, as negative ids are large when read as unsigned."""
    if ids.dtype == np.int32:
        return bool(np.maximum.reduce(ids.view(np.uint32)) <= highest)
    return bool(np.minimum.reduce(ids) >= 0 and np.maximum.reduce(ids) <= highest)


def check_sampling(sampling: SamplingParams, vocab_size: int | None, *, backend: str) -> None:
    """Refuse parameters that crash an SGLang server, also in a copy that bypassed `SamplingParams`' own checks.

    For `min_new_tokens` SGLang indexes the logits by the stop ids, and masks the only tokens that a complete grammar
    allows.

    Raises:
        BadRequestError: A stop id outside `0 <= id < vocab_size`, or a grammar together with `min_new_tokens`.
    """
    wrong = [i for i in sampling.stop_token_ids if i < 0 or (vocab_size is not None and i >= vocab_size)]
    if wrong:
        of = "" if vocab_size is None else f" of {vocab_size} tokens"
        raise BadRequestError(
            f"Stop token {wrong[0]} is outside the vocabulary{of}, so the request was not sent. Check that the "
            "tokenizer belongs to the model that the server runs.",
            backend=backend,
        )
    if sampling.grammar is not None and sampling.min_new_tokens:
        raise BadRequestError(
            f"min_new_tokens={sampling.min_new_tokens} cannot be combined with a grammar, so the request was not sent: "
            "leave min_new_tokens out.",
            backend=backend,
        )


def clamp_new_tokens(max_new_tokens: int, prompt_length: int, max_model_len: int | None, *, backend: str) -> int:
    """Return how many tokens may be sampled: at most `max_new_tokens`, and at most the room left in the context.

    Args:
        max_new_tokens: Maximum number of tokens to sample.
        prompt_length: Tokens of the prompt.
        max_model_len: Length of the context in tokens, or None if unknown.
        backend: Name for the error.

    Raises:
        ContextLengthError: The prompt leaves no room for a single token.
    """
    if max_model_len is None:
        return max_new_tokens
    room = max_model_len - prompt_length
    if room < 1:
        raise ContextLengthError(
            f"The prompt has {prompt_length} tokens and the server's context {max_model_len}, so there is no room for "
            "an answer. Shorten the history or start the server with a longer context.",
            backend=backend,
        )
    return min(max_new_tokens, room)


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


def _typed(error: Exception, backend: Backend, sent: TokenRequest) -> Exception:
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
    typed.__cause__ = error
    return hide_causes(typed)


def _readable(chunk: object, reader: RawReader) -> list[int]:
    ids = integers(chunk.output_ids) if isinstance(chunk, TokenChunk) else None
    if ids is None or (ids and not 0 <= min(ids) <= max(ids) <= INT32_MAX):
        raise reader.violation(
            f"Law 4: on_chunk must be called with a TokenChunk of token ids, not {short_repr(chunk)}."
        )
    return ids


def validated_scores(
    raw: object, sent: TokenIds, info: EngineInfo, placeholder: int | None = None, of: TokenIds | None = None
) -> Logprobs:
    """Check law 4 on teacher-forced scores: the ids equal those sent, and all but the first have a logprob.

    Args:
        raw: What `Backend.score` returned.
        sent: The sequence, int32, shape (n,); expanded.
        info: The server's properties.
        placeholder: Id of the placeholders of its images, for which servers report other ids and meaningless scores.
        of: The given ids, int32, shape (k,); see `IdScorer`.

    Returns:
        float32, shape (n,), or (n, 1 + k); the first and placeholders are NaN.

    Raises:
        ProtocolViolationError: `raw` is not a `RawScores`, or contradicts the request.
    """
    request_id = utf8_or_none(raw.request_id) if isinstance(raw, RawScores) else None
    reader = RawReader(info.backend, request_id or "")
    try:
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
        logprobs = reader.logprobs([0.0, *scored[1:]]).copy()
        logprobs[0] = np.nan
        logprobs[inside] = np.nan
        return logprobs if of is None else np.column_stack([logprobs, _of_ids(reader, raw.of_ids, sent, of, logprobs)])
    except Exception as error:
        raise reader.unreadable(raw, error)  # noqa: B904  # it is the cause already


def _same_ids(reader: RawReader, ids: object, sent: list[int], placeholder: int | None) -> None:
    found = list(ids) if isinstance(ids, Sequence | np.ndarray) else []
    if len(found) != len(sent):
        raise reader.violation(f"Law 4: {len(sent)} ids were sent for scoring, the server scored {len(found)}.")
    for offset, (token, other) in enumerate(zip(sent, found, strict=True)):
        if integer(other) != token and not (offset == 0 and other is None) and token != placeholder:
            raise reader.violation(
                f"Law 4: id {token} at offset {offset} was sent, the server scored {short_repr(other)}."
            )


RECOMPUTED = 0.5
"""Most nats between two logprobs of one token in one answer: a bfloat16 logit of 16 to 32 has steps of 0.125."""


def _of_ids(reader: RawReader, raw: object, sent: TokenIds, of: TokenIds, own: Logprobs) -> Logprobs:
    """Return the scores of the ids `of`, float32, shape (n, k), NaN in row 0.

    Where one of them is the token itself, its score must be the token's own.
    """
    unscored = np.full((1, len(of)), np.nan, np.float32)
    if len(sent) == 1:
        return unscored
    if not raw:
        problem = f"The server took no notice of {len(of)} given ids: it is too old, or a proxy removed them."
        raise UnsupportedByServerError(
            f"{problem} Score the tokens alone, or use another server.", backend=reader.backend
        )
    if isinstance(raw, str):
        table = read_npy(base64.b64decode(raw, validate=True), "f")
    else:
        rows = [list(row) for row in raw] if isinstance(raw, Sequence) else []
        named, asked = [[token for token, _ in row] for row in rows], of.tolist()
        if wrong := next((row for row in named if row != asked), None):
            raise reader.violation(f"Law 4: scores of the ids {asked} were requested, the server scored {wrong}.")
        table = np.array([[np.nan if score is None else score for _, score in row] for row in rows], np.float64)
    if table.shape != (len(sent) - 1, len(of)):
        problem = f"{len(sent) - 1} places have scores of {len(of)} ids each, but the server's have shape {table.shape}"
        raise reader.violation(f"Law 4: {problem}.")
    scores = reader.logprobs(table.ravel().tolist()).reshape(table.shape)
    apart = np.where(sent[1:, None] == of, np.abs(scores - own[1:, None]), 0)
    if np.any(apart > RECOMPUTED):
        offset, at = np.unravel_index(int(apart.argmax()), apart.shape)
        raise reader.violation(
            f"Law 4: id {of[at]} at offset {offset + 1} has the score {own[offset + 1]}, but among the given ids "
            f"{scores[offset, at]}."
        )
    return np.concatenate([unscored, scores])


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
    try:
        return reader.token_ids(reader.integers("ids of a text", raw), "id")
    except Exception as error:
        raise reader.unreadable(raw, error)  # noqa: B904
