"""The engine's errors by the names that users of strands-sglang catch. Each is also an error of the core."""

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
    """A request to the server failed."""


class SGLangHTTPError(SGLangClientError):
    """The server answered with an error; `status` and `body` hold its answer."""


class SGLangContextLengthError(SGLangHTTPError, ContextLengthError):
    """The prompt, or prompt and answer, exceed the context length or the server's memory."""


class SGLangThrottledError(SGLangHTTPError, ThrottledError):
    """429 or 503 on every try."""


class SGLangBadRequestError(SGLangHTTPError, BadRequestError):
    """Another 4xx. Only a 408 is retried."""


class SGLangAuthenticationError(SGLangHTTPError, AuthenticationError):
    """401 or 403."""


class SGLangServerError(SGLangHTTPError, ServerError):
    """Another 5xx on every try."""


class SGLangConnectionError(SGLangClientError, EngineConnectionError):
    """No connection, or the connection broke."""


class SGLangTimeoutError(SGLangConnectionError, EngineTimeoutError):
    """No answer within the timeout on every try. The request was aborted on the server."""


class SGLangDecodingError(SGLangClientError, ProtocolViolationError):
    """The answer is not JSON, or not an answer of SGLang."""


class SGLangAbortedError(SGLangClientError, GenerationAbortedError):
    """The server aborted the generation, and the answer was discarded."""


class SGLangUnsupportedError(SGLangClientError, UnsupportedByServerError):
    """The server was not started with the option that the request needs."""


_TYPES: tuple[tuple[type[BackendError], type[SGLangClientError]], ...] = (
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


def as_sglang_error(error: BackendError) -> BackendError:
    """Return an error of the core as its SGLang type, with the same message and attributes."""
    if isinstance(error, SGLangClientError):
        return error
    kind = next((sglang_type for core_type, sglang_type in _TYPES if isinstance(error, core_type)), SGLangClientError)
    if isinstance(error, EngineTimeoutError) and error.status is not None:
        kind = SGLangHTTPError  # 408 and 504, by which a gateway gave up
    translated = kind(*error.args)
    translated.__dict__.update(error.__dict__)
    return translated.with_traceback(error.__traceback__)
