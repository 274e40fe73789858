"""Real engines on this machine's CPU: install one, run one, stop it."""

from __future__ import annotations

from tito_core.engine.errors import Cancelled, CannotInstall, EngineError, InstallFailed, StartFailed, UnknownEngine
from tito_core.engine.install import EngineEnv, ensure
from tito_core.engine.process import RunningEngine, start, stop
from tito_core.engine.progress import Say, on_console
from tito_core.engine.running import bring_up, running, running_sync
from tito_core.engine.spec import EngineSpec, Launch, find, installed

__all__ = [
    "Cancelled",
    "CannotInstall",
    "EngineEnv",
    "EngineError",
    "EngineSpec",
    "InstallFailed",
    "Launch",
    "RunningEngine",
    "Say",
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
