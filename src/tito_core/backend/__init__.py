"""The seam to engines: protocol, sampling parameters, errors, transport, and the registry of backends."""

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
    UnknownBackendError,
)
from tito_core.backend.protocol import Backend, EngineInfo, TokenRequest, TokenResponse
from tito_core.backend.registry import create_backend, installed_backends
from tito_core.backend.sampling import Grammar, SamplingParams

__all__ = [
    "AuthenticationError",
    "Backend",
    "BackendError",
    "BadRequestError",
    "ContextLengthError",
    "EngineConnectionError",
    "EngineInfo",
    "EngineTimeoutError",
    "GenerationAbortedError",
    "Grammar",
    "ProtocolViolationError",
    "SamplingParams",
    "ServerError",
    "ThrottledError",
    "TokenRequest",
    "TokenResponse",
    "UnknownBackendError",
    "create_backend",
    "installed_backends",
]
