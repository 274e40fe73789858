"""Errors of installing, starting and stopping engines, and of fetching and building models."""

from __future__ import annotations

from tito_core.ledger.errors import TITOError

ANY_SERVER = (
    "Or use a server that runs elsewhere: `make demo BASE_URL=http://host:port BACKEND=name`, "
    "or `TITOModel(backend=name, base_url=...)`."
)
"""The alternative if an engine cannot be installed."""


class EngineError(TITOError, RuntimeError):
    """An engine cannot be installed, started or stopped."""


class UnknownEngine(EngineError):
    """No installed package offers an engine of that name."""


class CannotInstall(EngineError):
    """The engine does not support this machine, no supported Python was found, or our extra is not installed."""


class InstallFailed(EngineError):
    """A step of the installation failed. What it installed is removed; pip keeps its downloads."""


class StartFailed(EngineError):
    """The server ended or did not become healthy in time. Its processes have been stopped."""


class Cancelled(EngineError):
    """The caller cancelled the operation. Its processes have been stopped."""


class ModelUnavailable(TITOError, RuntimeError):
    """A model or tokenizer cannot be fetched or built."""


class UnknownModel(ModelUnavailable):
    """The name is not a built-in model, a directory or `org/name` of a model hub."""


class WrongHash(ModelUnavailable):
    """A fetched file does not have the pinned hash."""
