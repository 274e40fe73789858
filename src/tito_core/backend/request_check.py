"""Check a request before it is sent: what would crash a server, or be answered with other tokens, never leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tito_core.backend.engine_info import EngineInfo
from tito_core.backend.errors import OUT_OF_VOCABULARY, BadRequestError, ContextLengthError
from tito_core.backend.id_text import IdText
from tito_core.backend.images import check_images, clamp_for_images
from tito_core.backend.protocol import TokenRequest
from tito_core.backend.raw_values import INT32_MAX
from tito_core.backend.sampling import SamplingParams
from tito_core.ledger.columns import TokenIds


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
    ids = read_only(check_input_ids(request.input_ids, info.vocab_size, backend=backend))
    check_sampling(request.sampling, info.vocab_size, backend=backend)
    if not request.outputs_may_be_missing:
        info.capabilities.check(request.optional_outputs, request.sampling, backend=backend)
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
    echo = request.echo or request.images is not None
    return replace(request, input_ids=ids, sampling=request.sampling.within(room).copied(), id_text=id_text, echo=echo)


def room_of(request: TokenRequest, max_model_len: int | None, *, backend: str) -> int:
    """Return how many tokens a request may sample: at most its limit, and what the context leaves.

    Room is left for new images; see `clamp_for_images`.

    Raises:
        ContextLengthError: The prompt leaves no room for a single token.
    """
    limit, length = request.sampling.max_new_tokens, request.least_length
    room = clamp_new_tokens(limit, length, max_model_len, backend=backend)
    return room if request.images is None else clamp_for_images(request.images.new, room, length, max_model_len)


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
