"""Run pip on a lock and tell how far it is."""

from __future__ import annotations

import queue
import re
import subprocess
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from tito_core.engine import supervised
from tito_core.engine.errors import Cancelled, InstallFailed
from tito_core.engine.progress import Say
from tito_core.engine.spec import EngineSpec

_LINE_OF_LOCK = re.compile(r"^(?:Collecting|Processing) (\S+).*\(line (\d+)\)")
_FETCHED = re.compile(r"(?:Downloading|Using cached) (\S+) \(([\d.]+) ?(bytes|kB|MB|GB)\)")
_MEGABYTES = {"bytes": 1e-6, "kB": 1e-3, "MB": 1.0, "GB": 1e3}
_TOTAL = re.compile(r"^# download: (\d+) MB", re.MULTILINE)

HINTS = (
    (r"No space left on device", "Free some disk space, then try again; `TITO_CACHE_DIR` moves the cache elsewhere."),
    (
        r"(?:No matching distribution found for|Could not find a version that satisfies the requirement) torch\b",
        "The configured package indexes have no CPU build of torch for this Python. Torch's own index has: give its "
        "address with --torch-index URL or in TITO_TORCH_INDEX.",
    ),
    (
        r"ConnectionError|ReadTimeout|Connection broken|Temporary failure in name resolution|NewConnectionError",
        "The package index was not reached: look at the network, and at pip's proxy settings. What was downloaded "
        "already is kept by pip.",
    ),
    (
        r"No matching distribution found",
        "The configured package indexes lack a pinned package: look at pip's index settings.",
    ),
)


@dataclass
class Tally:
    """How far pip is, read off its output."""

    packages: int
    total_megabytes: float | None
    seen: set[int] = field(default_factory=set)
    megabytes: float = 0.0
    current: str = ""
    installing: bool = False

    def take(self, line: str) -> None:
        """Count one line of pip's output."""
        if found := _LINE_OF_LOCK.match(line):
            self.seen.add(int(found[2]))
            self.current = Path(found[1]).name
            if Path(found[1]).is_file():  # from a local folder: pip names the file and not its size
                self.megabytes += Path(found[1]).stat().st_size / 1e6
        elif found := _FETCHED.search(line):
            self.megabytes += float(found[2]) * _MEGABYTES[found[3]]
        elif line.startswith("Installing collected packages"):
            self.installing = True

    def say(self, name: str, present: int, say: Say) -> None:
        """Tell it. `present` counts the packages that are in the environment."""
        if self.installing:
            done = min(present, self.packages)
            say(f"{name}: installing package {done} of {self.packages}", done / self.packages)
            return
        of = f" of about {self.total_megabytes:.0f}" if self.total_megabytes else ""
        text = f"{name}: fetching package {len(self.seen)} of {self.packages}, {self.megabytes:.0f}{of} MB ({self.current})"
        size = self.megabytes / self.total_megabytes if self.total_megabytes else len(self.seen) / self.packages
        say(text, min(size, 1.0))


def install(
    spec: EngineSpec, python: Path, lock: Path, index: str | None, say: Say, cancel: threading.Event
) -> None:
    """`pip install --no-deps -r lock` in `python`'s environment. Raises InstallFailed with pip's last lines, Cancelled."""
    text = lock.read_text(encoding="utf-8")
    pins = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if not pins:
        return
    total = _TOTAL.search(text)
    tally = Tally(len(pins), float(total[1]) if total else None)
    argv = [str(python), "-m", "pip", "install", "--no-deps", "--no-input", "--disable-pip-version-check",
            "--progress-bar", "off", "-r", str(lock)]  # fmt: skip
    if index:
        argv += ["--extra-index-url", index]
    last: deque[str] = deque(maxlen=200)
    site = lock.parent / "lib"
    already = _count(site)
    process = supervised.popen(argv, supervised.environment(python, {}), subprocess.PIPE)
    try:
        assert process.stdout is not None
        for line in _lines(process.stdout):
            if cancel.is_set():
                raise Cancelled(f"The installation of {spec.name} was cancelled.")
            if line:
                last.append(line)
                tally.take(line)
            tally.say(spec.name, _count(site) - already if tally.installing else 0, say)
        status = process.wait()
    finally:
        process.terminate()
        process.wait()
        process.stdout.close() if process.stdout else None
        process.stdin.close() if process.stdin else None
    if status != 0:
        raise InstallFailed(_explain(spec, status, list(last)))


def _count(site: Path) -> int:
    return sum(1 for _ in site.glob("*/site-packages/*.dist-info"))


def _lines(stream: IO[bytes]) -> Iterator[str]:
    """The stream's lines as they come, and an empty one for each half second without."""
    arrived: queue.Queue[bytes | None] = queue.Queue()

    def read() -> None:
        for line in stream:
            arrived.put(line)
        arrived.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = arrived.get(timeout=0.5)
        except queue.Empty:
            yield ""
            continue
        if line is None:
            return
        yield line.decode(errors="replace").rstrip()


def _explain(spec: EngineSpec, status: int, lines: list[str]) -> str:
    text = "\n".join(lines)
    hint = next((hint for pattern, hint in HINTS if re.search(pattern, text)), "Try again; what pip fetched is kept.")
    shown = "\n".join(f"  {line}" for line in lines[-12:])
    return f"pip could not install {spec.title} (status {status}). {hint} Its last lines:\n{shown}"
