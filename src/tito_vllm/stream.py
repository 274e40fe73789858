"""Server-sent events of a vLLM server, for both endpoints. Measured with 0.30 to 0.32.

Each event holds only new tokens; the first also the prompt ids, if requested. Each has the usage so far, where the
server knows `continuous_usage_stats` (both endpoints of 0.32).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar, cast

import msgspec

from tito_core.backend.http.streaming import StreamError, merge_event
from tito_core.backend.optional_outputs import OptionalOutputs
from tito_core.backend.protocol import NOTHING, OnChunk
from tito_vllm.wire import Choice, Completion, Generated, Generation, Logprobs, Usage

E = TypeVar("E", bound=Completion | Generation)


def stream_fields(on_chunk: OnChunk | None) -> dict[str, Any]:
    """Return the request fields of a streamed or a plain response."""
    if on_chunk is None:
        return {"stream": False}
    return {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def must_not_stream(optional_outputs: OptionalOutputs, *, generates: bool) -> bool:
    """Return whether a stream of the endpoint lacks one of the optional outputs."""
    return (
        optional_outputs.prompt_logprobs
        or optional_outputs.sampling_mask
        or bool(optional_outputs.routed_experts and not generates)
    )


class EventAssembler(Generic[E]):
    """Assembles one response of either endpoint.

    The usage counts the tokens so far: in each event it reveals lost, duplicated and reordered ones (law 4). On
    `/v1/completions` `text_offset` does too. Where events have neither, the usage at the end reveals lost and
    duplicated ones, and a reordered one is detected only if it is the first with the prompt's ids or the last.
    """

    def __init__(self, kind: type[E]) -> None:
        self._kind = kind
        self._response: E | None = None
        self._offset = 0
        self._tokens = self._unplaced = 0
        self._started = self._finished = False

    def add(self, event: bytes) -> Sequence[int]:
        """See `StreamAssembler.add`."""
        decoded = msgspec.json.decode(event, type=self._kind)
        if len(decoded.choices) > 1:
            raise StreamError(f"an event holds {len(decoded.choices)} completions instead of one")
        choices, decoded.choices = cast(list[Choice | Generated], decoded.choices), []
        if self._response is None:
            self._response = decoded
        else:
            merge_event(self._response, decoded)
        if not choices:
            return []
        (new,) = choices
        echoing = new if isinstance(new, Choice) else cast(Generation, decoded)
        self._check_order(new, decoded.usage, echoes=echoing.prompt_token_ids != NOTHING)
        sampled = tuple(new.token_ids or ())  # copied, as `merge_event` extends the first event's list
        merged = cast(list[Choice | Generated], self._response.choices)
        if merged:
            merge_event(merged[0], new)
        else:
            merged.append(new)
        return sampled

    def result(self) -> E:
        """See `StreamAssembler.result`."""
        if self._response is None:
            raise msgspec.DecodeError("the stream had no event")
        return self._response

    @property
    def unordered(self) -> bool:
        """See `StreamAssembler.unordered`."""
        return self._unplaced > 1

    def _check_order(self, new: Choice | Generated, usage: Usage | None, *, echoes: bool) -> None:
        """Check an event's place in the stream by what it says of it."""
        if self._finished:
            raise StreamError("an event follows the one with the finish reason")
        if echoes and self._started:
            raise StreamError("the prompt ids follow tokens of the answer")
        offsets = new.logprobs.text_offset if isinstance(new.logprobs, Logprobs) else []
        if offsets and offsets[0] < self._offset:
            raise StreamError(f"an event at text offset {offsets[0]} follows one at {self._offset}")
        self._offset = offsets[0] if offsets else self._offset
        self._tokens += len(new.token_ids or ())
        if usage is not None and usage.completion_tokens != self._tokens:
            raise StreamError(f"an event reports {usage.completion_tokens} tokens so far, but {self._tokens} have come")
        placed = usage is not None or bool(offsets) or echoes or new.finish_reason is not None
        self._unplaced += not placed
        self._started, self._finished = True, new.finish_reason is not None
