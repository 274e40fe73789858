"""Answers that stream: what comes is given on event by event, and the whole is then read as if it had come at once.

So nothing that a stream says is believed sooner, or checked less, than what one body says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NoReturn, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from tito_core.backend.errors import UNREADABLE, BackendError, EngineConnectionError, ProtocolViolationError
from tito_core.backend.http.bodies import ERROR_BYTES, AnswerSize, BodyTooLargeError
from tito_core.backend.http.connections import Reply
from tito_core.backend.http.errors import error_from_status
from tito_core.backend.protocol import NOTHING, OnChunk, TokenChunk

DONE = b"[DONE]"
"""What both engines send as the last event's data."""


class EventReader:
    """Cuts a body into events. Keeps only what is not yet a whole event.

    Args:
        size: Most bytes of an event, and of the stream.

    Attributes:
        done: Whether the last event, `[DONE]`, has come.
    """

    __slots__ = ("_length", "_read", "_rest", "_size", "done")

    def __init__(self, size: AnswerSize) -> None:
        self._size = size
        self._read = 0
        self._rest: list[bytes] = []
        self._length = 0
        self.done = False

    def feed(self, piece: bytes) -> list[bytes]:
        """Take the next bytes; return the data of each event that they complete. What follows `[DONE]` is ignored.

        Raises:
            BodyTooLargeError: A line, or the stream, is longer than it may be.
        """
        self._read += len(piece)
        if self._read > self._size.stream:
            raise BodyTooLargeError(self._size.stream)
        # A line may end in \r\n, and the piece between the two: then \r stays in the rest until \n is there.
        lines = piece.split(b"\n")
        self._length += len(lines[0])
        if self._length > self._size.body:
            raise BodyTooLargeError(self._size.body)
        self._rest.append(lines[0])
        if len(lines) == 1:
            return []
        lines[0] = b"".join(self._rest)
        self._rest = [lines.pop()]
        self._length = len(self._rest[0])
        return self._data(lines)

    def _data(self, lines: list[bytes]) -> list[bytes]:
        found: list[bytes] = []
        for line in lines:
            if not line.startswith(b"data:"):
                continue  # a blank line between events, a comment that keeps the connection, a field of no use here
            data = line[5:].strip()
            if data == DONE:
                self.done = True
            elif not self.done:
                found.append(data)
        return found


T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
S = TypeVar("S", bound=msgspec.Struct)
_SAID_ONCE = ("prompt", "input", "weight")
"""How the names of lists begin that an event does not go on with: the last one that comes is all of it."""


TokenArray = npt.NDArray[np.int64]


class StreamError(ValueError):
    """Events do not go on where the ones before them ended: one was lost, came twice, or in another order."""


class Gathering(Protocol[T_co]):
    """Puts one answer together from its events."""

    def take(self, event: bytes) -> Sequence[int]:
        """Take the next event; give the ids that are new.

        Raises:
            msgspec.DecodeError: It does not have the shape of this engine's events.
            StreamError: It does not continue the event before.
        """

    def whole(self) -> T_co:
        """Return the answer as it would have come in one body.

        Raises:
            msgspec.DecodeError: The events do not make one.
        """


@dataclass(slots=True)
class StreamReader(Generic[T]):
    """Reads one try's answer.

    Attributes:
        gather: Begins to put the answer together.
        on_chunk: Is given what comes.
        backend: Name for errors.
        url: Address for errors.
        request_id: Ours, for errors.
        hide: Takes secrets out of what a server said.
        size: Bounds on the answer.
        shown: Whether anything has been given on.
    """

    gather: Callable[[], Gathering[T]]
    on_chunk: OnChunk
    backend: str
    url: str
    request_id: str
    hide: Callable[[str], str]
    size: AnswerSize
    shown: bool = False

    async def __call__(self, reply: Reply) -> T:
        """Read a 200 to its end.

        Raises:
            EngineConnectionError: It broke off before its end.
            ProtocolViolationError: An event has another shape, or does not continue the one before.
            BodyTooLargeError: It, or one of its events, is longer than `size` allows.
            BackendError: The server ended it with an error of its own.
        """
        if "event-stream" not in reply.kind:
            problem = f"its content type is {reply.kind!r}, though a stream was asked for"
            self._refuse(await reply.text(ERROR_BYTES), problem)
        events, gathering = EventReader(self.size), self.gather()
        async for piece in reply.pieces():
            for event in events.feed(piece):
                self._show(self._taken(gathering, event))
        if not events.done:
            raise self._broken_off()
        try:
            return gathering.whole()
        except UNREADABLE as error:
            self._refuse("", str(error), error)

    def _show(self, ids: TokenArray) -> None:
        if not len(ids):
            return
        self.shown = True
        try:
            self.on_chunk(TokenChunk(ids))
        except BackendError as error:  # the core's, of an id that is not a token
            error.sent = True  # the engine goes on with what is no longer read: it is aborted
            raise

    def _taken(self, gathering: Gathering[T], event: bytes) -> TokenArray:
        if event[:24].lstrip(b"{ ").startswith(b'"error"'):
            raise self._said(event)
        try:
            return np.asarray(gathering.take(event), np.int64)
        except (*UNREADABLE, StreamError, OverflowError) as error:
            self._refuse(event[:2000].decode(errors="replace"), str(error), error)

    def _said(self, event: bytes) -> BackendError:
        """Return the error that a server ends a stream with, whose status came too early to tell."""
        try:
            code = msgspec.json.decode(event, type=_Failure).error.code
        except UNREADABLE:
            code = None
        status = code if code is not None and 400 <= code < 600 else 500
        said = self.hide(event.decode(errors="replace"))
        return error_from_status(self.backend, status, said, {}, url=self.url, request_id=self.request_id)

    def _broken_off(self) -> EngineConnectionError:
        error = EngineConnectionError(
            f"The stream of {self.backend} at {self.url} broke off before its end, so nothing of it is kept. "
            "Is the server still running? Its log may say why it hung up.",
            backend=self.backend,
            request_id=self.request_id,
        )
        error.sent = True
        error.reason = "closed"
        return error

    def _refuse(self, said: str, problem: str, cause: Exception | None = None) -> NoReturn:
        shown = self.hide(said[:2000])
        error = ProtocolViolationError(
            f"Law 4: {self.backend} at {self.url} answered 200, but {problem}"
            f"{f': it says {shown[:80]!r}' if shown else ''}. Nothing of it is kept.",
            backend=self.backend,
            status=200,
            body=shown,
            request_id=self.request_id,
        )
        error.sent = True  # it may go on with what we no longer read
        raise error from cause


def same_echo(before: msgspec.Raw, echo: msgspec.Raw) -> msgspec.Raw:
    """Return the echo of the prompt that events have so far, undecoded; the core compares it with what was sent.

    Raises:
        StreamError: One event echoes another prompt than those before, which a later echo would hide (law 4).
    """
    if echo == NOTHING or before == echo:
        return before
    if before != NOTHING:
        raise StreamError("an event echoes another prompt than the events before it")
    return echo


def go_on(before: S, event: S) -> None:
    """Let an answer go on with an event of its own type: lists get longer, and of anything else the latest counts.

    Raises:
        StreamError: It echoes another prompt; see `same_echo`.
    """
    for name in before.__struct_fields__:
        old, new = getattr(before, name), getattr(event, name)
        if new is None:
            continue
        if isinstance(old, msgspec.Struct) and isinstance(new, msgspec.Struct):
            go_on(old, new)
        elif isinstance(old, list) and isinstance(new, list) and not name.startswith(_SAID_ONCE):
            old.extend(new)
        elif isinstance(old, msgspec.Raw):
            setattr(before, name, same_echo(old, new))
        else:
            setattr(before, name, new)


class _Error(msgspec.Struct):
    code: int | None = None


class _Failure(msgspec.Struct):
    error: _Error
