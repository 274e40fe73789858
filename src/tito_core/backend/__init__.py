"""The seam to engines: protocol, sampling parameters, errors, transport, and the registry of backends."""

from tito_core.backend.admin import EngineAdmin
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
    UnsupportedByServerError,
    WeightsNotLoadedError,
)
from tito_core.backend.protocol import Backend, EngineInfo, TokenRequest, TokenResponse
from tito_core.backend.registry import create_backend, installed_backends
from tito_core.backend.sampling import Grammar, SamplingParams
from tito_core.backend.wanted import Capabilities, Wanted

__all__ = [
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
    "ProtocolViolationError",
    "SamplingParams",
    "ServerError",
    "ThrottledError",
    "TokenRequest",
    "TokenResponse",
    "UnknownBackendError",
    "UnsupportedByServerError",
    "Wanted",
    "WeightsNotLoadedError",
    "create_backend",
    "installed_backends",
]
