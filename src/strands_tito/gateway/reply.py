"""What a gateway answers: a request, a reply, and errors in the shape of OpenAI's API."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import msgspec
from pydantic import ValidationError
from strands.types.exceptions import ContextWindowOverflowException

from tito_core.backend.errors import (
    BackendError,
    BadRequestError,
    EngineTimeoutError,
    GenerationAbortedError,
    ThrottledError,
)
from tito_core.ledger.errors import LawViolationError
from tito_core.turn.recording import TurnNotStoredError
from tito_core.turn.request import TotalTokensReachedError

T = TypeVar("T")
CONTEXT_CODE = "context_length_exceeded"
"""The code of a conversation that does not fit."""


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


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply. `body` is resumed after its last piece only when every piece was written.

    Attributes:
        status: The HTTP status.
        body: The pieces of the body.
        length: The body's bytes, or None for a stream of events.
        retry_after_s: For the header `Retry-After`, or None.
    """

    status: int
    body: AsyncGenerator[bytes]
    length: int | None = None
    retry_after_s: float | None = None

    @classmethod
    def of(cls, value: Any, status: int = 200, retry_after_s: float | None = None) -> Reply:
        """Return a reply that is one JSON value."""
        content = value if isinstance(value, bytes) else msgspec.json.encode(value)

        async def body() -> AsyncGenerator[bytes]:
            yield content

        return cls(status, body(), len(content), retry_after_s)

    @property
    def headers(self) -> dict[str, str]:
        """Its headers."""
        if self.length is None:
            return {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        headers = {"Content-Type": "application/json", "Content-Length": str(self.length)}
        return headers if self.retry_after_s is None else {**headers, "Retry-After": f"{self.retry_after_s:g}"}


class Refusal(Exception):
    """A request that the gateway refuses.

    Attributes:
        status: The HTTP status.
        code: OpenAI's code of the error, or ours.
        param: The key that is at fault, or None.
        retry_after_s: Seconds after which it may be sent again, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.retry_after_s = status, code, param, retry_after_s


def refusal_of(error: Exception) -> Refusal | None:
    """Return an error of a turn as a refusal, with the status by which harnesses retry or compact; None for a bug."""
    message = str(error)
    match error:
        case Refusal():
            return error
        case ContextWindowOverflowException() | TotalTokensReachedError():
            # Harnesses look for these words and this code.
            text = f"This model's maximum context length was exceeded. {message}"
            return Refusal(text, code=CONTEXT_CODE, param="messages")
        case ThrottledError():
            return Refusal(message, status=429, code="rate_limit_exceeded", retry_after_s=error.retry_after_s or 1.0)
        case ValidationError():
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or None
            return Refusal(f"{place or 'sampling'}: {first['msg']}", param=place)
        case BadRequestError():
            return Refusal(message)
        case EngineTimeoutError():
            return Refusal(message, status=504, code="engine_timeout")
        case GenerationAbortedError():
            return Refusal(message, status=503, code="engine_aborted", retry_after_s=1.0)
        case BackendError() | LawViolationError():
            return Refusal(message, status=502, code="engine_error")
        case TurnNotStoredError():
            return Refusal(message, status=507, code="not_stored")
        case ValueError() | TypeError():  # the messages, tools or parameters
            return Refusal(message)
    return None


def error_json(refusal: Refusal) -> dict[str, Any]:
    """Return OpenAI's JSON of an error."""
    kinds = {401: "authentication_error", 404: "not_found_error", 410: "invalid_request_error", 429: "rate_limit_error"}
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
