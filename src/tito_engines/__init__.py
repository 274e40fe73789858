"""Install, start and stop real engines on this machine's CPU."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tito_engines.errors import Cancelled, CannotInstall, EngineError, InstallFailed, StartFailed, UnknownEngine
    from tito_engines.install import EngineEnv, ensure
    from tito_engines.process import RunningEngine, bring_up, running, running_sync, start, stop
    from tito_engines.spec import EngineSpec, Launch, find, installed
    from tito_engines.terminal import ProgressCallback, on_console

__all__ = [
    "Cancelled",
    "CannotInstall",
    "EngineEnv",
    "EngineError",
    "EngineSpec",
    "InstallFailed",
    "Launch",
    "ProgressCallback",
    "RunningEngine",
    "StartFailed",
    "UnknownEngine",
    "bring_up",
    "ensure",
    "find",
    "installed",
    "on_console",
    "running",
    "running_sync",
    "start",
    "stop",
]

_MODULES = {
    "errors": ("Cancelled", "CannotInstall", "EngineError", "InstallFailed", "StartFailed", "UnknownEngine"),
    "install": ("EngineEnv", "ensure"),
    "process": ("RunningEngine", "bring_up", "running", "running_sync", "start", "stop"),
    "spec": ("EngineSpec", "Launch", "find", "installed"),
    "terminal": ("ProgressCallback", "on_console"),
}


def __getattr__(name: str) -> object:
    """Import a public name on first use: most users run no engine, and take only a tokenizer."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"tito_engines.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
