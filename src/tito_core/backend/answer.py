"""Checks of an answer: what breaks a law does not come in. The same for every engine."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from tito_core.backend.beside import Beside, BesideChecks
from tito_core.backend.errors import UNREADABLE, ProtocolViolationError
from tito_core.backend.id_text import SAME
from tito_core.backend.protocol import NO_COLUMNS, TokenRequest, TokenResponse
from tito_core.backend.wanted import NOTHING_WANTED
from tito_core.ledger.columns import Logprobs, TokenIds
from tito_core.ledger.errors import LawViolationError
from tito_core.ledger.invariants import MAX_COUNT, SIGN, check_logprobs, check_versions
from tito_core.ledger.turn import Finish, VersionSpan

_FINISHES: dict[str, Finish] = {finish.value: finish for finish in Finish}
NOTHING = msgspec.Raw(b"null")
"""What a field holds that an engine left out, or sent as null."""


class Reported(msgspec.Struct, frozen=True):
    """What an engine said of one generation, under one set of names and not yet believed.

    Attributes:
        finish: Its word for why sampling stopped.
        stop: The stop token id or string that it names.
        output_ids: Sampled ids; None where it left them out.
        logprobs: One for each of them.
        logprob_ids: The ids that it says the logprobs belong to.
        echoed: The prompt ids that it says it saw, not decoded; `NOTHING` where it left them out.
        prompt_tokens: Its count of them.
        completion_tokens: Its count of sampled tokens.
        cached_tokens: Prompt tokens from the prefix cache, or None.
        spans: Weight-version spans (start, stop, version); empty where it does not say.
        message: Its sentence on an abort.
        beside: What it said of what was wanted beside.
    """

    finish: str | None
    stop: int | str | None
    output_ids: Sequence[int] | None
    logprobs: Sequence[float | None] | None
    logprob_ids: Sequence[int | str]
    echoed: msgspec.Raw
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None
    spans: Sequence[tuple[int, int, str | None]] = ()
    message: str | None = None
    beside: Beside = msgspec.field(default_factory=Beside)


@dataclass(frozen=True, slots=True)
class Checks:
    """Checks of one answer; each failure is a `ProtocolViolationError` that carries backend and request id."""

    backend: str
    request_id: str

    def response(self, said: Reported, request: TokenRequest, *, latency_s: float, running_id: str) -> TokenResponse:
        """Check laws 2, 4 and 10 on everything that an engine said, and give it as a response.

        Args:
            said: What it said.
            request: What was asked.
            latency_s: How long it took, in seconds.
            running_id: The id under which the engine ran it.

        Raises:
            ProtocolViolationError: Something does not agree; the sentence holds both values.
        """
        finish = self._finish(said)
        never_ran = finish == Finish.ABORT and not said.output_ids  # one that SGLang aborts in its queue tells nothing
        if not never_ran:
            self._echo(request, said.echoed)
            self._count("prompt_tokens", said.prompt_tokens, len(request.input_ids))
        ids, logprobs = self._output(said, request, at_least=0 if never_ran else 1)
        self._count("completion_tokens", said.completion_tokens, len(ids))
        stop = said.stop if finish == Finish.STOP else None
        self._end(finish, said.output_ids or (), stop, request)
        nothing_beside = never_ran or request.wanted is NOTHING_WANTED
        return TokenResponse(
            output_ids=ids,
            logprobs=logprobs,
            finish=finish,
            stop=stop,
            prompt_length=len(request.input_ids),
            cached_tokens=self._cached(said.cached_tokens),
            latency_s=latency_s,
            request_id=running_id,
            versions=self._versions(said.spans, len(ids)),
            message=said.message if finish == Finish.ABORT else None,
            columns=NO_COLUMNS if nothing_beside else BesideChecks(self, request, ids, logprobs).columns(said.beside),
        )

    def scores(self, sent: TokenIds, scored: Sequence[tuple[int | None, float | None]]) -> Logprobs:
        """Check law 4 on teacher-forced scores: these ids, each with a logprob but the first, which has none.

        Args:
            sent: The sequence.
            scored: (id, logprob) as the engine said them; it may leave the first id out.

        Returns:
            float32, shape (len(sent),); the first is NaN.
        """
        if len(scored) != len(sent):
            raise self.violation(f"Law 4: {len(sent)} ids were sent for scoring, the server scored {len(scored)}.")
        for offset, (token, (found, logprob)) in enumerate(zip(sent.tolist(), scored, strict=True)):
            if found not in (token, None if offset == 0 else token):
                raise self.violation(f"Law 4: id {token} at offset {offset} was sent, the server scored {found}.")
            if (logprob is None) != (offset == 0):
                raise self.violation(
                    f"Law 4: the server scored id {token} at offset {offset} with {logprob}; only the first has none."
                )
        logprobs = np.full(len(sent), np.nan, np.float32)
        logprobs[1:] = self._logprobs([logprob for _, logprob in scored[1:]])
        return logprobs

    def violation(self, sentence: str) -> ProtocolViolationError:
        """Build the error for a broken law."""
        return ProtocolViolationError(sentence, backend=self.backend, request_id=self.request_id)

    def _finish(self, said: Reported) -> Finish:
        found = _FINISHES.get(said.finish or "")
        if found is not None:
            return found
        raise self.violation(
            f"Law 4: the server finished with reason {said.finish!r}; a generation ends in 'stop' or 'length', or in "
            "'abort'."
        )

    def _echo(self, request: TokenRequest, raw: msgspec.Raw) -> None:
        """Compare the echo with the text that was sent; it is decoded only when they differ, perhaps in blanks."""
        if not request.echo and raw == NOTHING:
            return
        if raw == SAME or (request.text is not None and request.text.is_echoed_in(bytes(raw))):
            return
        try:
            echoed = msgspec.json.decode(raw, type=list[int] | None)
        except UNREADABLE as error:
            raise self.violation(f"Law 4: the echo of the prompt is no list of ids: {error}.") from error
        sent = request.input_ids
        if echoed is None:
            raise self.violation(
                "Law 4: the server did not echo the prompt ids, so nothing proves what it saw: "
                "it is too old for token-exact rollouts, or a proxy removed the field."
            )
        if len(echoed) != len(sent):
            raise self.violation(f"Law 4: {len(sent)} prompt ids were sent, the server saw {len(echoed)}.")
        self._same_ids("prompt id {} at offset {} was sent, the server saw {}", sent.tolist(), echoed)

    def _output(self, said: Reported, request: TokenRequest, *, at_least: int) -> tuple[TokenIds, Logprobs]:
        ids, logprobs, limit = said.output_ids, said.logprobs, request.sampling.max_new_tokens
        if ids is None or logprobs is None:
            missing = "output ids" if ids is None else "logprobs"
            raise self.violation(f"Law 4: the answer holds no {missing}, though they were asked for.")
        if len(ids) != len(logprobs):
            raise self.violation(f"Law 2: the server gave {len(ids)} output ids and {len(logprobs)} logprobs.")
        if len(ids) < at_least:
            raise self.violation("Law 4: the server gave no output ids, not even a stop token.")
        if len(ids) > limit:
            raise self.violation(f"Law 4: {limit} tokens were asked for, the server gave {len(ids)}.")
        packed = self._token_ids(ids)
        if len(said.logprob_ids) != len(ids):
            raise self.violation(f"Law 4: {len(ids)} output ids, but logprobs of {len(said.logprob_ids)} ids.")
        self._same_ids("output id {} at offset {} has the logprob of {}", ids, said.logprob_ids)
        return packed, self._logprobs(logprobs, ids)

    def _token_ids(self, ids: Sequence[int]) -> TokenIds:
        try:  # which refuses what int32 cannot hold, as no NumPy 1 does, and takes half of an array's time
            packed = struct.pack(f"{len(ids)}i", *ids)
        except struct.error:
            packed = None
        if packed is None or not packed[SIGN::4].isascii():
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise self.violation(f"Law 2: output id {wrong} is no token.")
        return np.frombuffer(packed, np.int32)

    def _same_ids(self, sentence: str, expected: Sequence[int], found: Sequence[int | str]) -> None:
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

    def _end(self, finish: Finish, output_ids: Sequence[int], stop: int | str | None, request: TokenRequest) -> None:
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

    def _count(self, name: str, reported: int | None, expected: int) -> None:
        if reported != expected:
            raise self.violation(
                f"Law 4: the server reported {name}={reported}, the request and answer hold {expected}."
            )

    def _cached(self, reported: int | None) -> int | None:
        """Check the tokens from the prefix cache.

        They are not compared with the prompt's: an engine that had to begin a request again may count twice.
        """
        if reported is not None and not 0 <= reported <= MAX_COUNT:
            raise self.violation(
                f"Law 4: the server reported cached_tokens={reported}, which is not a count of tokens."
            )
        return reported

    def _versions(self, spans: Sequence[tuple[int, int, str | None]], length: int) -> tuple[VersionSpan, ...]:
        versions = tuple(VersionSpan(*span) for span in spans) or (VersionSpan(0, length, None),)
        try:
            check_versions(versions, length)
        except LawViolationError as error:
            raise self.violation(str(error)) from error
        return versions
