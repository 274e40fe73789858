"""Install, start and stop real engines on this machine's CPU."""

from __future__ import annotations

from strands_tito.engines.errors import Cancelled, CannotInstall, EngineError, InstallFailed, StartFailed, UnknownEngine
from strands_tito.engines.install import EngineEnv, ensure
from strands_tito.engines.process import RunningEngine, start, stop
from strands_tito.engines.progress import ProgressCallback, on_console
from strands_tito.engines.running import bring_up, running, running_sync
from strands_tito.engines.spec import EngineSpec, Launch, find, installed

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
