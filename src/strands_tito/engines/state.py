"""State of background servers: one file for each engine, so that later commands find the server."""

from __future__ import annotations

import json
import os
from pathlib import Path

from strands_tito.engines import process
from strands_tito.engines.locations import state_dir
from strands_tito.engines.process import RunningEngine


def save(engine: RunningEngine) -> None:
    """Save a server under its engine's name; there is one server for each engine."""
    path = _path(engine.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {name: getattr(engine, name) for name in _FIELDS} | {"log": str(engine.log)}
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(record) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def load(name: str) -> RunningEngine | None:
    """Return an engine's running server, or None. If its supervisor has ended, stop the rest and delete the file."""
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
    """Delete an engine's state file."""
    _path(name).unlink(missing_ok=True)


_FIELDS = ("name", "url", "model", "port", "pid", "created", "grace_s", "mark", "tokenizer")


def _path(name: str) -> Path:
    return state_dir() / f"{name}.json"
