"""Checks of scores, of a text's ids, and of ids against the server's vocabulary; the same for every backend."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tito_core.backend.errors import ProtocolViolationError
from tito_core.backend.protocol import EngineInfo, RawScores
from tito_core.backend.raw_values import RawReader, integer, text
from tito_core.backend.typed_values import shown
from tito_core.ledger.columns import Logprobs, TokenIds


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
        logprobs = np.full(len(sent), np.nan, np.float32)
        logprobs[1:] = reader.logprobs(scored[1:])
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


def check_output_ids(output_ids: TokenIds, vocab_size: int | None, *, backend: str, request_id: str) -> None:
    """Check what a server sampled: it would refuse an id outside its vocabulary, or die of it, in the next prompt.

    Args:
        output_ids: int32, shape (n,), none negative.
        vocab_size: Rows of the server's embedding; None where it is not known, which leaves nothing to check.
        backend: Name for the error.
        request_id: Ours, for the error.

    Raises:
        ProtocolViolationError: An id is outside the vocabulary (law 4).
    """
    if vocab_size is not None and len(output_ids) and int(output_ids.max()) >= vocab_size:
        raise outside_vocabulary(int(output_ids.max()), f"of {vocab_size} tokens", backend, request_id)


def outside_vocabulary(token: int, of: str, backend: str, request_id: str) -> ProtocolViolationError:
    """Return the error for a sampled id that the server itself would not take."""
    return ProtocolViolationError(
        f"Law 4: {backend} answered with output id {token}, which is outside its own vocabulary {of}, and could not "
        "take it in a later prompt. Nothing of the answer is kept: run the turn again, and check the server or a "
        "proxy before it if that stays so.",
        backend=backend,
        request_id=request_id,
    )
