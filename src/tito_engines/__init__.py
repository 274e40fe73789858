"""Install, start and stop real engines on this machine's CPU."""

from __future__ import annotations

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
