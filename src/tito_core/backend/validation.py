"""Validate what a backend reports against laws 2, 4 and 10. The same for every backend, ours included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial

import msgspec
import numpy as np

from tito_core.backend.errors import UNREADABLE, ProtocolViolationError, hidden
from tito_core.backend.id_text import SAME_ECHO
from tito_core.backend.image_validation import ImageValidation, Span
from tito_core.backend.optional_columns import ColumnValidation
from tito_core.backend.protocol import NOTHING, EngineInfo, RawResponse, TokenRequest, TokenResponse
from tito_core.backend.values import RawReader, floats, integer, short_repr, utf8_or_none
from tito_core.ledger.columns import Logprobs, TokenIds
from tito_core.ledger.errors import LawViolationError
from tito_core.ledger.laws import MAX_COUNT, check_versions
from tito_core.ledger.turn import Finish, VersionSpan

LONGEST_S = 1e9
"""Bound on a latency, in seconds (thirty years): in milliseconds it must fit an integer."""
LONGEST_WORD = 100
"""Longest finish reason of a server, in characters."""
_FAILURES = frozenset({"aborted", "cancelled", "canceled", "error", "timeout"})
"""Words of servers for an answer that they gave up."""
_label = lru_cache(64)(partial(hidden, own=True))
"""Returns a version as ledgers hold it: a server may echo the key. Cached, as turn after turn has the same one."""
_FINISHES: dict[str, Finish] = {finish.value: finish for finish in Finish}


def validated(raw: object, request: TokenRequest, info: EngineInfo) -> TokenResponse:
    """Check laws 2, 4 and 10 on a backend's report of a generation, and return it as a response.

    Args:
        raw: What `Backend.generate` returned.
        request: The request that was sent.
        info: The server's properties.

    Raises:
        ProtocolViolationError: `raw` is not a `RawResponse`, or contradicts the request or itself; the message holds
            both values.
    """
    reader = RawReader(info.backend, request.request_id)
    try:
        return Validation(reader, info).response(raw, request)
    except Exception as error:
        raise reader.unreadable(raw, error)  # noqa: B904  # it is the cause already


class Validation(msgspec.Struct, frozen=True):
    """Checks of one generation.

    Attributes:
        reader: Reads values, and builds errors.
        info: The server's properties.
    """

    reader: RawReader
    info: EngineInfo

    def response(self, raw: object, request: TokenRequest) -> TokenResponse:
        """See `validated`."""
        if not isinstance(raw, RawResponse):
            raise self.reader.violation(f"Law 4: generate() must return a RawResponse, not {short_repr(raw)}.")
        sent, model = self._request(raw, request), self._model(raw.model, request)
        ids = None if raw.output_ids is None else self.reader.integers("output_ids", raw.output_ids)
        finish, word = self._finish(raw, ids or [], request)
        aborted = finish == Finish.ABORT
        never_ran = aborted and not ids  # SGLang reports nothing for a request that it aborts in its queue
        media: tuple[Span, ...] = ()
        echoed_from = 0
        if not never_ran:
            request, media, echoed_from = self._prompt(request, raw)
            self._count("prompt_tokens", raw.prompt_tokens, len(request.input_ids))
        output, logprobs = self._output(raw, ids, request, min_tokens=0 if never_ran else 1)
        self._count("completion_tokens", raw.completion_tokens, len(output))
        stop = self._stop(raw.stop) if finish == Finish.STOP else None
        if aborted and (ended := _stop_at_end(ids or [], request)) is not None:
            # SGLang runs one more step after an abort, and does not look for a stop in it: this answer is whole.
            finish, stop = Finish.STOP, ended
        self._end(finish, ids or [], stop, request, known=word is None)
        self._flag("recomputed", raw.recomputed)
        columns = ColumnValidation(self.reader, request, output, logprobs, self.info.vocab_size).columns(raw)
        message = self.reader.text("message", raw.message)
        self.reader.text("served_by", raw.served_by)
        return TokenResponse(
            output_ids=output,
            logprobs=logprobs,
            finish=finish,
            stop=stop,
            prompt_length=request.least_length if never_ran else len(request.input_ids),
            cached_tokens=self._cached(raw.cached_tokens),
            latency_s=self._seconds(raw.latency_s),
            request_id=sent,
            versions=self._versions(raw.versions, len(output), self._has_versions(request, aborted)),
            message=hidden(message) if message is not None and finish == Finish.ABORT else None,
            columns=columns,
            media=media,
            finish_word=word,
            unordered=self._flag("unordered", raw.unordered),
            model=model,
            echoed_from=echoed_from,
        )

    def _request(self, raw: RawResponse, request: TokenRequest) -> str:
        """Return the id that was sent for the answered try, after comparing the answer's own with it."""
        own = request.request_id
        sent = self.reader.text("request_id", raw.request_id) or own
        if sent != own and not sent.startswith(f"{own}-"):
            raise self.reader.violation(
                f"Law 4: the backend sent the request as {short_repr(sent)}. Its id must be {own!r}, or begin with "
                f"{own + '-'!r} for a retry."
            )
        if raw.response_id is not None or "response_id" not in self.info.unreported:
            self.reader.same_request(sent, raw.response_id)
        return sent

    def _finish(self, raw: RawResponse, ids: list[int], request: TokenRequest) -> tuple[Finish, str | None]:
        """Return the finish reason, and the server's word for it where that is none of ours.

        Servers have more reasons than these (vLLM's "repetition"), and get new ones. The answer's own tokens decide
        which of ours is the nearest: a stop that was requested, else a cut; without tokens, an abort.
        """
        reason, sampling = raw.finish, request.sampling
        known = _FINISHES.get(reason) if isinstance(reason, str) else None
        if known is not None:
            return known, None
        word = utf8_or_none(reason)
        if not word or len(word) > LONGEST_WORD:
            raise self.reader.violation(
                f"Law 4: the server reported finish reason {short_repr(reason)}; expected 'stop', 'length', 'abort' or "
                f"another word of at most {LONGEST_WORD} characters."
            )
        word = hidden(word, own=True)
        if word.lower() in _FAILURES:
            return Finish.ABORT, word
        stops = () if sampling.ignore_eos else sampling.stop_token_ids
        ended = (bool(ids) and ids[-1] in stops) or (isinstance(raw.stop, str) and raw.stop in sampling.stop)
        return (Finish.STOP if ended else Finish.LENGTH if ids else Finish.ABORT), word

    def _prompt(self, request: TokenRequest, raw: RawResponse) -> tuple[TokenRequest, tuple[Span, ...], int]:
        """Check which prompt the server read.

        Returns:
            The request with these ids, the spans of its new images, and `EngineRecord.echoed_from`.
        """
        if request.images is None:
            self._no_images(raw)
            return request, (), self._echo(request, raw.echoed, raw.echoed_from)
        needs_echo, needs_report = (name not in self.info.unreported for name in ("echoed", "media"))
        ids, media = ImageValidation(self.reader, request, request.images).read(
            raw, needs_echo=needs_echo, needs_report=needs_report
        )
        return replace(request, input_ids=ids), media, 0 if needs_echo else len(ids)

    def _no_images(self, raw: RawResponse) -> None:
        """Check that the server does not report images of a prompt without any."""
        spans = None if isinstance(raw.media, list) and not raw.media else raw.media
        if spans is not None or (raw.image_tokens is not None and integer(raw.image_tokens) != 0):
            raise self.reader.violation(
                f"Law 4: the prompt has no images, but the server reports media={short_repr(spans)} and "
                f"image_tokens={short_repr(raw.image_tokens)}."
            )

    def _echo(self, request: TokenRequest, echoed: object, start: object) -> int:
        """Compare the echo, which begins at offset `start` of the prompt, with the ids sent.

        Undecoded JSON is compared as text, and decoded only if it differs. Returns `EngineRecord.echoed_from`.
        """
        undecoded = isinstance(echoed, bytes | msgspec.Raw)
        if echoed is None or (undecoded and echoed == NOTHING):
            if not request.echo or "echoed" in self.info.unreported:
                return len(request.input_ids)
            raise self.reader.violation(
                "Law 4: the server did not echo the prompt ids, so nothing proves which prompt it read. It is not "
                f"{self.info.backend} but another server with the same API, or of an older version, or a proxy removed "
                "the field."
            )
        if isinstance(echoed, bytes | msgspec.Raw):
            if echoed == SAME_ECHO or (request.id_text is not None and request.id_text.is_echoed_in(bytes(echoed))):
                return 0
            try:
                echoed = msgspec.json.decode(echoed, type=list[int])
            except UNREADABLE as error:
                raise self.reader.violation(f"Law 4: the echo of the prompt is not a list of ids: {error}.") from error
        if type(start) is not int or not 0 <= start <= request.delta_start:
            raise self.reader.violation(
                f"Law 4: the server repeated the prompt's ids from offset {short_repr(start)} on, and not all of the "
                f"turn's own, which begin at offset {request.delta_start}."
            )
        sent = request.input_ids[start:]
        if isinstance(echoed, np.ndarray) and echoed.dtype.kind in "iu" and np.array_equal(echoed, sent):
            return start  # comparing a long prompt as lists takes a hundred times as long (law 14)
        seen = self.reader.integers("echoed", echoed)
        if len(seen) != len(sent):
            raise self.reader.violation(f"Law 4: {len(sent)} prompt ids were sent, but the server read {len(seen)}.")
        place = f"offset {{}} of those from {start} on" if start else "offset {}"
        self.reader.same_ids(f"prompt id {{}} at {place} was sent, but the server read {{}}", sent.tolist(), seen)
        return start

    def _output(
        self, raw: RawResponse, ids: list[int] | None, request: TokenRequest, *, min_tokens: int
    ) -> tuple[TokenIds, Logprobs]:
        limit = request.sampling.max_new_tokens
        if ids is None or raw.logprobs is None:
            missing = "output ids" if ids is None else "logprobs"
            raise self.reader.violation(f"Law 4: the answer has no {missing}, which were requested.")
        logprobs, count = self.reader.floats("logprobs", raw.logprobs), len(ids)
        if count != len(logprobs):
            raise self.reader.violation(f"Law 2: the server returned {count} output ids and {len(logprobs)} logprobs.")
        if count < min_tokens:
            raise self.reader.violation("Law 4: the server returned no output ids, not even a stop token.")
        if count > limit:
            raise self.reader.violation(
                f"Law 4: at most {limit} tokens were requested, but the server returned {count}."
            )
        packed = self.reader.token_ids(ids)
        if raw.logprob_ids is not None:
            scored = raw.logprob_ids.tolist() if isinstance(raw.logprob_ids, np.ndarray) else list(raw.logprob_ids)
            if len(scored) != count:
                raise self.reader.violation(
                    f"Law 4: the server returned {count} output ids, but logprobs of {len(scored)} ids."
                )
            self.reader.same_ids("output id {} at offset {} has the logprob of {}", ids, scored)
        check_output_ids(packed, self.info.vocab_size, backend=self.info.backend, request_id=request.request_id)
        return packed, self.reader.logprobs(logprobs, ids)

    def _stop(self, stop: object) -> int | str | None:
        text = utf8_or_none(stop)
        found = integer(stop) if text is None else text
        if found is None and stop is not None:
            raise self.reader.violation(
                f"Law 4: stop must be a token id, a stop string or None, not {short_repr(stop)}."
            )
        return found

    def _end(
        self, finish: Finish, output_ids: list[int], stop: int | str | None, request: TokenRequest, *, known: bool
    ) -> None:
        """Check the end against the request: the stop was requested, is the last id and the only one.

        A `known` finish of "length" used all its tokens; where the server has another word for it, it may be a cut.
        """
        sampling = request.sampling
        if finish == Finish.STOP:
            self._stopped(output_ids, stop, request)
        limit, context = sampling.max_new_tokens, self.info.max_model_len
        if request.images is not None and context is not None:  # only the answer tells how long the prompt is
            limit = min(limit, max(context - len(request.input_ids), 1))
        if known and finish == Finish.LENGTH and len(output_ids) not in (limit, sampling.max_new_tokens):
            raise self.reader.violation(
                f"Law 4: the output finished with 'length' after {len(output_ids)} of {sampling.max_new_tokens} tokens."
                " Usually a limit for all answers cut it: max_new_tokens in the server's --override-generation-config "
                "or generation_config.json, or a limit of a gateway. Remove it, and set max_new_tokens in sampling."
            )
        before = output_ids[sampling.min_new_tokens : -1]
        # With `ignore_eos`, SGLang also ignores stop ids.
        passed = [] if sampling.ignore_eos else [stop for stop in sampling.stop_token_ids if stop in before]
        if passed:
            at = sampling.min_new_tokens + min(map(before.index, passed))
            raise self.reader.violation(
                f"Law 4: stop token {output_ids[at]} at output offset {at} did not end the output of "
                f"{len(output_ids)} tokens."
            )

    def _stopped(self, output_ids: list[int], stop: int | str | None, request: TokenRequest) -> None:
        """Check a reported stop. A token id need not be requested: the model's own configuration has some too."""
        sampling = request.sampling
        if isinstance(stop, str) and stop not in (*sampling.stop, *sampling.stop_patterns):
            raise self.reader.violation(
                f"Law 4: the server reported that {short_repr(stop)} ended the output, which was not requested as a "
                f"stop string ({short_repr(list(sampling.stop))} were). Its log may say what happened."
            )
        if isinstance(stop, int) and output_ids[-1] != stop:
            raise self.reader.violation(
                f"Law 4: the server reported stop token {stop}, but the last output id is {output_ids[-1]}."
            )
        if not isinstance(stop, int) or sampling.grammar is not None:  # a grammar ends where its text is complete
            return
        if sampling.ignore_eos and stop not in sampling.stop_token_ids:
            raise self.reader.violation(
                f"Law 4: stop token {stop} ended the output, but ignore_eos was requested without that stop token."
            )
        if len(output_ids) < sampling.min_new_tokens:
            raise self.reader.violation(
                f"Law 4: the output stopped after {len(output_ids)} tokens, but "
                f"min_new_tokens={sampling.min_new_tokens} were requested."
            )

    def _count(self, name: str, reported: object, expected: int) -> None:
        if reported is None and name in self.info.unreported:
            return
        if integer(reported) != expected:
            raise self.reader.violation(
                f"Law 4: the server reported {name}={short_repr(reported)}, but request and answer hold {expected}."
            )

    def _cached(self, reported: object) -> int | None:
        """Check the number of tokens from the prefix cache.

        It may exceed the prompt's length: an engine that restarts a request may count its tokens twice.
        """
        found = integer(reported)
        if reported is not None and (found is None or not 0 <= found <= MAX_COUNT):
            raise self.reader.violation(
                f"Law 4: the server reported cached_tokens={short_repr(reported)}, which is not a count of tokens."
            )
        return found

    def _flag(self, name: str, value: object) -> bool:
        if value is True or value is False:
            return value
        raise self.reader.violation(f"Law 4: {name} must be True or False, not {short_repr(value)}.")

    def _seconds(self, latency: object) -> float:
        [seconds] = [latency] if type(latency) is float else floats([latency]) or [None]
        if seconds is None or not 0 <= seconds <= LONGEST_S:
            raise self.reader.violation(f"Law 4: latency_s must be a number of seconds, not {short_repr(latency)}.")
        return float(seconds)

    def _model(self, name: object, request: TokenRequest) -> str | None:
        """Compare the model that the answer names with the adapter, or those that answers named at connect."""
        found = self.reader.text("model", name)
        known = frozenset[str]() if request.measured is None else request.measured.answering_models
        if request.adapter is not None and found is not None and found != request.adapter.name:
            raise self.reader.violation(
                f"Law 4: the adapter {short_repr(request.adapter.name)} was requested, but the answer is of "
                f"{short_repr(found)}. It was discarded. Load the adapter under this name, or check any gateway."
            )
        if request.adapter is None and found is not None and known and found not in known:
            raise self.reader.violation(
                f"Law 4: the answer is of the model {short_repr(found)}, but at connect answers named "
                f"{', '.join(map(short_repr, sorted(known)))}. It was discarded. A gateway may have fallbacks to other "
                "models: disable them, or use the server's own address."
            )
        return found

    @staticmethod
    def _has_versions(request: TokenRequest, aborted: bool) -> bool:
        """Return whether an answer must have weight versions; SGLang leaves them out of some that were aborted."""
        return request.measured is not None and request.measured.reports_versions and not aborted

    def _versions(self, spans: object, length: int, required: bool) -> tuple[VersionSpan, ...]:
        if not isinstance(spans, list | tuple | Sequence) or isinstance(spans, str):
            raise self.reader.violation(
                f"Law 10: versions must be (start, stop, version) spans, not {short_repr(spans)}."
            )
        versions = tuple(map(self._span, spans)) or (VersionSpan(0, length, None),)
        if required and any(span.version is None and span.stop > span.start for span in versions):
            raise self.reader.violation(
                "Law 10: the answer has no weight versions, which the answers at connect had. It was discarded. A "
                "proxy that removes fields it does not know may stand before the server: use the server's own address."
            )
        try:
            check_versions(versions, length)
        except LawViolationError as error:
            raise self.reader.violation(str(error)) from error
        return versions

    def _span(self, span: object) -> VersionSpan:
        start, stop, version = span if isinstance(span, tuple | Sequence) and len(span) == 3 else (None, None, None)
        first, last, name = integer(start), integer(stop), None if version is None else utf8_or_none(version)
        if first is None or last is None or (name is None and version is not None):
            raise self.reader.violation(
                f"Law 10: a weight-version span must be (start, stop, version), not {short_repr(span)}."
            )
        return VersionSpan(first, last, None if name is None else _label(name))


def _stop_at_end(ids: list[int], request: TokenRequest) -> int | None:
    """Return the last id if it is a stop that was requested and counts there, else None."""
    sampling = request.sampling
    last = None if sampling.ignore_eos or len(ids) <= sampling.min_new_tokens else ids[-1]
    return last if last in sampling.stop_token_ids else None


def check_output_ids(output_ids: TokenIds, vocab_size: int | None, *, backend: str, request_id: str) -> None:
    """Check sampled ids: in a later prompt the server would refuse an id outside its vocabulary, or crash.

    Args:
        output_ids: int32, shape (n,), none negative.
        vocab_size: Rows of the server's embedding; None if unknown, then nothing is checked.
        backend: Name for the error.
        request_id: Our request id, for the error.

    Raises:
        ProtocolViolationError: An id is outside the vocabulary (law 4).
    """
    if vocab_size is not None and (largest := int(np.maximum.reduce(output_ids, initial=0))) >= vocab_size:
        raise outside_vocabulary(largest, f"of {vocab_size} tokens", backend, request_id)


def outside_vocabulary(token: int, of: str, backend: str, request_id: str) -> ProtocolViolationError:
    """Return the error for a sampled id outside the server's own vocabulary."""
    return ProtocolViolationError(
        f"Law 4: {backend} returned output id {token}, which is outside its own vocabulary {of}. The answer was "
        "discarded. Run the turn again; if the error persists, check the server and any proxy in front of it.",
        backend=backend,
        request_id=request_id,
    )
