"""Everything that can go wrong between us and an engine: one tree, each error a sentence that says what to do."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from strands.types.exceptions import ContextWindowOverflowException, EventLoopException

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding a server's JSON raises: of another shape, not UTF-8, or nested without end."""
OUT_OF_VOCABULARY = (
    "Check that the tokenizer belongs to the model that the server runs. If an earlier answer holds the id, remove "
    "that answer and the messages after it, del agent.messages[n:], and call agent() to go on."
)
"""What to do about a prompt with an id that the server does not know."""
ConnectionFailure = Literal[
    "address", "refused", "unknown-host", "unreachable", "never-opened", "tls", "reset", "closed"
]
"""How a connection failed. Up to "tls" the engine got nothing of the request."""


def printable(text: str) -> str:
    """Return text in which nothing steers a terminal or a log: control characters but newlines are escaped."""
    if text.isprintable():
        return text
    return "".join(
        each if each == "\n" or each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


class BackendError(EventLoopException):
    """An engine could not be used as asked. Control characters of its sentence, which a server chose, are escaped.

    It is an `EventLoopException`, which Strands lets out of an agent as it is. It would wrap any other error in one
    when it comes after an invocation's first model call, so that two `except` clauses were needed.

    Attributes:
        backend: Name of the backend.
        status: HTTP status, or None when there was no answer.
        body: What the server said, at most 2,000 characters.
        request_id: Ours, as sent.
        sent: Whether the engine may have begun to work on the request, and be at work still.
        shown: Whether part of the answer was given on before it failed, so that no other try can take its place.
    """

    sent: bool = False
    shown: bool = False

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

    @property
    def original_exception(self) -> Exception:  # type: ignore[override]  # an attribute of Strands' class
        """The error itself, since it wraps no other. As an attribute it would be a cycle of references."""
        return self


class EngineConnectionError(BackendError):
    """Nothing answers at the address, or the connection broke.

    Attributes:
        reason: How; None where a backend does not say.
    """

    reason: ConnectionFailure | None = None


class EngineTimeoutError(BackendError):
    """The engine did not answer within the time allowed."""


class ThrottledError(BackendError):
    """The engine is overloaded (429 or 503) and stayed so through every retry.

    It is not Strands' `ModelThrottledException`, for which Strands would start all the tries anew.

    Attributes:
        retry_after_s: Seconds the server asked to wait, or None.
    """

    retry_after_s: float | None = None


class ContextLengthError(BackendError, ContextWindowOverflowException):
    """The prompt, or prompt and completion together, do not fit the engine's context.

    Strands lets the conversation manager shorten the history, and asks again.
    """


class WeightsNotLoadedError(BackendError):
    """The engine could not load weights, and was left paused."""


class BadRequestError(BackendError):
    """The engine refused the request (a 4xx); it is never sent again."""


class UnsupportedByServerError(BackendError):
    """A rollout wants what the server cannot give; the sentence names the option that turns it on. Nothing was sent."""


class AuthenticationError(BackendError):
    """The engine refused the API key."""


class ServerError(BackendError):
    """The engine failed by itself (5xx) and did so through every retry."""


class ProtocolViolationError(BackendError):
    """The answer breaks law 2, 4 or 10, or is none of the shapes that this engine speaks. Nothing is filled in."""


class AnswerTooLargeError(ProtocolViolationError):
    """The answer is longer than what was asked for can need; it was read up to the bound and no further.

    Attributes:
        limit: The bound, in bytes.
    """

    limit: int = 0


class GenerationAbortedError(BackendError):
    """The engine aborted the generation; its partial tokens are discarded."""


class UnknownBackendError(ValueError):
    """No installed backend has the name."""
