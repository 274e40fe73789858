"""The tree of backend errors. Each message says what happened and what to do."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal, TypeVar

import msgspec
from strands.types.exceptions import ContextWindowOverflowException, EventLoopException

from tito_core.ledger.errors import TITOError, place_in_docs

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Exceptions of decoding a server's JSON: a wrong shape, not UTF-8, or nested too deeply."""
OUT_OF_VOCABULARY = (
    "Check that the tokenizer belongs to the model that the server runs. If an earlier answer holds the id, remove "
    "that answer and the messages after it with del agent.messages[n:], and call agent() to continue."
)
"""Remedy for a prompt with an id outside the server's vocabulary."""
ConnectionFailure = Literal[
    "address", "no-files", "refused", "unknown-host", "unreachable", "never-opened", "tls", "reset", "closed"
]
"""How a connection failed. Up to "tls" the engine received nothing of the request."""


def printable(text: str) -> str:
    """Escape control characters except newlines, so that the text cannot control a terminal or a log."""
    if text.isprintable():
        return text
    return "".join(
        each if each == "\n" or each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


LONGEST_ERROR = 1000
"""Maximum length of an error's message in characters."""
_TAIL = 300
"""Characters at the end of a long message that are kept: they say what to do."""
_secrets: dict[str, re.Pattern[str]] = {}
_SHORT_SECRET, _NO_SECRET = 8, 4
"""Lengths below which a secret is hidden only as a word of others, such as "EMPTY", and not at all, such as "x"."""
_NAMED = {"&": "amp", "<": "lt", ">": "gt", '"': "quot", "'": "apos"}


def keep_secret(secret: str) -> None:
    """Hide a text, such as an API key, in all errors of this process, however a server's answer escapes it."""
    if secret not in _secrets and len(secret) >= _NO_SECRET:
        spelled = "".join(map(_spellings, secret))
        before = r"(?:(?<![\w-])|(?<=\\u[0-9a-fA-F]{4})|(?<=\\[nrtbf]))"
        _secrets[secret] = re.compile(spelled if len(secret) >= _SHORT_SECRET else rf"{before}{spelled}(?![\w-])")


def _spellings(character: str) -> str:
    """Return a pattern for a character as it is, or escaped for JSON, a program, a URL or HTML."""
    code = ord(character)
    escaped = rf"\\+(?i:u00|x){code:02x}|%{code:02x}|&#0*{code};|&#x0*{code:x};"
    if character in _NAMED:
        escaped += f"|&{_NAMED[character]};"
    return rf"(?:\\*{re.escape(character)}|(?i:{escaped}))"


def hidden(text: str, *, own: bool = False) -> str:
    """Return a text with `<API key>` in place of each secret. Hide before cutting, which could leave half of one.

    Args:
        text: What a server or a library said.
        own: Whether it is our own text or a name, in which a short secret, such as "vllm", is an ordinary word: part of
            an address, or a backend's name. What others said in it was hidden before.
    """
    for secret, pattern in list(_secrets.items()):
        text = text if own and len(secret) < _SHORT_SECRET else pattern.sub("<API key>", text)
    return text


class HiddenError(Exception):
    """Stands for a cause that holds a secret, such as the headers of a request. Its text is the cause's."""


E = TypeVar("E", bound=BaseException)


def hide_causes(error: E) -> E:
    """Replace the causes and contexts of an error that show a secret by a `HiddenError`, and return the error."""
    reached: list[BaseException] = [error]
    for each in reached if _secrets else ():
        for link in ("__cause__", "__context__"):
            inner = getattr(each, link)
            if inner is None or any(inner is one for one in reached):
                continue
            if _shows_secret(inner):
                inner = HiddenError(f"{type(inner).__name__}: {hidden(str(inner))}").with_traceback(inner.__traceback__)
                suppresses = each.__suppress_context__
                setattr(each, link, inner)
                each.__suppress_context__ = suppresses
            reached.append(inner)
    return error


def _shows_secret(error: BaseException) -> bool:
    text = f"{error!r} {error}"
    return hidden(text) != text


def readable(sentence: str) -> str:
    """Return a message without secrets and control characters, at most `LONGEST_ERROR` long: its start and its end."""
    text = printable(hidden(sentence, own=True))
    if len(text) <= LONGEST_ERROR:
        return text
    left_out = f" [... {len(text) - LONGEST_ERROR:,} more characters ...] "
    return text[: LONGEST_ERROR - _TAIL - len(left_out)] + left_out + text[-_TAIL:]


class BackendError(TITOError, EventLoopException):
    """A request to an engine failed. In its message, which may quote the server, the API key is hidden, control
    characters are escaped, and what exceeds 1,000 characters is left out.

    It is an `EventLoopException`, which Strands raises from an agent unchanged. Strands wraps other errors in one, but
    only after an invocation's first model call, so users would need two `except` clauses.

    Attributes:
        backend: Name of the backend.
        status: HTTP status, or None without an answer.
        body: The server's answer, at most 2,000 characters.
        request_id: Our request id, as sent.
        sent: Whether the engine may have started the request, and may still be working on it.
        was_streamed: Whether part of this answer was streamed to the caller, so that its backend cannot send it again.
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
        Exception.__init__(self, readable(sentence))
        self.request_state: Any = {}
        self.backend = backend
        self.status = status
        self.body = hidden(body)[:2000]
        self.request_id = request_id
        self.add_note(place_in_docs(self))

    def advise(self, sentence: str) -> None:
        """Add a sentence to the message."""
        self.args = (readable(f"{self} {sentence}"), *self.args[1:])

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
    """The engine did not answer in time, or a gateway gave up waiting for it (408, 504, 524)."""


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


class AdapterNotInEffectError(BackendError):
    """A LoRA adapter does not change the model as it should. Nothing was sampled with it."""


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


class DamagedAnswerError(ProtocolViolationError):
    """The answer is cut, garbled or of another shape, and says nothing of the server. A probe is sent again."""


class AnswerTooLargeError(ProtocolViolationError):
    """The answer exceeds the size limit for its request; it was read only up to the limit.

    Attributes:
        limit: The bound, in bytes.
    """

    limit: int = 0


class ServerChangedError(BackendError):
    """The server was replaced by another one: its model, version or logprobs differ from those at connect.

    Rollouts that began before cannot continue on it (laws 11 and 15).
    """


class GenerationAbortedError(BackendError):
    """The engine aborted the generation; its partial tokens are discarded."""


class UnknownBackendError(TITOError, ValueError):
    """No installed backend has the name."""


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """Open an `asyncio.TaskGroup` that raises its first error itself, not an `ExceptionGroup` that holds it.

    The first error cancels the group's other tasks.
    """
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
