"""Checks of what a backend reports: what breaks a law does not come in. The same for every backend, ours included."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from tito_core.backend.column_validation import ColumnValidation
from tito_core.backend.errors import UNREADABLE, BackendError, ProtocolViolationError
from tito_core.backend.id_text import SAME
from tito_core.backend.protocol import (
    NO_COLUMNS,
    NOTHING,
    EngineInfo,
    RawResponse,
    RawScores,
    TokenRequest,
    TokenResponse,
)
from tito_core.backend.raw_values import floats, integer, integers, text
from tito_core.backend.typed_values import shown
from tito_core.backend.wanted import NOTHING_WANTED
from tito_core.ledger.columns import Logprobs, TokenIds
from tito_core.ledger.errors import LawViolationError
from tito_core.ledger.invariants import MAX_COUNT, SIGN, check_logprobs, check_versions
from tito_core.ledger.turn import Finish, VersionSpan

_FINISHES: dict[str, Finish] = {finish.value: finish for finish in Finish}


def validated(raw: object, request: TokenRequest, info: EngineInfo) -> TokenResponse:
    """Check laws 2, 4 and 10 on everything that a backend reports of a generation, and make the response of it.

    Args:
        raw: What `Backend.generate` returned.
        request: What was asked.
        info: What the server said of itself.

    Raises:
        ProtocolViolationError: It is not a `RawResponse`, or something in it does not agree; the sentence holds both
            values.
    """
    checks = Validation(info.backend, request.request_id, info.unreported, info.vocab_size)
    try:
        return checks.response(raw, request)
    except BackendError:
        raise
    except Exception as error:  # its objects may raise anything when they are read
        raise checks.unreadable(raw, error) from error


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
    checks = Validation(info.backend, (text(raw.request_id) or "") if isinstance(raw, RawScores) else "")
    try:
        return checks.scores(raw, sent)
    except BackendError:
        raise
    except Exception as error:
        raise checks.unreadable(raw, error) from error


def validated_ids(raw: object, info: EngineInfo) -> TokenIds | None:
    """Check the ids of a text, as `Backend.tokenize` returned them; None where the server cannot.

    Returns:
        int32, shape (n,).

    Raises:
        ProtocolViolationError: They are no list of token ids.
    """
    if raw is None:
        return None
    checks = Validation(info.backend, "")
    try:
        return checks.token_ids(checks.integers("ids of a text", raw), "id")
    except BackendError:
        raise
    except Exception as error:
        raise checks.unreadable(raw, error) from error


@dataclass(frozen=True, slots=True)
class Validation:
    """Checks of one answer; each failure is a `ProtocolViolationError` that carries backend and request id.

    Attributes:
        backend: The backend's name.
        request_id: Ours.
        unreported: See `EngineInfo`.
        vocab_size: Rows of the server's embedding; None where it is not known.
    """

    backend: str
    request_id: str
    unreported: frozenset[str] = frozenset()
    vocab_size: int | None = None

    def response(self, raw: object, request: TokenRequest) -> TokenResponse:
        """See `validated`."""
        if not isinstance(raw, RawResponse):
            raise self.violation(f"Law 4: generate() must return a RawResponse, not {shown(raw)}.")
        finish = self._finish(raw.finish)
        ids = None if raw.output_ids is None else self.integers("output_ids", raw.output_ids)
        never_ran = finish == Finish.ABORT and not ids  # one that SGLang aborts in its queue tells nothing
        if not never_ran:
            self._echo(request, raw.echoed)
            self._count("prompt_tokens", raw.prompt_tokens, len(request.input_ids))
        output, logprobs = self._output(raw, ids, request, at_least=0 if never_ran else 1)
        self._count("completion_tokens", raw.completion_tokens, len(output))
        stop = self._stop(raw.stop) if finish == Finish.STOP else None
        self._end(finish, ids or [], stop, request)
        nothing_beside = never_ran or request.wanted is NOTHING_WANTED
        message = self._text("message", raw.message)
        return TokenResponse(
            output_ids=output,
            logprobs=logprobs,
            finish=finish,
            stop=stop,
            prompt_length=len(request.input_ids),
            cached_tokens=self._cached(raw.cached_tokens),
            latency_s=self._seconds(raw.latency_s),
            request_id=self._text("request_id", raw.request_id) or request.request_id,
            versions=self._versions(raw.versions, len(output)),
            message=message if finish == Finish.ABORT else None,
            columns=NO_COLUMNS if nothing_beside else ColumnValidation(self, request, output, logprobs).columns(raw),
        )

    def scores(self, raw: object, sent: TokenIds) -> Logprobs:
        """See `validated_scores`."""
        if not isinstance(raw, RawScores):
            raise self.violation(f"Law 4: score() must return a RawScores, not {shown(raw)}.")
        scored = self.floats("scores", raw.logprobs)
        if len(scored) != len(sent):
            raise self.violation(f"Law 4: {len(sent)} ids were sent for scoring, the server scored {len(scored)}.")
        if raw.token_ids is not None:
            self._scored_ids(raw.token_ids, sent.tolist())
        for offset, (token, logprob) in enumerate(zip(sent.tolist(), scored, strict=True)):
            absent = logprob is None or (offset == 0 and math.isnan(logprob))
            if absent != (offset == 0):
                raise self.violation(
                    f"Law 4: the server scored id {token} at offset {offset} with {logprob}; only the first has none."
                )
        logprobs = np.full(len(sent), np.nan, np.float32)
        logprobs[1:] = self._logprobs(scored[1:])
        return logprobs

    def violation(self, sentence: str) -> ProtocolViolationError:
        """Build the error for a broken law."""
        return ProtocolViolationError(sentence, backend=self.backend, request_id=self.request_id)

    def unreadable(self, raw: object, error: Exception) -> ProtocolViolationError:
        """Build the error for an answer whose own objects fail when they are read."""
        return self.violation(
            f"Law 4: the {type(raw).__name__} of the backend {self.backend!r} cannot be read: "
            f"{type(error).__name__}: {shown(error)}. Nothing of it is kept."
        )

    def integers(self, name: str, value: object) -> list[int]:
        """Return a list of integers that a backend reported."""
        found = integers(value)
        if found is None:
            raise self.violation(f"Law 2: {name} must be a list of integers, not {shown(value)}.")
        return found

    def floats(self, name: str, value: object) -> list[float | None]:
        """Return a list of numbers that a backend reported, None where one is missing."""
        found = floats(value)
        if found is None:
            raise self.violation(f"Law 4: {name} must be a list of numbers, not {shown(value)}.")
        return found

    def token_ids(self, ids: Sequence[int], what: str = "output id") -> TokenIds:
        """Return ids as int32, shape (n,); none may be negative or larger than int32 holds."""
        try:  # which refuses what int32 cannot hold, as no NumPy 1 does, and takes half of an array's time
            packed = struct.pack(f"{len(ids)}i", *ids)
        except struct.error:
            packed = None
        if packed is None or not packed[SIGN::4].isascii():
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise self.violation(f"Law 2: {what} {wrong} is no token.")
        return np.frombuffer(packed, np.int32)

    def _finish(self, said: object) -> Finish:
        found = _FINISHES.get(said) if isinstance(said, str) else None
        if found is not None:
            return found
        raise self.violation(
            f"Law 4: the server finished with reason {shown(said)}; a generation ends in 'stop' or 'length', or in "
            "'abort'."
        )

    def _echo(self, request: TokenRequest, echoed: object) -> None:
        """Compare the echo with what was sent; undecoded JSON is compared as text first, and decoded if it differs."""
        undecoded = isinstance(echoed, bytes | msgspec.Raw)
        if echoed is None or (undecoded and echoed == NOTHING):
            if not request.echo or "echoed" in self.unreported:
                return
            raise self.violation(
                "Law 4: the server did not echo the prompt ids, so nothing proves what it saw: "
                "it is too old for token-exact rollouts, or a proxy removed the field."
            )
        if isinstance(echoed, bytes | msgspec.Raw):
            if echoed == SAME or (request.text is not None and request.text.is_echoed_in(bytes(echoed))):
                return
            try:
                echoed = msgspec.json.decode(echoed, type=list[int])
            except UNREADABLE as error:
                raise self.violation(f"Law 4: the echo of the prompt is no list of ids: {error}.") from error
        seen, sent = self.integers("echoed", echoed), request.input_ids
        if len(seen) != len(sent):
            raise self.violation(f"Law 4: {len(sent)} prompt ids were sent, the server saw {len(seen)}.")
        self._same_ids("prompt id {} at offset {} was sent, the server saw {}", sent.tolist(), seen)

    def _output(
        self, raw: RawResponse, ids: list[int] | None, request: TokenRequest, *, at_least: int
    ) -> tuple[TokenIds, Logprobs]:
        limit = request.sampling.max_new_tokens
        if ids is None or raw.logprobs is None:
            missing = "output ids" if ids is None else "logprobs"
            raise self.violation(f"Law 4: the answer holds no {missing}, though they were asked for.")
        logprobs = self.floats("logprobs", raw.logprobs)
        if len(ids) != len(logprobs):
            raise self.violation(f"Law 2: the server gave {len(ids)} output ids and {len(logprobs)} logprobs.")
        if len(ids) < at_least:
            raise self.violation("Law 4: the server gave no output ids, not even a stop token.")
        if len(ids) > limit:
            raise self.violation(f"Law 4: {limit} tokens were asked for, the server gave {len(ids)}.")
        packed = self.token_ids(ids)
        if raw.logprob_ids is not None:
            scored = raw.logprob_ids.tolist() if isinstance(raw.logprob_ids, np.ndarray) else list(raw.logprob_ids)
            if len(scored) != len(ids):
                raise self.violation(f"Law 4: {len(ids)} output ids, but logprobs of {len(scored)} ids.")
            self._same_ids("output id {} at offset {} has the logprob of {}", ids, scored)
        check_output_ids(packed, self.vocab_size, backend=self.backend, request_id=self.request_id)
        return packed, self._logprobs(logprobs, ids)

    def _same_ids(self, sentence: str, expected: Sequence[int], found: Sequence[object]) -> None:
        if expected == found or tuple(expected) == tuple(found):  # the usual case, in no time
            return
        for offset, (one, other) in enumerate(zip(expected, found, strict=True)):
            if one != other:
                raise self.violation(f"Law 4: {sentence.format(one, offset, other)}.")

    def _logprobs(self, values: Sequence[float | None], ids: Sequence[int] = ()) -> Logprobs:
        """Check logprobs; those of output tokens come with their `ids`, by which one that is missing is named."""
        try:
            # What float32 cannot hold becomes infinite, which is refused; so is None.
            logprobs = np.frombuffer(struct.pack(f"{len(values)}f", *values), np.float32)
            check_logprobs(logprobs)
        except (struct.error, LawViolationError) as error:
            if None in values:
                offset = list(values).index(None)
                of = f" (id {ids[offset]})" if ids else ""
                raise self.violation(f"Law 4: output token {offset} has no logprob{of}.") from None
            raise self.violation(str(error)) from error
        return logprobs

    def _stop(self, said: object) -> int | str | None:
        found = integer(said) if text(said) is None else text(said)
        if found is None and said is not None:
            raise self.violation(f"Law 4: stop must be a token id, a stop string or None, not {shown(said)}.")
        return found

    def _end(self, finish: Finish, output_ids: list[int], stop: int | str | None, request: TokenRequest) -> None:
        """Check that a stop token is the last id and the only stop, and that a length finish used its budget."""
        sampling = request.sampling
        if finish == Finish.STOP and isinstance(stop, int) and output_ids[-1] != stop:
            raise self.violation(f"Law 4: stop token {stop} ended the output, whose last id is {output_ids[-1]}.")
        if finish == Finish.LENGTH and len(output_ids) != sampling.max_new_tokens:
            raise self.violation(
                f"Law 4: the output ended for length after {len(output_ids)} of {sampling.max_new_tokens} tokens."
            )
        last = None if finish == Finish.ABORT else -1  # what was aborted did not end
        before = output_ids[sampling.min_new_tokens : last]
        # With `ignore_eos`, SGLang lets stop ids pass.
        passed = [] if sampling.ignore_eos else [stop for stop in sampling.stop_token_ids if stop in before]
        if passed:
            at = sampling.min_new_tokens + min(map(before.index, passed))
            raise self.violation(
                f"Law 4: stop token {output_ids[at]} at output offset {at} did not end the output of "
                f"{len(output_ids)} tokens."
            )

    def _count(self, name: str, reported: object, expected: int) -> None:
        if reported is None and name in self.unreported:
            return
        if integer(reported) != expected:
            raise self.violation(
                f"Law 4: the server reported {name}={shown(reported)}, the request and answer hold {expected}."
            )

    def _cached(self, reported: object) -> int | None:
        """Check the tokens from the prefix cache.

        They are not compared with the prompt's: an engine that had to begin a request again may count twice.
        """
        found = integer(reported)
        if reported is not None and (found is None or not 0 <= found <= MAX_COUNT):
            raise self.violation(
                f"Law 4: the server reported cached_tokens={shown(reported)}, which is not a count of tokens."
            )
        return found

    def _seconds(self, said: object) -> float:
        [seconds] = floats([said]) or [None]
        if seconds is None or not (math.isfinite(seconds) and seconds >= 0):
            raise self.violation(f"Law 4: latency_s must be a number of seconds, not {shown(said)}.")
        return float(seconds)

    def _text(self, name: str, said: object) -> str | None:
        found = text(said)
        if (found is None) == (said is None):
            return found
        raise self.violation(f"Law 4: {name} must be a string or None, not {shown(said)}.")

    def _versions(self, spans: object, length: int) -> tuple[VersionSpan, ...]:
        if not isinstance(spans, Sequence) or isinstance(spans, str):
            raise self.violation(f"Law 10: versions must be (start, stop, version) spans, not {shown(spans)}.")
        versions = tuple(map(self._span, spans)) or (VersionSpan(0, length, None),)
        try:
            check_versions(versions, length)
        except LawViolationError as error:
            raise self.violation(str(error)) from error
        return versions

    def _span(self, span: object) -> VersionSpan:
        start, stop, version = span if isinstance(span, Sequence) and len(span) == 3 else (None, None, None)
        first, last = integer(start), integer(stop)
        if first is None or last is None or (version is not None and text(version) is None):
            raise self.violation(f"Law 10: a weight-version span must be (start, stop, version), not {shown(span)}.")
        return VersionSpan(first, last, text(version))

    def _scored_ids(self, ids: object, sent: list[int]) -> None:
        found = list(ids) if isinstance(ids, Sequence | np.ndarray) else []
        if len(found) != len(sent):
            raise self.violation(f"Law 4: {len(sent)} ids were sent for scoring, the server scored {len(found)}.")
        for offset, (token, other) in enumerate(zip(sent, found, strict=True)):
            if integer(other) != token and not (offset == 0 and other is None):
                raise self.violation(
                    f"Law 4: id {token} at offset {offset} was sent, the server scored {shown(other)}."
                )


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
