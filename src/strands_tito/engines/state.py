"""Servers that were started to stay: one small file for each engine, so that a later command finds it."""

from __future__ import annotations

import json
import os
from pathlib import Path

from strands_tito.engines import process
from strands_tito.engines.locations import state_dir
from strands_tito.engines.process import RunningEngine


def save(engine: RunningEngine) -> None:
    """Remember it under its engine's name; there is one of each."""
    path = _path(engine.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {name: getattr(engine, name) for name in _FIELDS} | {"log": str(engine.log)}
    aside = path.with_suffix(".part")
    aside.write_text(json.dumps(record) + "\n", encoding="utf-8")
    os.replace(aside, path)


def load(name: str) -> RunningEngine | None:
    """The one that runs now, or None. One whose supervisor has ended is cleared up and forgotten."""
    path = _path(name)
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        engine = RunningEngine(**{**record, "log": Path(record["log"])})
    except (OSError, ValueError, KeyError, TypeError):  # absent, or of another version of this package
        return None
    if process.is_running(engine):
        return engine
    process.stop(engine)
    forget(name)
    return None


def forget(name: str) -> None:
    """Remove what is remembered of it."""
    _path(name).unlink(missing_ok=True)


_FIELDS = ("name", "url", "model", "port", "pid", "created", "grace_s", "mark")


def _path(name: str) -> Path:
    return state_dir() / f"{name}.json"
