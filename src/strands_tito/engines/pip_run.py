"""Run pip on a lock and tell how far it is."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from strands_tito.engines import supervised
from strands_tito.engines.errors import InstallFailed
from strands_tito.engines.progress import Say
from strands_tito.engines.spec import EngineSpec, megabytes, pins

_LINE_OF_LOCK = re.compile(r"^(?:Collecting|Processing) (\S+).*\(line (\d+)\)")

HINTS = (
    (r"No space left on device", "Free some disk space, then try again; `TITO_CACHE_DIR` moves the cache elsewhere."),
    (
        # The last are pip's words where its configuration constrains torch, whatever the indexes have.
        r"(?:No matching distribution found for|Could not find a version that satisfies the requirement"
        r"|Cannot install) torch\b",
        "The configured package indexes have no CPU build of torch for this Python. Torch's own index has: give its "
        "address with --torch-index URL, in TITO_TORCH_INDEX, or as `make demo TORCH_INDEX=URL`.",
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
    """How far pip is: read off its output, and off the folders that it fills."""

    name: str
    packages: int
    total_megabytes: float | None
    downloads: Path
    """Where pip's temporary files are, the archives that it fetches among them."""
    site: Path
    """`lib` of the environment."""
    seen: set[int] = field(default_factory=set)
    local_megabytes: float = 0.0
    current: str = ""
    before: frozenset[str] | None = None
    """The packages that were there when pip began to install, or None while it fetches."""

    def take(self, line: str) -> None:
        """Count one line of pip's output."""
        if found := _LINE_OF_LOCK.match(line):
            self.seen.add(int(found[2]))
            self.current = re.split(r"==|-(?=\d)", Path(found[1]).name)[0]
            if Path(found[1]).is_file():  # pip uses a file of a local folder where it is
                self.local_megabytes += Path(found[1]).stat().st_size / 1e6
        elif line.startswith("Installing collected packages"):
            self.before = self._present()

    def say(self, say: Say) -> None:
        """Tell it."""
        if self.before is not None:
            done = len(self._present() - self.before)
            say(f"{self.name}: installing package {done} of {self.packages}", done / self.packages)
            return
        here = self.local_megabytes + megabytes_below(self.downloads)
        of = f" of about {self.total_megabytes:.0f}" if self.total_megabytes else ""
        part = here / self.total_megabytes if self.total_megabytes else len(self.seen) / self.packages
        packages = f"{len(self.seen)} of {self.packages}"
        say(f"{self.name}: fetching package {packages}, {here:.0f}{of} MB ({self.current})", min(part, 1.0))

    def _present(self) -> frozenset[str]:
        return frozenset(path.name for path in self.site.glob("*/site-packages/*.dist-info"))


def install(
    spec: EngineSpec, python: Path, requirements: Path, index: str | None, say: Say, cancel: threading.Event, minor: str
) -> None:
    """Write the lock to `requirements`, at the root of `python`'s environment, and `pip install --no-deps -r` it.

    Raises InstallFailed with pip's last lines, Cancelled.
    """
    wanted = pins(spec.locks[minor])
    if not wanted:
        return
    # What an index may lack comes first: then that is known in a second, not after all the others are fetched.
    wanted.sort(key=lambda pin: not pin.startswith("torch=="))
    requirements.write_text("\n".join(wanted) + "\n", encoding="utf-8")
    # Byte code is left to the first import: a server needs a third of what is installed, and pip compiles all of it.
    argv = [str(python), "-m", "pip", "install", "--no-deps", "--no-input", "--disable-pip-version-check",
            "--no-compile", "--progress-bar", "off", "-r", str(requirements)]  # fmt: skip
    if index:
        argv += ["--extra-index-url", index]
    downloads = requirements.parent / "downloads"
    downloads.mkdir()
    tally = Tally(
        spec.name, len(wanted), megabytes(spec.locks[minor], "download"), downloads, requirements.parent / "lib"
    )
    last: deque[str] = deque(maxlen=200)

    def on_line(line: str) -> None:
        if line:
            last.append(line)
            tally.take(line)
        tally.say(say)

    env = supervised.environment(python, {"TMPDIR": str(downloads)})
    status = supervised.run(argv, env, on_line, cancel)
    if status != 0:
        raise InstallFailed(explain(spec, status, list(last)))
    shutil.rmtree(downloads, ignore_errors=True)


def megabytes_below(folder: Path) -> float:
    """The size of the files in it; 0 where there is none."""
    total = 0
    for directory, _, names in os.walk(folder):  # which, unlike rglob, bears folders that vanish while it looks
        for name in names:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(directory, name)).st_size
    return total / 1e6


def explain(spec: EngineSpec, status: int, lines: list[str]) -> str:
    """What to do about a failed installation, and pip's last lines."""
    text = "\n".join(lines)
    hint = next((hint for pattern, hint in HINTS if re.search(pattern, text)), "Try again; what pip fetched is kept.")
    shown = "\n".join([f"  {line}" for line in lines if not line.startswith("WARNING")][-12:])
    return f"pip could not install {spec.title} (status {status}). {hint} Its last lines:\n{shown}"
