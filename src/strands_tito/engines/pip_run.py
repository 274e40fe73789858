"""Install a lock with pip and report progress."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from strands_tito.engines import child_process
from strands_tito.engines.errors import InstallFailed
from strands_tito.engines.progress import ProgressCallback
from strands_tito.engines.spec import EngineSpec, megabytes, pins

_LINE_OF_LOCK = re.compile(r"^(?:Collecting|Processing) (\S+).*\(line (\d+)\)")

HINTS = (
    (r"No space left on device", "Free some disk space, then try again; `TITO_CACHE_DIR` moves the cache elsewhere."),
    (
        # The last alternative is pip's message if its configuration constrains torch.
        r"(?:No matching distribution found for|Could not find a version that satisfies the requirement"
        r"|Cannot install) torch\b",
        "The configured package indexes have no CPU build of torch for this Python, but PyTorch's index of CPU wheels "
        "has. Give its URL with --torch-index URL, TITO_TORCH_INDEX=URL, or `make demo TORCH_INDEX=URL`.",
    ),
    (
        r"ConnectionError|ReadTimeout|Connection broken|Temporary failure in name resolution|NewConnectionError",
        "The package index could not be reached: check the network and pip's proxy settings. pip keeps what it has "
        "already downloaded.",
    ),
    (
        r"No matching distribution found",
        "The configured package indexes lack a pinned package: check pip's index settings.",
    ),
)


@dataclass
class PipProgress:
    """Progress of pip, from its output and the folders that it fills."""

    name: str
    packages: int
    total_megabytes: float | None
    downloads: Path
    """Folder of pip's temporary files, including the archives that it downloads."""
    site: Path
    """The environment's `lib` folder."""
    seen: set[int] = field(default_factory=set)
    local_megabytes: float = 0.0
    current: str = ""
    before: frozenset[str] | None = None
    """Packages that existed when pip began to install; None while it downloads."""

    def take(self, line: str) -> None:
        """Process one line of pip's output."""
        if found := _LINE_OF_LOCK.match(line):
            self.seen.add(int(found[2]))
            self.current = re.split(r"==|-(?=\d)", Path(found[1]).name)[0]
            if Path(found[1]).is_file():  # pip does not copy files of a local folder
                self.local_megabytes += Path(found[1]).stat().st_size / 1e6
        elif line.startswith("Installing collected packages"):
            self.before = self._present()

    def report(self, report: ProgressCallback) -> None:
        """Report the current progress."""
        if self.before is not None:
            done = len(self._present() - self.before)
            report(f"{self.name}: installing package {done} of {self.packages}", done / self.packages)
            return
        here = self.local_megabytes + megabytes_below(self.downloads)
        of = f" of about {self.total_megabytes:.0f}" if self.total_megabytes else ""
        part = here / self.total_megabytes if self.total_megabytes else len(self.seen) / self.packages
        packages = f"{len(self.seen)} of {self.packages}"
        report(f"{self.name}: fetching package {packages}, {here:.0f}{of} MB ({self.current})", min(part, 1.0))

    def _present(self) -> frozenset[str]:
        return frozenset(path.name for path in self.site.glob("*/site-packages/*.dist-info"))


def install(
    spec: EngineSpec,
    python: Path,
    requirements: Path,
    index: str | None,
    report: ProgressCallback,
    cancel: threading.Event,
    minor: str,
) -> None:
    """Write the lock to `requirements`, at the root of `python`'s environment, and `pip install --no-deps -r` it.

    Raises:
        InstallFailed: pip failed; has its last lines of output.
        Cancelled: `cancel` was set.
    """
    pinned = pins(spec.locks[minor])
    if not pinned:
        return
    # torch first: an index without its CPU build is then noticed at once, not after the other downloads.
    pinned.sort(key=lambda pin: not pin.startswith("torch=="))
    requirements.write_text("\n".join(pinned) + "\n", encoding="utf-8")
    # Not compiled: a server imports a third of the installed modules, and pip would compile all of them.
    argv = [str(python), "-m", "pip", "install", "--no-deps", "--no-input", "--disable-pip-version-check",
            "--no-compile", "--progress-bar", "off", "-r", str(requirements)]  # fmt: skip
    if index:
        argv += ["--extra-index-url", index]
    downloads = requirements.parent / "downloads"
    downloads.mkdir()
    progress = PipProgress(
        spec.name, len(pinned), megabytes(spec.locks[minor], "download"), downloads, requirements.parent / "lib"
    )
    last: deque[str] = deque(maxlen=200)

    def on_line(line: str) -> None:
        if line:
            last.append(line)
            progress.take(line)
        progress.report(report)

    env = child_process.environment(python, {"TMPDIR": str(downloads)})
    status = child_process.run(argv, env, on_line, cancel)
    if status != 0:
        raise InstallFailed(explain(spec, status, list(last)))
    shutil.rmtree(downloads, ignore_errors=True)


def megabytes_below(folder: Path) -> float:
    """Return the size of all files below a folder in MB; 0 if it does not exist."""
    total = 0
    for directory, _, names in os.walk(folder):  # unlike rglob, tolerates folders that disappear meanwhile
        for name in names:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(directory, name)).st_size
    return total / 1e6


def explain(spec: EngineSpec, status: int, lines: list[str]) -> str:
    """Return the error message of a failed installation: status, hint and pip's last lines."""
    text = "\n".join(lines)
    hint = next((hint for pattern, hint in HINTS if re.search(pattern, text)), "Try again; pip keeps its downloads.")
    shown = "\n".join([f"  {line}" for line in lines if not line.startswith("WARNING")][-12:])
    return f"pip could not install {spec.title} (exit status {status}). {hint} Last lines of output:\n{shown}"
