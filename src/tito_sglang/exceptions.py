"""An engine's errors under the names that users of strands-sglang catch; each is one of the core's, too."""

from __future__ import annotations

from tito_core.backend.errors import (
    AuthenticationError,
    BackendError,
    BadRequestError,
    ContextLengthError,
    EngineConnectionError,
    EngineTimeoutError,
    GenerationAbortedError,
    ProtocolViolationError,
    ServerError,
    ThrottledError,
    UnsupportedByServerError,
)


class SGLangClientError(BackendError):
    """The server could not be used as asked."""


class SGLangHTTPError(SGLangClientError):
    """The server answered with an error: `status` and `body` are its own."""


class SGLangContextLengthError(SGLangHTTPError, ContextLengthError):
    """Prompt, or prompt and answer, do not fit; by the server's own sentence, not by a word in it."""


class SGLangThrottledError(SGLangHTTPError, ThrottledError):
    """429 or 503, through every retry."""


class SGLangBadRequestError(SGLangHTTPError, BadRequestError):
    """Another 4xx, which is never sent again."""


class SGLangAuthenticationError(SGLangHTTPError, AuthenticationError):
    """401 or 403."""


class SGLangServerError(SGLangHTTPError, ServerError):
    """Another 5xx, through every retry."""


class SGLangConnectionError(SGLangClientError, EngineConnectionError):
    """Nothing answers, or the connection broke."""


class SGLangTimeoutError(SGLangConnectionError, EngineTimeoutError):
    """No answer in the time allowed; the server was told to abort."""


class SGLangDecodingError(SGLangClientError, ProtocolViolationError):
    """The answer is no JSON, or not what SGLang says."""


class SGLangAbortedError(SGLangClientError, GenerationAbortedError):
    """The server was told to abort, and the answer was discarded."""


class SGLangUnsupportedError(SGLangClientError, UnsupportedByServerError):
    """The server was not started to give what is asked for."""


_KNOWN: tuple[tuple[type[BackendError], type[SGLangClientError]], ...] = (
    (ContextLengthError, SGLangContextLengthError),
    (ThrottledError, SGLangThrottledError),
    (BadRequestError, SGLangBadRequestError),
    (AuthenticationError, SGLangAuthenticationError),
    (ServerError, SGLangServerError),
    (EngineTimeoutError, SGLangTimeoutError),
    (EngineConnectionError, SGLangConnectionError),
    (ProtocolViolationError, SGLangDecodingError),
    (GenerationAbortedError, SGLangAbortedError),
    (UnsupportedByServerError, SGLangUnsupportedError),
)


def known(error: BackendError) -> BackendError:
    """Return an error of the core under its known name, with everything it says."""
    if isinstance(error, SGLangClientError):
        return error
    kind = next((name for of, name in _KNOWN if isinstance(error, of)), SGLangClientError)
    named = kind(*error.args)
    named.__dict__.update(error.__dict__)
    return named.with_traceback(error.__traceback__)
