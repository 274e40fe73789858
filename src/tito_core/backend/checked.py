"""The one place where the core uses a backend: it checks what is sent before, and what comes back after.

No backend vouches for itself (law 4): everything outside `tito_core.backend` that generates or scores calls these.
Nothing that kills a server is sent, or kept to be sent later.
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
from tito_core.backend.typed_values import shown, text
from tito_core.backend.validation import validated
from tito_core.ledger.columns import Logprobs, TokenIds


def sendable(request: TokenRequest, info: EngineInfo, *, backend: str) -> TokenRequest:
    """Check a request before a backend gets it; what does not fit the context is clamped.

    Args:
        request: What is asked.
        info: What the server said of itself.
        backend: Name for errors.

    Returns:
        The request with int32 ids, with `max_new_tokens` that fit and `extra` of its own, and with the text of its ids.

    Raises:
        BadRequestError: Ids, parameters or the text cannot be sent.
        ContextLengthError: The prompt leaves no room for a single token.
        UnsupportedByServerError: The server cannot give what is wanted.
    """
    ids = _read_only(check_input_ids(request.input_ids, info.vocab_size, backend=backend))
    check_sampling(request.sampling, info.vocab_size, backend=backend)
    if not request.lenient:
        info.capabilities.check(request.optional_outputs, request.sampling, backend=backend)
    room = clamp_new_tokens(request.sampling.max_new_tokens, len(ids), info.max_model_len, backend=backend)
    text = IdText.of(ids) if request.text is None else request.text
    if not text.is_of(ids):
        raise BadRequestError(
            f"Law 4: the text that was kept of a prompt, of {text.length} ids, is not that of its {len(ids)} ids, "
            "so it was not sent. Leave `text` out of the request and it is written anew.",
            backend=backend,
            request_id=request.request_id,
        )
    return replace(request, input_ids=ids, sampling=request.sampling.within(room).apart(), text=text)


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
    """Return ids that a backend cannot write to, since its answer is compared with them; a turn's are so already."""
    if ids.flags.writeable:
        ids = ids.copy()
        ids.flags.writeable = False
    return ids


def _all_below(ids: npt.NDArray[np.integer], highest: int) -> bool:
    """Return whether all are from 0 to `highest`; of int32 in one pass, since unsigned, what is negative is larger."""
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
    """Return the tokens that may be sampled: at most `wanted`, at most what the context leaves.

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


def validated_scores(raw: object, sent: TokenIds, info: EngineInfo) -> Logprobs:
    """Check law 4 on teacher-forced scores: these ids, each with a logprob but the first, which has none.

    Args:
        raw: What `Backend.score` returned.
        sent: The sequence, int32, shape (n,).
        info: What the server said of itself.

    Returns:
        float32, shape (n,); the first is NaN.

    Raises:
        ProtocolViolationError: It is not a `RawScores`, or something in it does not agree.
    """
    request_id = text(raw.request_id) if isinstance(raw, RawScores) else None
    reader = RawReader(info.backend, request_id or "")
    with reader.reading(raw):
        if not isinstance(raw, RawScores):
            raise reader.violation(f"Law 4: score() must return a RawScores, not {shown(raw)}.")
        scored = reader.floats("scores", raw.logprobs)
        if len(scored) != len(sent):
            raise reader.violation(f"Law 4: {len(sent)} ids were sent for scoring, the server scored {len(scored)}.")
        if raw.token_ids is not None:
            _same_ids(reader, raw.token_ids, sent.tolist())
        for offset, (token, logprob) in enumerate(zip(sent.tolist(), scored, strict=True)):
            absent = logprob is None or (offset == 0 and math.isnan(logprob))
            if absent != (offset == 0):
                raise reader.violation(
                    f"Law 4: the server scored id {token} at offset {offset} with {logprob}; only the first has none."
                )
        logprobs = reader.logprobs([0.0, *scored[1:]])
        logprobs[0] = np.nan
        return logprobs


def validated_ids(raw: object, info: EngineInfo) -> TokenIds | None:
    """Check the ids of a text, as `Backend.tokenize` returned them; None where the server cannot.

    Returns:
        int32, shape (n,).

    Raises:
        ProtocolViolationError: They are no list of token ids.
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
            raise reader.violation(f"Law 4: id {token} at offset {offset} was sent, the server scored {shown(other)}.")


async def connected(backend: Backend) -> EngineInfo:
    """Ask a backend what its server is.

    Raises:
        BackendError: The server could not be asked.
        ProtocolViolationError: What came is not an `EngineInfo`, which checks its own fields.
    """
    info: object = await backend.connect()
    if isinstance(info, EngineInfo):
        return info
    raise ProtocolViolationError(
        f"connect() of the backend {backend.name!r} must return an EngineInfo, not {shown(info)}.", backend=backend.name
    )


async def generate(backend: Backend, request: TokenRequest, on_chunk: OnChunk | None = None) -> TokenResponse:
    """Sample one completion.

    Args:
        backend: Any backend.
        request: What is asked. What does not fit the context is refused or clamped.
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
            f"Law 4: the chunks of the answer held the ids {shown(seen)}, and the whole answer begins with "
            f"{shown(response.output_ids[: len(seen)].tolist())}. Nothing of it is kept."
        )
    return response


async def score(backend: Backend, token_ids: Sequence[int] | TokenIds) -> Logprobs:
    """Score a sequence teacher-forced: log p(token i | tokens before i), raw, at temperature 1.

    Returns:
        float32, shape (n,); the first is NaN, since nothing comes before it.

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
        int32, shape (n,); None where the server cannot.

    Raises:
        BackendError: The server could not be asked.
        ProtocolViolationError: What came are no token ids.
    """
    return validated_ids(await backend.tokenize(text), await connected(backend))


def _readable(chunk: object, backend: str, request_id: str) -> TokenChunk:
    ids = integers(chunk.output_ids) if isinstance(chunk, TokenChunk) else None
    if ids is None or not all(0 <= token <= INT32_MAX for token in ids):
        raise ProtocolViolationError(
            f"Law 4: on_chunk must be given a TokenChunk of token ids, not {shown(chunk)}.",
            backend=backend,
            request_id=request_id,
        )
    return TokenChunk(np.array(ids, np.int64))
