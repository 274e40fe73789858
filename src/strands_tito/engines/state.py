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
    _write(engine, has_ended=False)


def load(name: str) -> RunningEngine | None:
    """Return an engine's running server, or None. If its supervisor has ended, stop the rest and remember that."""
    engine, has_ended = _read(name)
    if engine is None or has_ended:
        return None
    if process.is_running(engine):
        return engine
    process.stop(engine)
    _write(engine, has_ended=True)
    return None


def ended(name: str) -> RunningEngine | None:
    """Return an engine's last server if it was killed or crashed, and `forget` was not called; call `load` before."""
    engine, has_ended = _read(name)
    return engine if has_ended else None


def _write(engine: RunningEngine, *, has_ended: bool) -> None:
    path = _path(engine.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {name: getattr(engine, name) for name in _FIELDS} | {"log": str(engine.log), "ended": has_ended}
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(record) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def _read(name: str) -> tuple[RunningEngine | None, bool]:
    try:
        record = json.loads(_path(name).read_text(encoding="utf-8"))
        has_ended = record.pop("ended", False)
        record |= {"log": Path(record["log"]), "server_args": tuple(record.get("server_args", ()))}
        return RunningEngine(**record), has_ended
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # absent, or of another version of this package
        return None, False


def forget(name: str) -> None:
    """Delete an engine's state file."""
    _path(name).unlink(missing_ok=True)


_FIELDS = ("name", "url", "model", "port", "pid", "created", "grace_s", "mark", "tokenizer", "server_args", "dev_mode")


def _path(name: str) -> Path:
    return state_dir() / f"{name}.json"
