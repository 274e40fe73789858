"""Checks on both sides of the wire: nothing that kills a server leaves, nothing that breaks a law comes in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tito_core.backend.errors import (
    BadRequestError,
    ContextLengthError,
    GenerationAbortedError,
    ProtocolViolationError,
)
from tito_core.backend.protocol import TokenRequest
from tito_core.ledger.invariants import LawViolationError, check_logprobs, check_versions
from tito_core.ledger.turn import Finish, Logprobs, TokenIds, VersionSpan

_INT32_MAX = 2**31 - 1


def check_input_ids(input_ids: Sequence[int] | TokenIds, vocab_size: int, *, backend: str) -> TokenIds:
    """Check a prompt before it is sent: a real SGLang server dies of an id outside its vocabulary, or of none at all.

    Raises:
        BadRequestError: Empty, or an id outside `0 <= id < vocab_size`.
    """
    ids = np.asarray(input_ids)
    if ids.ndim != 1 or not len(ids) or ids.dtype.kind not in "iu":
        raise BadRequestError(
            f"A prompt must be a non-empty list of token ids, got shape {ids.shape} of {ids.dtype}.", backend=backend
        )
    wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(wrong):
        raise BadRequestError(
            f"Prompt token {int(ids[wrong[0]])} at offset {int(wrong[0])} is outside the vocabulary of {vocab_size} "
            "tokens, so it was not sent: does the tokenizer belong to the model that the server runs?",
            backend=backend,
        )
    return ids.astype(np.int32)


def clamp_new_tokens(wanted: int, prompt_length: int, max_model_len: int | None, *, backend: str) -> int:
    """Give the tokens that may be sampled: at most `wanted`, at most what the context leaves.

    Raises:
        ContextLengthError: The prompt leaves no room for a single token.
    """
    if max_model_len is None:
        return wanted
    room = max_model_len - prompt_length
    if room < 1:
        raise ContextLengthError(
            f"The prompt has {prompt_length} tokens and the context {max_model_len}, which leaves no room to answer: "
            "shorten the history or start the server with a longer context.",
            backend=backend,
        )
    return min(wanted, room)


@dataclass(frozen=True, slots=True)
class Checks:
    """Checks of one answer; each failure is a `ProtocolViolationError` that carries backend and request id."""

    backend: str
    request_id: str

    def violation(self, sentence: str) -> ProtocolViolationError:
        """Build the error for a broken law."""
        return ProtocolViolationError(sentence, backend=self.backend, request_id=self.request_id)

    def echo(self, sent: TokenIds, echoed: Sequence[int] | None) -> None:
        """Check law 4: the prompt ids that the engine says it saw are those that were sent."""
        if echoed is None:
            raise self.violation(
                "Law 4: the server did not echo the prompt ids, so nothing proves what it saw: "
                "it is too old for token-exact rollouts, or a proxy removed the field."
            )
        seen = np.asarray(echoed, np.int64)
        if len(seen) != len(sent):
            raise self.violation(f"Law 4: {len(sent)} prompt ids were sent, the server saw {len(seen)}.")
        wrong = np.flatnonzero(seen != sent)
        if len(wrong):
            at = int(wrong[0])
            raise self.violation(
                f"Law 4: prompt id {int(sent[at])} at offset {at} was sent, the server saw {int(seen[at])}."
            )

    def output(
        self, output_ids: Sequence[int], logprobs: Sequence[float | None], request: TokenRequest
    ) -> tuple[TokenIds, Logprobs]:
        """Check laws 2 and 4 on ids and logprobs and give them as int32 and float32, both of shape (n,)."""
        limit = request.sampling.max_new_tokens
        if len(output_ids) != len(logprobs):
            raise self.violation(f"Law 2: the server gave {len(output_ids)} output ids and {len(logprobs)} logprobs.")
        if not output_ids:
            raise self.violation("Law 4: the server gave no output ids, not even a stop token.")
        if len(output_ids) > limit:
            raise self.violation(f"Law 4: {limit} tokens were asked for, the server gave {len(output_ids)}.")
        for offset, value in enumerate(logprobs):
            if value is None:
                raise self.violation(f"Law 4: output token {offset} has no logprob.")
        if min(output_ids) < 0 or max(output_ids) > _INT32_MAX:
            raise self.violation(f"Law 2: an output id is no token: {min(output_ids)} to {max(output_ids)}.")
        values = np.asarray(logprobs, np.float32)
        try:
            check_logprobs(values)
        except LawViolationError as error:
            raise self.violation(str(error)) from error
        return np.asarray(output_ids, np.int32), values

    def finish(self, reason: str | None, *, said: str | None = None) -> Finish:
        """Give the finish reason.

        Raises:
            GenerationAbortedError: The engine aborted; partial tokens are discarded.
            ProtocolViolationError: A reason that no plain generation has.
        """
        if reason in (Finish.STOP, Finish.LENGTH):
            return Finish(reason)
        if reason == "abort":
            raise GenerationAbortedError(
                f"{self.backend} aborted the generation{f' ({said})' if said else ''}; its partial tokens were "
                "discarded and the ledger is as before. Run the turn again.",
                backend=self.backend,
                request_id=self.request_id,
            )
        raise self.violation(f"The server finished with reason {reason!r}; a generation ends in 'stop' or 'length'.")

    def finish_agrees(
        self, finish: Finish, output_ids: TokenIds, stop: int | str | None, request: TokenRequest
    ) -> None:
        """Check law 4: a stop token is the last id, and a length finish has used its budget."""
        if finish == Finish.STOP and isinstance(stop, int) and int(output_ids[-1]) != stop:
            raise self.violation(f"Law 4: stop token {stop} ended the output, whose last id is {int(output_ids[-1])}.")
        if finish == Finish.LENGTH and len(output_ids) != request.sampling.max_new_tokens:
            raise self.violation(
                f"Law 4: the output ended for length after {len(output_ids)} of {request.sampling.max_new_tokens} tokens."
            )

    def count(self, name: str, reported: int | None, expected: int) -> None:
        """Check law 4 on a number that the server reports of what we hold."""
        if reported != expected:
            raise self.violation(
                f"Law 4: the server reported {name}={reported}, the request and answer hold {expected}."
            )

    def versions(self, spans: Sequence[tuple[int, int, str | None]], length: int) -> tuple[VersionSpan, ...]:
        """Check law 10 on version spans; none reported means one span of unknown version."""
        versions = tuple(VersionSpan(*span) for span in spans) or (VersionSpan(0, length, None),)
        try:
            check_versions(versions, length)
        except LawViolationError as error:
            raise self.violation(str(error)) from error
        return versions
