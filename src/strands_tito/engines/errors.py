"""What goes wrong when an engine is installed, started or stopped, or a model looked for or built."""

from __future__ import annotations

ANY_SERVER = (
    "Any server will do, on this machine or another: `make demo BASE_URL=http://host:port BACKEND=name`, "
    "or `TITOModel(backend=name, base_url=...)`."
)
"""The way out where an engine cannot be installed."""


class EngineError(RuntimeError):
    """An engine cannot be had; the message says what happened and what to do."""


class UnknownEngine(EngineError):
    """No installed package offers an engine of that name."""


class CannotInstall(EngineError):
    """This machine lacks what the engine needs: its system, its processor, or a Python that has a lock."""


class InstallFailed(EngineError):
    """A step of the installation failed; the environment is left unfinished and is made anew by the next try."""


class StartFailed(EngineError):
    """The server ended, or was not healthy in time; whatever was started has been stopped."""


class Cancelled(EngineError):
    """The caller gave up while we worked; whatever was started has been stopped."""


class ModelUnavailable(RuntimeError):
    """A model or tokenizer cannot be had; the message says what is missing and what to do."""


class UnknownModel(ModelUnavailable):
    """The name is none of ours, no directory, and no `org/name` of a hub."""


class WrongHash(ModelUnavailable):
    """A fetched file is not the one that was pinned."""
