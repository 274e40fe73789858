"""Checks of ids and parameters: nothing that kills a server is sent, or kept to be sent later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tito_core.backend.errors import OUT_OF_VOCABULARY, BadRequestError, ContextLengthError
from tito_core.backend.id_text import IdText
from tito_core.backend.protocol import EngineInfo, TokenRequest
from tito_core.backend.sampling import SamplingParams
from tito_core.ledger.columns import TokenIds

_INT32_MAX = 2**31 - 1


def sendable(request: TokenRequest, info: EngineInfo, *, backend: str) -> TokenRequest:
    """Check a request before a backend gets it; what does not fit the context is clamped.

    Args:
        request: What is asked.
        info: What the server said of itself.
        backend: Name for errors.

    Returns:
        The request with int32 ids, with `max_new_tokens` that fit, and with the text of its ids.

    Raises:
        BadRequestError: Ids, parameters or the text cannot be sent.
        ContextLengthError: The prompt leaves no room for a single token.
        UnsupportedByServerError: The server cannot give what is wanted.
    """
    ids = check_input_ids(request.input_ids, info.vocab_size, backend=backend)
    check_sampling(request.sampling, info.vocab_size, backend=backend)
    if not request.lenient:
        info.capabilities.check(request.wanted, request.sampling, backend=backend)
    room = clamp_new_tokens(request.sampling.max_new_tokens, len(ids), info.max_model_len, backend=backend)
    text = IdText.of(ids) if request.text is None else request.text
    if not text.is_of(ids):
        raise BadRequestError(
            f"Law 4: the text that was kept of a prompt, of {text.length} ids, is not that of its {len(ids)} ids, "
            "so it was not sent. Leave `text` out of the request and it is written anew.",
            backend=backend,
            request_id=request.request_id,
        )
    sampling = request.sampling.within(room)
    if ids is request.input_ids and sampling is request.sampling and text is request.text:
        return request
    return replace(request, input_ids=ids, sampling=sampling, text=text)


def check_input_ids(input_ids: Sequence[int] | TokenIds, vocab_size: int | None, *, backend: str) -> TokenIds:
    """Check a prompt before it is sent: a real SGLang server dies of an id outside its vocabulary, or of none at all.

    Args:
        input_ids: The prompt.
        vocab_size: Ids must be below it; None where it is not known, which leaves int32's bound.
        backend: Name for the error.

    Returns:
        int32, shape (len(input_ids),).

    Raises:
        BadRequestError: Empty, no list of integers, or an id outside `0 <= id < vocab_size`.
    """
    try:
        ids = np.asarray(input_ids)
    except ValueError:  # lists of different lengths
        ids = np.asarray(input_ids, object)
    if ids.ndim != 1 or not len(ids) or ids.dtype.kind not in "iu":
        raise BadRequestError(
            f"A prompt must be a non-empty list of token ids, got shape {ids.shape} of {ids.dtype}.", backend=backend
        )
    highest = _INT32_MAX if vocab_size is None else min(vocab_size - 1, _INT32_MAX)
    if not _all_below(ids, highest):
        wrong = np.flatnonzero((ids < 0) | (ids > highest))
        of = "" if vocab_size is None else f" of {vocab_size} tokens"
        raise BadRequestError(
            f"Prompt token {int(ids[wrong[0]])} at offset {int(wrong[0])} is outside the vocabulary{of}, so it was "
            f"not sent. {OUT_OF_VOCABULARY}",
            backend=backend,
        )
    return ids.astype(np.int32, copy=False)


def _all_below(ids: npt.NDArray[np.integer], highest: int) -> bool:
    """Tell whether all are from 0 to `highest`; of int32 in one pass, since unsigned, what is negative is larger."""
    if ids.dtype == np.int32:
        return bool(np.maximum.reduce(ids.view(np.uint32)) <= highest)
    return bool(np.minimum.reduce(ids) >= 0 and np.maximum.reduce(ids) <= highest)


def check_sampling(sampling: SamplingParams, vocab_size: int | None, *, backend: str) -> None:
    """Check what of the parameters kills a real SGLang server, also where a copy of them escaped their own checks.

    SGLang's `min_new_tokens` looks stop ids up among the logits, and bars them where a complete grammar allows no more.

    Raises:
        BadRequestError: A stop id outside `0 <= id < vocab_size`, or a grammar together with `min_new_tokens`.
    """
    wrong = [i for i in sampling.stop_token_ids if i < 0 or (vocab_size is not None and i >= vocab_size)]
    if wrong:
        of = "" if vocab_size is None else f" of {vocab_size} tokens"
        raise BadRequestError(
            f"Stop token {wrong[0]} is outside the vocabulary{of}, so it could never stop anything and the request "
            "was not sent: does the tokenizer belong to the model that the server runs?",
            backend=backend,
        )
    if sampling.grammar is not None and sampling.min_new_tokens:
        raise BadRequestError(
            f"min_new_tokens={sampling.min_new_tokens} was not sent together with a grammar, which says by itself how "
            "long it is: leave min_new_tokens out.",
            backend=backend,
        )


def clamp_new_tokens(
    wanted: int, prompt_length: int, max_model_len: int | None, *, backend: str, at_least: bool = False
) -> int:
    """Give the tokens that may be sampled: at most `wanted`, at most what the context leaves.

    Args:
        wanted: Most tokens to sample.
        prompt_length: Tokens of the prompt.
        max_model_len: Tokens of the context, or None where it is not known.
        backend: Name for the error.
        at_least: Whether the prompt may have more tokens, which the error then says.

    Raises:
        ContextLengthError: The prompt leaves no room for a single token.
    """
    if max_model_len is None:
        return wanted
    room = max_model_len - prompt_length
    if room < 1:
        has = f"at least {prompt_length}" if at_least else prompt_length
        raise ContextLengthError(
            f"The prompt has {has} tokens and the context {max_model_len}, which leaves no room to answer: "
            "shorten the history or start the server with a longer context.",
            backend=backend,
        )
    return min(wanted, room)
