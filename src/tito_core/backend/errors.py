"""The tree of backend errors. Each message says what happened and what to do."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from strands.types.exceptions import ContextWindowOverflowException, EventLoopException

from tito_core.ledger.errors import place_in_docs

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Exceptions of decoding a server's JSON: a wrong shape, not UTF-8, or nested too deeply."""
OUT_OF_VOCABULARY = (
    "Check that the tokenizer belongs to the model that the server runs. If an earlier answer holds the id, remove "
    "that answer and the messages after it with del agent.messages[n:], and call agent() to continue."
)
"""Remedy for a prompt with an id outside the server's vocabulary."""
ConnectionFailure = Literal[
    "address", "refused", "unknown-host", "unreachable", "never-opened", "tls", "reset", "closed"
]
"""How a connection failed. Up to "tls" the engine received nothing of the request."""


def printable(text: str) -> str:
    """Escape control characters except newlines, so that the text cannot control a terminal or a log."""
    if text.isprintable():
        return text
    return "".join(
        each if each == "\n" or each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


class BackendError(EventLoopException):
    """A request to an engine failed. Control characters in its message, which may quote the server, are escaped.

    It is an `EventLoopException`, which Strands raises from an agent unchanged. Strands wraps other errors in one, but
    only after an invocation's first model call, so users would need two `except` clauses.

    Attributes:
        backend: Name of the backend.
        status: HTTP status, or None without an answer.
        body: The server's answer, at most 2,000 characters.
        request_id: Our request id, as sent.
        sent: Whether the engine may have started the request, and may still be working on it.
        was_streamed: Whether part of the answer was streamed to the caller, so that the request cannot be retried.
    """

    sent: bool = False
    was_streamed: bool = False

    def __init__(
        self,
        sentence: str,
        *,
        backend: str = "",
        status: int | None = None,
        body: str = "",
        request_id: str | None = None,
    ) -> None:
        Exception.__init__(self, printable(sentence))
        self.request_state: Any = {}
        self.backend = backend
        self.status = status
        self.body = body[:2000]
        self.request_id = request_id
        self.add_note(place_in_docs(self))

    @property
    def original_exception(self) -> Exception:  # type: ignore[override]  # an attribute of Strands' class
        """The error itself, since it wraps no other. A property, as an attribute would be a reference cycle."""
        return self


class EngineConnectionError(BackendError):
    """Nothing answers at the address, or the connection broke.

    Attributes:
        reason: How the connection failed; None if unknown.
        reached: Whether a server has answered at this address before. If not, a connection that cannot be opened is
            not retried.
    """

    reason: ConnectionFailure | None = None
    reached: bool = True


class EngineTimeoutError(BackendError):
    """The engine did not answer in time."""


class ThrottledError(BackendError):
    """The engine is overloaded or paused (429 or 503), and still was at the last retry.

    It is not Strands' `ModelThrottledException`, for which Strands would start all retries again.

    Attributes:
        retry_after_s: Seconds from the `Retry-After` header, or None.
        is_pause: Whether the server says that it is paused.
    """

    retry_after_s: float | None = None
    is_pause: bool = False


class ContextLengthError(BackendError, ContextWindowOverflowException):
    """The prompt, or prompt and completion together, do not fit the engine's context.

    Strands' conversation manager then shortens the history and tries again.
    """


class WeightsNotLoadedError(BackendError):
    """The engine could not load weights; it stays paused."""


class BadRequestError(BackendError):
    """The engine refused the request (4xx). It is not retried."""


class UnsupportedByServerError(BackendError):
    """The server does not support an optional output; the message names the option to enable it. Nothing was sent."""


class AuthenticationError(BackendError):
    """The engine refused the API key."""


class ServerError(BackendError):
    """The engine failed (5xx), and still did at the last retry."""


class ProtocolViolationError(BackendError):
    """The answer breaks law 2, 4 or 10, or has an unknown shape. Nothing is filled in."""


class AnswerTooLargeError(ProtocolViolationError):
    """The answer exceeds the size limit for its request; it was read only up to the limit.

    Attributes:
        limit: The bound, in bytes.
    """

    limit: int = 0


class GenerationAbortedError(BackendError):
    """The engine aborted the generation; its partial tokens are discarded."""


class UnknownBackendError(ValueError):
    """No installed backend has the name."""
