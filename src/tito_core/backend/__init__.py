"""The interface to engines: protocol, sampling parameters, errors, HTTP transport and the registry of backends."""

from tito_core.backend.abort_policy import AbortPolicy
from tito_core.backend.engine_info import EngineInfo
from tito_core.backend.errors import (
    AnswerTooLargeError,
    AuthenticationError,
    BackendError,
    BadRequestError,
    ContextLengthError,
    EngineConnectionError,
    EngineTimeoutError,
    GenerationAbortedError,
    ProtocolViolationError,
    ServerChangedError,
    ServerError,
    ThrottledError,
    UnknownBackendError,
    UnsupportedByServerError,
    WeightsNotLoadedError,
)
from tito_core.backend.optional_outputs import Capabilities, OptionalOutputs
from tito_core.backend.protocol import (
    Backend,
    EngineAdmin,
    OnChunk,
    RawResponse,
    RawScores,
    TokenChunk,
    TokenRequest,
    TokenResponse,
)
from tito_core.backend.registry import create_backend, installed_backends
from tito_core.backend.resume import generate_resuming
from tito_core.backend.sampling import Grammar, SamplingParams
from tito_core.backend.typed_values import InvalidValueError

__all__ = [
    "AbortPolicy",
    "AnswerTooLargeError",
    "AuthenticationError",
    "Backend",
    "BackendError",
    "BadRequestError",
    "Capabilities",
    "ContextLengthError",
    "EngineAdmin",
    "EngineConnectionError",
    "EngineInfo",
    "EngineTimeoutError",
    "GenerationAbortedError",
    "Grammar",
    "InvalidValueError",
    "OnChunk",
    "OptionalOutputs",
    "ProtocolViolationError",
    "RawResponse",
    "RawScores",
    "SamplingParams",
    "ServerChangedError",
    "ServerError",
    "ThrottledError",
    "TokenChunk",
    "TokenRequest",
    "TokenResponse",
    "UnknownBackendError",
    "UnsupportedByServerError",
    "WeightsNotLoadedError",
    "create_backend",
    "generate_resuming",
    "installed_backends",
]
