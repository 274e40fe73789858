"""Streamed responses: pass new tokens on event by event, then return the response as if it had come in one body.

So a streamed response goes through the same checks as one that comes in one body.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import msgspec
import numpy as np
from msgspec.structs import astuple

from tito_core.backend.errors import UNREADABLE, BackendError, EngineConnectionError, ProtocolViolationError, hidden
from tito_core.backend.http.body import ERROR_BYTES, AnswerSize, BodyTooLargeError
from tito_core.backend.http.client import HttpResponse
from tito_core.backend.http.errors import error_from_status
from tito_core.backend.protocol import NOTHING, OnChunk, TokenChunk

DONE = b"[DONE]"
"""Data of the last event on both engines."""


class EventReader:
    """Cuts a body into server-sent events. Keeps only the incomplete last event.

    Args:
        size: Size limits of an event and of the stream.

    Attributes:
        done: Whether the last event, `[DONE]`, has arrived.
    """

    __slots__ = ("_length", "_read", "_rest", "_size", "done")

    def __init__(self, size: AnswerSize) -> None:
        self._size = size
        self._read = 0
        self._rest: list[bytes] = []
        self._length = 0
        self.done = False

    def feed(self, piece: bytes) -> list[bytes]:
        """Take the next bytes; return the data of each completed event. Events after `[DONE]` are ignored.

        Raises:
            BodyTooLargeError: A line or the stream exceeds its limit.
        """
        self._read += len(piece)
        if self._read > self._size.stream:
            raise BodyTooLargeError(self._size.stream)
        # If a piece ends between \r and \n, the \r stays in the rest until the \n arrives.
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
            if line[:5] != b"data:":
                continue  # a blank line, a keep-alive comment or another field
            data = line[5:].strip()
            if data == DONE:
                self.done = True
            elif not self.done:
                found.append(data)
        return found


T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
S = TypeVar("S", bound=msgspec.Struct)
_NOT_EXTENDED = ("prompt", "input", "weight")
"""Prefixes of the names of lists that each event repeats whole."""
_REQUEST_IDS = ("id", "request_id")
"""Names of the field that names the request, on both engines."""


class StreamError(ValueError):
    """An event does not continue the previous one: an event was lost, duplicated or reordered."""


class FailedAnswerError(ValueError):
    """An event ends an answer by an error, which without a stream would have been the HTTP status.

    Attributes:
        status: That status.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class StreamAssembler(Protocol[T_co]):
    """Assembles one response from its events."""

    @property
    def unordered(self) -> bool:
        """Whether two events could have changed places without a trace."""

    def add(self, event: bytes) -> Sequence[int]:
        """Add the next event; return the new ids.

        Raises:
            msgspec.DecodeError: The event has an unknown shape.
            StreamError: The event does not continue the previous one.
            FailedAnswerError: The event ends the answer by an error.
        """

    def result(self) -> T_co:
        """Return the response as it would have come in one body.

        Raises:
            msgspec.DecodeError: The events are incomplete.
            StreamError: They echo two prompts.
        """


@dataclass(slots=True)
class StreamReader(Generic[T]):
    """Reads one try's streamed response.

    Attributes:
        assembler: Makes the assembler of the response.
        on_chunk: Called with each chunk.
        backend: Name for errors.
        url: Address for errors.
        request_id: Our request id, for errors.
        size: Size limits of the response.
        was_streamed: Whether `on_chunk` has been called.
        unordered: The assembler's, at the end.
    """

    assembler: Callable[[], StreamAssembler[T]]
    on_chunk: OnChunk
    backend: str
    url: str
    request_id: str
    size: AnswerSize
    was_streamed: bool = False
    unordered: bool = False

    async def __call__(self, response: HttpResponse) -> T:
        """Read a 200 to its end.

        Raises:
            EngineConnectionError: The stream broke off.
            ProtocolViolationError: An event has an unknown shape, or does not continue the previous one.
            BodyTooLargeError: The stream or an event exceeds `size`.
            BackendError: The server ended the stream with an error event.
        """
        if "event-stream" not in response.kind:
            problem = f"its content type is {response.kind!r} instead of text/event-stream"
            self._refuse(await response.text(ERROR_BYTES), problem)
        events, assembler = EventReader(self.size), self.assembler()
        async for piece in response.pieces():
            ids: list[int] = []
            try:
                for event in events.feed(piece):
                    ids += self._add(assembler, event)
            finally:
                self._show(ids)  # one chunk for all that came at once, and what came before a refused event
        if not events.done:
            raise self._broken_off()
        try:
            value = assembler.result()
        except (*UNREADABLE, StreamError) as error:
            self._refuse("", str(error), error)
        self.unordered = assembler.unordered
        return value

    def _show(self, ids: list[int]) -> None:
        if not ids:
            return
        try:
            chunk = TokenChunk(np.array(ids, np.int64))
        except OverflowError as error:
            self._refuse("", str(error), error)
        self.was_streamed = True
        try:
            self.on_chunk(chunk)
        except BackendError as error:  # from the core, about an invalid token id
            error.sent = True  # the engine is still generating: abort it
            raise

    def _add(self, assembler: StreamAssembler[T], event: bytes) -> Sequence[int]:
        if b'"error"' in event[:24] and event[:24].lstrip(b"{ ").startswith(b'"error"'):
            raise self._error_event(event)
        try:
            return assembler.add(event)
        except FailedAnswerError as failed:
            body = msgspec.json.encode({"error": {"message": str(failed)}}).decode()  # as without a stream
            raise self._failure(failed.status, body) from None
        except (*UNREADABLE, StreamError, OverflowError) as error:
            self._refuse(event[:ERROR_BYTES].decode(errors="replace"), str(error), error)

    def _error_event(self, event: bytes) -> BackendError:
        """Return the error of an error event; the HTTP status of its stream was already 200."""
        try:
            code = msgspec.json.decode(event, type=_Failure, strict=False).error.code
        except UNREADABLE:
            code = None
        return self._failure(500 if code is None else code, event.decode(errors="replace"))

    def _failure(self, status: int, body: str) -> BackendError:
        known = status if 400 <= status < 600 else 500
        return error_from_status(self.backend, known, body, {}, url=self.url, request_id=self.request_id)

    def _broken_off(self) -> EngineConnectionError:
        error = EngineConnectionError(
            f"The stream of {self.backend} at {self.url} broke off before its end; the answer was discarded. "
            "Check that the server is still running, and its log.",
            backend=self.backend,
            request_id=self.request_id,
        )
        error.sent = True
        error.reason = "closed"
        return error

    def _refuse(self, content: str, problem: str, cause: Exception | None = None) -> NoReturn:
        shown = hidden(content)[:2000]
        error = ProtocolViolationError(
            f"Law 4: {self.backend} at {self.url} answered 200, but {hidden(problem)}"
            f"{f': {shown[:80]!r}' if shown else ''}. The answer was discarded.",
            backend=self.backend,
            status=200,
            body=shown,
            request_id=self.request_id,
        )
        error.sent = True  # the engine may still be generating
        raise error from cause


def same_echo(before: msgspec.Raw, echo: msgspec.Raw) -> msgspec.Raw:
    """Return the undecoded echo of the prompt after one more event; the core compares it with the ids sent.

    Raises:
        StreamError: The event echoes another prompt than the previous events, which would hide theirs (law 4).
    """
    if echo == NOTHING or before == echo:
        return before
    if before != NOTHING:
        raise StreamError("an event echoes another prompt than the previous events")
    return echo


def same_request(before: str | None, named: str | None) -> str | None:
    """Return the id of the request that a stream's events name; the core compares it with the id sent.

    Raises:
        StreamError: The event names another request than the previous events.
    """
    if before is not None and named is not None and named != before:
        raise StreamError(f"an event of request {named[:80]!r} follows events of {before[:80]!r}")
    return before if named is None else named


def merged(events: Sequence[S]) -> S:
    """Merge a stream's events, of one type, into one response: lists are joined; of other fields the last one counts.

    Raises:
        StreamError: The events echo two prompts or name two requests; see `same_echo` and `same_request`.
    """
    if len(events) == 1:
        return events[0]
    names, columns = events[0].__struct_fields__, zip(*map(astuple, events), strict=True)
    return type(events[0])(**{name: _merged(name, column) for name, column in zip(names, columns, strict=True)})


def _merged(name: str, column: Sequence[Any]) -> Any:
    values = [value for value in column if value is not None]
    last = values[-1] if values else None
    if isinstance(last, msgspec.Struct):
        return merged(values)
    if isinstance(last, list) and not name.startswith(_NOT_EXTENDED):
        return list(chain.from_iterable(values))
    if isinstance(last, msgspec.Raw):
        return reduce(same_echo, values, NOTHING)
    return reduce(same_request, values) if name in _REQUEST_IDS and values else last


class _Error(msgspec.Struct):
    code: int | None = None


class _Failure(msgspec.Struct):
    error: _Error
