"""`EngineSpec`: how to install and start an engine.

A package offers an engine as an entry point of the group `tito.engines` that names an `EngineSpec`.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import platformdirs

from tito_core.entry_points import load, offered
from tito_core.ledger.errors import how_to_install
from tito_engines.errors import UnknownEngine

GROUP = "tito.engines"

TORCHVISION_STANDIN = Path(__file__).with_name("standins")
"""A folder for `EngineSpec.standins`: its `tito_torchvision_ops` lets torchvision be imported without its operators."""

RECIPE = 2
"""Version of the installation procedure. It is part of each environment's key; raise it to install everything again."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Arguments of one start of a server."""

    python: Path
    """The environment's interpreter."""
    model_path: Path
    model_name: str
    """The model's name on the server, which is `model` in requests."""
    host: str
    port: int
    server_args: Sequence[str] = ()
    """Extra arguments for the server, after ours, so that they override them."""
    dev_mode: bool = False
    """Enable the endpoints that pause the server and load weights, if they are disabled by default."""

    @property
    def images(self) -> bool:
        """Whether the model reads images: its folder holds the settings of an image processor."""
        return (self.model_path / "preprocessor_config.json").is_file()


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine that can be installed and run on a CPU."""

    name: str
    """Short name, such as `vllm`; part of the names of its environment, state and logs."""
    title: str
    """Name and version for messages: `vLLM 0.32.0`."""
    locks: Mapping[str, str]
    """Python minor version (`"3.11"`) -> lock: a requirements file that pins every package, including transitive ones.

    Its comment lines `# download: 262 MB` and `# disk: 2000 MB` give the size of the download and the disk space.
    """
    command: Callable[[Launch], list[str]]
    env: Callable[[Launch], Mapping[str, str]]
    """Environment variables for the server, in addition to those of this process."""
    import_check: str
    """A statement that checks the finished environment."""
    check_env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables for `import_check`."""
    standins: Sequence[Path] = ()
    """Folders of replacement modules to put on the environment's path."""
    standin_startup: str = ""
    """A module of those folders that every Python of the environment imports at its start, or empty."""
    systems: frozenset[tuple[str, str]] = frozenset({("Linux", "x86_64")})
    """Supported (system, machine) pairs, named as by `platform`."""
    health_path: str = "/health"
    warm_up: Callable[[Launch], tuple[str, Mapping[str, object]]] | None = None
    """Path and JSON body of a POST to send when the server is healthy, so that the first real request is not slow."""
    ready_timeout_s: float = 300.0
    grace_s: float = 8.0
    """Seconds between SIGTERM and SIGKILL when the server is stopped."""
    processed_logprobs: bool | None = None
    """Whether logprobs include the temperature on servers that a trainer starts; None if an option decides."""
    sampling_names: Mapping[str, str] = field(default_factory=dict)
    """The engine's names of `min_new_tokens`, `seed` and `stop`, as far as servers that a trainer starts apply them."""

    def key(self, minor: str) -> str:
        """Return twelve hex digits that identify the environment's contents for a Python minor version."""
        lock = "\n".join(pins(self.locks[minor]))
        digest = hashlib.sha256(f"{RECIPE}\0{minor}\0{lock}\0{self.standin_startup}\0".encode())
        for name, path in standin_files(self.standins):
            digest.update(f"{name}\0".encode() + path.read_bytes() + b"\0")
        return digest.hexdigest()[:12]


def pins(lock: str) -> list[str]:
    """Return the requirement lines of a lock."""
    return [line for line in lock.splitlines() if line.strip() and not line.startswith("#")]


def megabytes(lock: str, what: str) -> float | None:
    """Return N of a lock's comment line `# what: N MB`, or None."""
    found = re.search(rf"^# {what}: (\d+) MB", lock, re.MULTILINE)
    return float(found[1]) if found else None


def standin_files(folders: Sequence[Path]) -> list[tuple[Path, Path]]:
    """Return the Python files of stand-in folders in a fixed order: the path below its folder, and the path."""
    found = [(path.relative_to(folder), path) for folder in folders for path in folder.rglob("*.py")]
    return sorted((name, path) for name, path in found if path.is_file())


def names() -> list[str]:
    """Return the names of the engines that installed packages offer."""
    return offered(GROUP)


def installed() -> dict[str, EngineSpec]:
    """Return the engines that installed packages offer, by name."""
    return {name: find(name) for name in names()}


def find(name: str) -> EngineSpec:
    """Return an engine by its name.

    Raises:
        UnknownEngine: The engine is unknown; the message lists the available ones.
        BrokenEntryPointError: The package that offers it cannot be imported.
    """
    spec: EngineSpec | None = load(GROUP, name, EngineSpec)
    if spec is None:
        available = ", ".join(names()) or f"none, {how_to_install()}"
        raise UnknownEngine(f"Unknown engine {name!r}. Available: {available}.")
    return spec


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
