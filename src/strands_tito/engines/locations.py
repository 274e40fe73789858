"""Paths of the per-user cache."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def cache_dir() -> Path:
    """Return the root folder of engines, models, downloads and logs; it may not exist.

    `TITO_CACHE_DIR` if set, else the platform's cache directory for the application name `tito`.
    """
    override = os.environ.get("TITO_CACHE_DIR")
    return Path(override).expanduser() if override else Path(platformdirs.user_cache_dir("tito"))


def engines_dir() -> Path:
    """Return the folder of the engines' environments, one for each engine, lock and Python version."""
    return cache_dir() / "engines"


def logs_dir() -> Path:
    """Return the folder of the servers' logs, one file for each start."""
    return cache_dir() / "logs"


def state_dir() -> Path:
    """Return the folder of state files, one for each background server."""
    return cache_dir() / "state"
