"""Server-sent events of an SGLang server (0.5.23).

Each event holds the whole answer so far, or with `--incremental-streaming-output` only new tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tito_core.backend.http.bodies import BodyTooLargeError
from tito_core.backend.http.streaming import FailedAnswerError, StreamError, merge_event, same_echo, same_request
from tito_core.backend.protocol import NOTHING, TokenRequest
from tito_sglang.wire import FinishReason, Generation, WeightVersionSpan

_REPEATED = 1024
"""Maximum number of ids and logprobs that an event may repeat per new token."""


def stream_interval(request: TokenRequest) -> int:
    """Return the number of new tokens per event, or the user's if that is larger.

    Each event repeats the prompt's echo and all earlier tokens.

    With one token per event, streaming 1,000 tokens after a prompt of 32,000 would transfer 32 million ids.
    """
    repeated = request.least_length + request.sampling.max_new_tokens // 2
    given = request.sampling.extra.get("stream_interval")
    return max(1 + repeated // _REPEATED, given if isinstance(given, int) else 1)


def stream_events(request: TokenRequest) -> int:
    """Return an upper bound on the number of events."""
    return 8 + request.sampling.max_new_tokens // stream_interval(request)


class _Meta(msgspec.Struct):
    completion_tokens: int
    id: str | None = None
    prompt_tokens: int | None = None
    finish_reason: FinishReason | None = None


class _Event(msgspec.Struct):
    """The fields that are decoded of every event; the others are decoded only of events that are kept."""

    output_ids: list[int]
    meta_info: _Meta
    prompt_token_ids: msgspec.Raw = NOTHING


class _AbortMeta(msgspec.Struct):
    finish_reason: FinishReason
    weight_versions: list[WeightVersionSpan] = []


class _Abort(msgspec.Struct):
    """The end of a request that was aborted while it waited again."""

    meta_info: _AbortMeta


class EventAssembler:
    """Assembles one response. The count of tokens in each event reveals lost, duplicated and reordered events.

    A request that is aborted while it waits again after a retraction ends, in both modes, with an event that holds only
    its last token again, the count of all, and neither prompt nor usage (`_handle_abort_req` of 0.5.23).

    Args:
        limit: Maximum number of bytes of the kept events, which hold the answer once.
    """

    unordered = False

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._length = 0
        self._ids: list[int] = []
        self._kept: list[bytes] = []
        self._echo = NOTHING
        self._id: str | None = None
        self._abort: _Abort | None = None

    def add(self, event: bytes) -> Sequence[int]:
        """See `StreamAssembler.add`."""
        decoded, before = msgspec.json.decode(event, type=_Event), len(self._ids)
        reason = decoded.meta_info.finish_reason
        if reason is not None and reason.status_code is not None:
            raise FailedAnswerError(reason.status_code, reason.message or "")
        self._echo = same_echo(self._echo, decoded.prompt_token_ids)
        self._id = same_request(self._id, decoded.meta_info.id)
        if self._abort is not None:
            raise StreamError("an event follows the one that aborted the answer")
        count, ids = decoded.meta_info.completion_tokens, decoded.output_ids
        aborted = reason is not None and reason.type == "abort"
        repeats = before and count == before and ids == self._ids[-1:]
        if aborted and repeats and (before > 1 or decoded.meta_info.prompt_tokens is None):
            self._abort = msgspec.json.decode(event, type=_Abort)
            return []
        if len(ids) == count and ids[:before] == self._ids:  # cumulative: it replaces the events before
            self._kept, self._length, new = [event], len(event), ids[before:]
        elif before and before + len(ids) == count:
            self._kept.append(event)
            self._length += len(event)
            if self._length > self._limit:
                raise BodyTooLargeError(self._limit)
            new = ids
        else:
            raise StreamError(
                f"an event of {len(ids)} ids reports {count} tokens after {before} earlier ones: it neither "
                "repeats nor continues them"
            )
        self._ids += new
        return new

    def result(self) -> Generation:
        """See `StreamAssembler.result`."""
        if not self._kept:
            raise msgspec.DecodeError("the stream had no event")
        first, *more = (msgspec.json.decode(event, type=Generation) for event in self._kept)
        for event in more:
            merge_event(first, event)
        if self._abort is not None:
            meta = self._abort.meta_info
            first.meta_info.finish_reason, first.meta_info.weight_versions = meta.finish_reason, meta.weight_versions
        return first
