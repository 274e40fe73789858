"""How SGLang streams: each event says the whole answer so far, or with `--incremental-streaming-output` what is new."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tito_core.backend.bodies import BodyTooLargeError
from tito_core.backend.protocol import NOTHING, TokenRequest
from tito_core.backend.streaming import StreamError, go_on, same_echo
from tito_sglang import wire

_SAID_AGAIN = 1024
"""Ids and logprobs that an event may say once more for each of its new tokens."""


def interval(request: TokenRequest) -> int:
    """Give the tokens an event shall bring: each repeats the prompt's echo, and all that was sampled before.

    Without it, streaming 1,000 tokens after a prompt of 32,000 would bring 32 million ids.
    """
    repeated = len(request.input_ids) + request.sampling.max_new_tokens // 2
    return 1 + repeated // _SAID_AGAIN


def events(request: TokenRequest) -> int:
    """Return how many events an answer comes in, with some to spare."""
    return 8 + request.sampling.max_new_tokens // interval(request)


class _Count(msgspec.Struct):
    completion_tokens: int


class _Event(msgspec.Struct):
    """What is read of every event; the rest is read of those that make the answer."""

    output_ids: list[int]
    meta_info: _Count
    prompt_token_ids: msgspec.Raw = NOTHING


class Events:
    """Puts one answer together. An event that is lost, comes twice or out of order shows in its count of tokens.

    Args:
        limit: Most bytes of the events that are kept, which hold the answer once.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._length = 0
        self._ids: list[int] = []
        self._kept: list[bytes] = []
        self._echo = NOTHING

    def take(self, event: bytes) -> Sequence[int]:
        """See `Gathering.take`."""
        said, before = msgspec.json.decode(event, type=_Event), len(self._ids)
        self._echo = same_echo(self._echo, said.prompt_token_ids)
        count, ids = said.meta_info.completion_tokens, said.output_ids
        if len(ids) == count and ids[:before] == self._ids:  # all so far, which stands for the events before
            self._kept, self._length, new = [event], len(event), ids[before:]
        elif before and before + len(ids) == count:
            self._kept.append(event)
            self._length += len(event)
            if self._length > self._limit:
                raise BodyTooLargeError(self._limit)
            new = ids
        else:
            raise StreamError(
                f"an event of {len(ids)} ids counts {count}, after events that brought {before}; it neither repeats "
                "those nor goes on from them"
            )
        self._ids += new
        return new

    def whole(self) -> wire.Generation:
        """See `Gathering.whole`."""
        if not self._kept:
            raise msgspec.DecodeError("it streamed no event")
        first, *more = (msgspec.json.decode(event, type=wire.Generation) for event in self._kept)
        for event in more:
            go_on(first, event)
        return first
