"""What an engine is to us: where it runs, what its environment holds, how it is started.

A package offers an engine by naming an `EngineSpec` in the entry-point group `tito.engines`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path

from strands_tito.engines.errors import UnknownEngine

GROUP = "tito.engines"

RECIPE = 1
"""Version of what `install` does with a spec; part of each environment's key, so that a change makes new ones."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One start of a server."""

    python: Path
    """The environment's interpreter."""
    model_path: Path
    model_name: str
    """What the server calls the model: the `model` of a request."""
    host: str
    port: int
    server_args: Sequence[str] = ()
    """More arguments for the server, after ours, so that they win."""
    dev_mode: bool = False
    """Open the endpoints that pause the server and load weights, where the engine keeps them shut by default."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine that this package can install and run on a CPU."""

    name: str
    """Short: `vllm`. The name of its environment, its state and its logs."""
    title: str
    """With its version, for people: `vLLM 0.32.0`."""
    locks: Mapping[str, str]
    """Python minor version (`"3.11"`) -> lock: a requirements file that pins every package, transitive ones too.

    Comment lines `# download: 262 MB` and `# disk: 2000 MB` say how much there is to fetch, and how much room it all
    takes at most.
    """
    command: Callable[[Launch], list[str]]
    env: Callable[[Launch], Mapping[str, str]]
    """Environment variables for the server, over those of this process."""
    import_check: str
    """A statement that the finished environment must be able to run."""
    check_env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables for `import_check`."""
    standins: Path | None = None
    """A folder of modules of our own that the environment gets on its path."""
    standin_startup: str = ""
    """A module of that folder to import at the start of every Python of the environment, or empty."""
    systems: frozenset[tuple[str, str]] = frozenset({("Linux", "x86_64")})
    """(system, machine) pairs as `platform` names them."""
    health_path: str = "/health"
    warm_up: Callable[[Launch], tuple[str, Mapping[str, object]]] | None = None
    """Path and JSON body of a POST sent once the server is healthy, so that the first real request is not slow."""
    ready_timeout_s: float = 300.0
    grace_s: float = 8.0
    """How long the server may take to end by itself before it is killed."""
    processed_logprobs: bool | None = None
    """Whether logprobs include the temperature on servers that a trainer starts; None where an option decides."""

    def key(self, minor: str) -> str:
        """Twelve hex digits that name the environment for that Python: equal exactly when its contents would be."""
        lock = "\n".join(pins(self.locks[minor]))
        digest = hashlib.sha256(f"{RECIPE}\0{minor}\0{lock}\0{self.standin_startup}\0".encode())
        for path in standin_files(self.standins):
            digest.update(f"{path.relative_to(self.standins or path)}\0".encode() + path.read_bytes() + b"\0")
        return digest.hexdigest()[:12]


def pins(lock: str) -> list[str]:
    """The requirements of a lock's text, one a line."""
    return [line for line in lock.splitlines() if line.strip() and not line.startswith("#")]


def megabytes(lock: str, what: str) -> float | None:
    """The figure in a lock's comment line `# what: N MB`, or None without one."""
    found = re.search(rf"^# {what}: (\d+) MB", lock, re.MULTILINE)
    return float(found[1]) if found else None


def standin_files(folder: Path | None) -> list[Path]:
    """The files of a stand-in folder, in a fixed order, without what Python itself leaves there."""
    if folder is None:
        return []
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix == ".py")


def names() -> list[str]:
    """Return the names of the engines that installed packages offer."""
    return sorted({entry.name for entry in entry_points(group=GROUP)})


def installed() -> dict[str, EngineSpec]:
    """The engines that installed packages offer, by name."""
    return {entry.name: entry.load() for entry in entry_points(group=GROUP)}


def find(name: str) -> EngineSpec:
    """The engine of that name. Raises UnknownEngine, which lists those there are."""
    for entry in entry_points(group=GROUP):
        if entry.name == name:
            spec = entry.load()
            if not isinstance(spec, EngineSpec):
                raise UnknownEngine(f"The entry point {entry.value} is a {type(spec).__name__}, not an EngineSpec.")
            return spec
    known = names()
    offered = f"Installed: {', '.join(known)}" if known else "None is installed: `pip install strands-tito` offers two"
    raise UnknownEngine(f"There is no engine {name!r}. {offered}.")
