"""How vLLM streams: each event says only what is new, the first the prompt's ids, the last the usage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar, cast

import msgspec

from tito_core.backend.protocol import NOTHING, OnChunk
from tito_core.backend.streaming import StreamError, go_on
from tito_core.backend.wanted import Wanted
from tito_vllm import wire

E = TypeVar("E", bound=wire.Completion | wire.Generation)


def fields(on_chunk: OnChunk | None) -> dict[str, Any]:
    """Give the fields that ask for a stream, or for none."""
    return {"stream": False} if on_chunk is None else {"stream": True, "stream_options": {"include_usage": True}}


def lacks(wanted: Wanted, *, generates: bool) -> bool:
    """Tell whether a stream does not bring what is wanted: then the answer comes in one body."""
    return wanted.prompt_logprobs or wanted.sampling_mask or bool(wanted.routed_experts and not generates)


class Events(Generic[E]):
    """Puts one answer of either endpoint together.

    An event that is lost or comes twice is found out at the end, by the usage, which counts the tokens (law 4). One
    that comes out of order is found out where it is the first or the last, and on `/v1/completions` anywhere, where
    `text_offset` counts what came before.
    """

    def __init__(self, kind: type[E]) -> None:
        self._kind = kind
        self._whole: E | None = None
        self._offset = 0
        self._began = self._finished = False

    def take(self, event: bytes) -> Sequence[int]:
        """See `Gathering.take`."""
        said = msgspec.json.decode(event, type=self._kind)
        if len(said.choices) > 1:
            raise StreamError(f"an event holds {len(said.choices)} completions, and one was asked for")
        choices, said.choices = cast(list[wire.Choice | wire.Generated], said.choices), []
        if self._whole is None:
            self._whole = said
        else:
            go_on(self._whole, said)
        if not choices:
            return []
        (new,) = choices
        echoing = new if isinstance(new, wire.Choice) else cast(wire.Generation, said)
        self._in_order(new, echoing.prompt_token_ids != NOTHING)
        sampled = tuple(new.token_ids or ())  # a list of the first event gets longer
        whole = cast(list[wire.Choice | wire.Generated], self._whole.choices)
        if whole:
            go_on(whole[0], new)
        else:
            whole.append(new)
        return sampled

    def whole(self) -> E:
        """See `Gathering.whole`."""
        if self._whole is None:
            raise msgspec.DecodeError("it streamed no event")
        return self._whole

    def _in_order(self, new: wire.Choice | wire.Generated, echoes: bool) -> None:
        if self._finished:
            raise StreamError("an event goes on after the one that told how it finished")
        if echoes and self._began:
            raise StreamError("the prompt's ids come after tokens of the answer")
        offsets = new.logprobs.text_offset if isinstance(new.logprobs, wire.Logprobs) else []
        if offsets and offsets[0] < self._offset:
            raise StreamError(f"an event begins at text offset {offsets[0]}, after one that began at {self._offset}")
        self._offset = offsets[0] if offsets else self._offset
        self._began, self._finished = True, new.finish_reason is not None
