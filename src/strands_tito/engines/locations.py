"""Where things that are built once per user live."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def cache_dir() -> Path:
    """The root of everything that can be built again: engines, models, downloads.

    `TITO_CACHE_DIR` where set, else the platform's cache directory for the application name `tito`.
    The directory may not exist yet.
    """
    chosen = os.environ.get("TITO_CACHE_DIR")
    return Path(chosen).expanduser() if chosen else Path(platformdirs.user_cache_dir("tito"))


def engines_dir() -> Path:
    """One environment for each engine, lock and Python version."""
    return cache_dir() / "engines"


def logs_dir() -> Path:
    """What the servers print, one file a start."""
    return cache_dir() / "logs"


def state_dir() -> Path:
    """One file for each server that was started to stay."""
    return cache_dir() / "state"
