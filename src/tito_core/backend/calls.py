"""Every call of a backend: checks before, validation after.

No backend vouches for itself (law 4): all code outside `tito_core.backend` that generates or scores calls these
functions. They never send a request that can crash a server, and never accept an answer that would lead to one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tito_core.backend.engine_info import EngineInfo
from tito_core.backend.errors import OUT_OF_VOCABULARY, BadRequestError, ContextLengthError, ProtocolViolationError
from tito_core.backend.id_text import IdText
from tito_core.backend.protocol import Backend, OnChunk, RawScores, TokenChunk, TokenRequest, TokenResponse
from tito_core.backend.raw_values import INT32_MAX, RawReader, integer, integers
from tito_core.backend.sampling import SamplingParams
from tito_core.backend.typed_values import short_repr, utf8_or_none
from tito_core.backend.validation import validated
from tito_core.ledger.columns import Logprobs, TokenIds


def sendable(request: TokenRequest, info: EngineInfo, *, backend: str) -> TokenRequest:
    """Check a request before it is passed to a backend, and clamp `max_new_tokens` to the context.

    Args:
        request: The request.
        info: The server's properties.
        backend: Name for errors.

    Returns:
        The request with read-only int32 ids, clamped `max_new_tokens`, a copy of `extra`, and the text of its ids.

    Raises:
        BadRequestError: Ids, parameters or the text cannot be sent.
        ContextLengthError: The prompt leaves no room for a single token.
        UnsupportedByServerError: The server does not support an optional output.
    """
    ids = _read_only(check_input_ids(request.input_ids, info.vocab_size, backend=backend))
    check_sampling(request.sampling, info.vocab_size, backend=backend)
    if not request.outputs_may_be_missing:
        info.capabilities.check(request.optional_outputs, request.sampling, backend=backend)
    room = clamp_new_tokens(request.sampling.max_new_tokens, len(ids), info.max_model_len, backend=backend)
    id_text = IdText.of(ids) if request.id_text is None else request.id_text
    if not id_text.matches(ids):
        raise BadRequestError(
            f"Law 4: the request's cached text of {id_text.length} ids does not match its {len(ids)} input ids, so it "
            "was not sent. Leave `id_text` out of the request: the core encodes the ids itself.",
            backend=backend,
            request_id=request.request_id,
        )
    return replace(request, input_ids=ids, sampling=request.sampling.within(room).copied(), id_text=id_text)


def check_input_ids(input_ids: Sequence[int] | TokenIds, vocab_size: int | None, *, backend: str) -> TokenIds:
    """Check a prompt before it is sent: an id outside the vocabulary, or an empty prompt, crashes an SGLang server.

    Args:
        input_ids: The prompt.
        vocab_size: Ids must be below it; None if unknown, then int32 is the bound.
        backend: Name for the error.

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
            f"Prompt token {int(ids[wrong[0]])} at offset {int(wrong[0])} is outside the vocabulary{of}, so it was "
            f"not sent. {OUT_OF_VOCABULARY}",
            backend=backend,
        )
    return ids.astype(np.int32, copy=False)


def _read_only(ids: TokenIds) -> TokenIds:
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


def clamp_new_tokens(
    max_new_tokens: int, prompt_length: int, max_model_len: int | None, *, backend: str, is_lower_bound: bool = False
) -> int:
    """Return how many tokens may be sampled: at most `max_new_tokens`, and at most the room left in the context.

    Args:
        max_new_tokens: Maximum number of tokens to sample.
        prompt_length: Tokens of the prompt.
        max_model_len: Length of the context in tokens, or None if unknown.
        backend: Name for the error.
        is_lower_bound: Whether `prompt_length` is a lower bound; the error then says so.

    Raises:
        ContextLengthError: The prompt leaves no room for a single token.
    """
    if max_model_len is None:
        return max_new_tokens
    room = max_model_len - prompt_length
    if room < 1:
        length = f"at least {prompt_length}" if is_lower_bound else prompt_length
        raise ContextLengthError(
            f"The prompt has {length} tokens and the server's context {max_model_len}, so there is no room for an "
            "answer. Shorten the history or start the server with a longer context.",
            backend=backend,
        )
    return min(max_new_tokens, room)


def validated_scores(raw: object, sent: TokenIds, info: EngineInfo) -> Logprobs:
    """Check law 4 on teacher-forced scores: the ids equal those sent, and all but the first have a logprob.

    Args:
        raw: What `Backend.score` returned.
        sent: The sequence, int32, shape (n,).
        info: The server's properties.

    Returns:
        float32, shape (n,); the first is NaN.

    Raises:
        ProtocolViolationError: `raw` is not a `RawScores`, or contradicts the request.
    """
    request_id = utf8_or_none(raw.request_id) if isinstance(raw, RawScores) else None
    reader = RawReader(info.backend, request_id or "")
    with reader.reading(raw):
        if not isinstance(raw, RawScores):
            raise reader.violation(f"Law 4: score() must return a RawScores, not {short_repr(raw)}.")
        scored = reader.floats("scores", raw.logprobs)
        if len(scored) != len(sent):
            raise reader.violation(f"Law 4: {len(sent)} ids were sent for scoring, the server scored {len(scored)}.")
        if raw.token_ids is not None:
            _same_ids(reader, raw.token_ids, sent.tolist())
        for offset, (token, logprob) in enumerate(zip(sent.tolist(), scored, strict=True)):
            absent = logprob is None or (offset == 0 and math.isnan(logprob))
            if absent != (offset == 0):
                raise reader.violation(
                    f"Law 4: the server scored id {token} at offset {offset} with {logprob}; only the first is None."
                )
        logprobs = reader.logprobs([0.0, *scored[1:]])
        logprobs[0] = np.nan
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


def _same_ids(reader: RawReader, ids: object, sent: list[int]) -> None:
    found = list(ids) if isinstance(ids, Sequence | np.ndarray) else []
    if len(found) != len(sent):
        raise reader.violation(f"Law 4: {len(sent)} ids were sent for scoring, the server scored {len(found)}.")
    for offset, (token, other) in enumerate(zip(sent, found, strict=True)):
        if integer(other) != token and not (offset == 0 and other is None):
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
        on_chunk: See `Backend.generate`.

    Raises:
        BackendError: The request cannot be sent, or failed.
        ProtocolViolationError: The answer breaks law 2, 4 or 10.
    """
    info = await connected(backend)
    sent = sendable(request, info, backend=backend.name)
    if on_chunk is None:
        return validated(await backend.generate(sent), sent, info)

    reader, seen = RawReader(info.backend, request.request_id), list[int]()

    def show(chunk: TokenChunk) -> None:
        with reader.reading(chunk):
            read = _readable(chunk, info.backend, request.request_id)
        seen.extend(read.output_ids.tolist())
        on_chunk(read)

    response = validated(await backend.generate(sent, show), sent, info)
    if response.output_ids[: len(seen)].tolist() != seen:
        raise reader.violation(
            f"Law 4: the streamed chunks hold the ids {short_repr(seen)}, but the whole answer begins with "
            f"{short_repr(response.output_ids[: len(seen)].tolist())}. The answer was discarded."
        )
    return response


async def score(backend: Backend, token_ids: Sequence[int] | TokenIds) -> Logprobs:
    """Score a sequence teacher-forced: log p(token i | tokens before i), raw, at temperature 1.

    Returns:
        float32, shape (n,); the first is NaN, since no token precedes it.

    Raises:
        BackendError: The sequence cannot be sent, or scoring failed.
        ProtocolViolationError: The scores break law 4.
    """
    info = await connected(backend)
    ids = _read_only(check_input_ids(token_ids, info.vocab_size, backend=backend.name))
    clamp_new_tokens(1, len(ids), info.max_model_len, backend=backend.name)  # vLLM cannot score without sampling one
    return validated_scores(await backend.score(ids), ids, info)


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
