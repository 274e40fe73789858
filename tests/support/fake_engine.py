"""A fake engine for tests, run by the same code as a real one; its environment is created in a tenth of a second."""

from __future__ import annotations

import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import psutil

from tito_engines import EngineSpec, Launch

SERVER = Path(__file__).with_name("fake_server.py")
MINOR = f"{sys.version_info.major}.{sys.version_info.minor}"

Variant = Callable[..., EngineSpec]


def command(launch: Launch) -> list[str]:
    return [str(launch.python), str(SERVER), str(launch.port), launch.model_name, *launch.server_args]


def env(launch: Launch) -> dict[str, str]:
    return {"FAKE_DEV_MODE": str(launch.dev_mode)}


FAKE = EngineSpec(
    name="fake",
    title="Fake 1.0",
    locks={MINOR: "# nothing to install\n"},
    command=command,
    env=env,
    import_check="import http.server",
    warm_up=lambda launch: ("/warm", {"model": launch.model_name}),
    ready_timeout_s=30,
    grace_s=0.2,
)


def processes_of(cache: Path) -> list[psutil.Process]:
    """Return the live processes that run a Python of this cache, wherever they are in the process tree."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if words and words[0].startswith(str(cache)) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def wait_until_gone(cache: Path) -> None:
    """Wait until no process of the cache's Pythons is left."""
    while processes_of(cache):
        time.sleep(0.05)


def wheel(folder: Path, name: str, version: str) -> None:
    """Write a wheel with one module, `name`, which has a `VERSION`, to the folder."""
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}.py", f"VERSION = {version!r}\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
