"""What a gateway answers: a request, a reply, and errors in the shape of OpenAI's API."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec
from strands.types.exceptions import ContextWindowOverflowException
from strands.types.streaming import StreamEvent

from tito_core.backend.errors import (
    BackendError,
    BadRequestError,
    EngineTimeoutError,
    GenerationAbortedError,
    ThrottledError,
    UnsupportedByServerError,
)
from tito_core.ledger.errors import LawViolationError, TITOError
from tito_core.store import SchemaError
from tito_core.turn.request import TotalTokensReachedError

T = TypeVar("T")
_log = logging.getLogger(__name__)
CONTEXT_CODE = "context_length_exceeded"
"""The code of a conversation that does not fit."""
EVENTS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
"""Headers of a stream of events."""
_STATUSES: list[tuple[tuple[type[Exception], ...], int, str | None]] = [
    ((ContextWindowOverflowException, TotalTokensReachedError), 400, CONTEXT_CODE),
    ((ThrottledError,), 429, "rate_limit_exceeded"),
    ((BadRequestError, UnsupportedByServerError), 400, None),
    ((EngineTimeoutError,), 504, "engine_timeout"),
    ((GenerationAbortedError,), 503, "engine_aborted"),
    ((BackendError, LawViolationError), 502, "engine_error"),
    ((OSError, SchemaError), 507, "not_stored"),
    ((TITOError, ValueError, TypeError, RecursionError), 400, None),  # the messages, tools or parameters
]
"""The first row with an error's type has the status by which harnesses retry or compact. Other errors are bugs."""


class Request(NamedTuple):
    """A request.

    Attributes:
        method: The HTTP method.
        path: The path, as it was sent, without the query.
        key: The API key, of either header in which harnesses send one; "" without any.
        body: The body.
        is_retry: Whether the client says that it sends the request again, as OpenAI's clients do in a header.
    """

    method: str
    path: str
    key: str
    body: bytes
    is_retry: bool = False


class Reply(NamedTuple):
    """A reply. `body` is resumed after its last piece only when every piece was written."""

    status: int
    body: AsyncGenerator[bytes]
    headers: Mapping[str, str] = EVENTS

    @classmethod
    def of(cls, value: Any, status: int = 200, retry_after_s: float | None = None) -> Reply:
        """Return a reply that is one JSON value, or its bytes."""
        content = value if isinstance(value, bytes) else msgspec.json.encode(value)
        headers = {"Content-Type": "application/json", "Content-Length": str(len(content))}
        retry = {} if retry_after_s is None else {"Retry-After": f"{retry_after_s:g}"}

        async def body() -> AsyncGenerator[bytes]:
            yield content

        return cls(status, body(), headers | retry)


async def in_order(
    events: AsyncGenerator[StreamEvent | None], pause: bytes, lines: Callable[[Mapping[str, Any]], Iterator[bytes]]
) -> AsyncGenerator[bytes]:
    """Yield the lines of a turn's events: reasoning and text as they come, calls when the turn is committed.

    Args:
        events: The events; None among them is a pause.
        pause: The line of a pause.
        lines: Yields the lines of an event.
    """
    held: list[bytes] = []
    has_call = False
    async for event in events:
        if event is None:
            yield pause
            continue
        has_call |= "toolUse" in event.get("contentBlockStart", {}).get("start", {})
        for line in lines(event):
            if has_call:
                held.append(line)
            else:
                yield line
    for line in held:
        yield line


class Refusal(Exception):
    """A request that the gateway refuses.

    Attributes:
        status: The HTTP status.
        code: OpenAI's code of the error, or ours.
        param: The key that is at fault, or None.
        retry_after_s: Seconds after which it may be sent again, or None.
    """

    def __init__(self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        self.retry_after_s = 1.0 if status in (429, 503) else None


def refusal_of(error: Exception) -> Refusal:
    """Return an error as a refusal, with the status by which harnesses retry or compact. A bug is logged."""
    if isinstance(error, Refusal):
        return error
    for kinds, status, code in _STATUSES:
        if isinstance(error, kinds):
            # Harnesses look for these words and this code.
            said = "This model's maximum context length was exceeded. " if code == CONTEXT_CODE else ""
            refusal = Refusal(f"{said}{error}", status=status, code=code, param="messages" if said else None)
            refusal.retry_after_s = getattr(error, "retry_after_s", None) or refusal.retry_after_s
            return refusal
    _log.error("A request failed by a bug of the gateway.", exc_info=error)
    return Refusal("The gateway failed; its log says why.", status=500, code="internal_error")


def error_json(refusal: Refusal) -> dict[str, Any]:
    """Return OpenAI's JSON of an error."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "api_error")
    return {"error": {"message": str(refusal), "type": kind, "param": refusal.param, "code": refusal.code}}


def error_line(refusal: Refusal) -> bytes:
    """Return an error in the middle of OpenAI's stream."""
    return b"data: " + msgspec.json.encode(error_json(refusal)) + b"\n\n"


def decoded(body: bytes, kind: type[T]) -> T:
    """Return a body as a JSON object of this kind.

    Raises:
        Refusal: It is none.
    """
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refusal(f"The body is not a JSON object as expected: {error}.") from None
