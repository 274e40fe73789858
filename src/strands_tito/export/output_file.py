"""A file that takes the place of another when it is complete."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from uuid import uuid4

from tito_core.store.frames import MAGIC

_RECORDS = (MAGIC, b'{"format":"strands-tito/')
"""The first bytes of what `replacing` keeps: a file of ledgers, a ledger as JSON, a collection's description."""

_STDOUT = 1


@contextmanager
def replacing(path: str | PathLike[str]) -> Iterator[Path]:
    """Yield a new file whose content takes the place of `path` when the block ends without an error.

    A link stays: the file that it names is replaced. A pipe, a device and standard output get the content as it is.

    Raises:
        FileNotFoundError: The folder does not exist.
        FileExistsError: The file holds recorded rollouts, as the input of an export does, also through a link.
        IsADirectoryError: It is a folder.
    """
    path = Path(path)
    mode = path.stat().st_mode if path.exists() else None
    if mode is not None and (not stat.S_ISREG(mode) or is_stdout(path)):
        with tempfile.TemporaryDirectory() as folder:
            part = Path(folder, "part")
            yield part
            with part.open("rb") as content, os.fdopen(_opened(path), "wb") as out:
                shutil.copyfileobj(content, out)
        return
    target = path.resolve()
    if mode is not None and _start(target).startswith(_RECORDS):
        raise FileExistsError(f"{path} holds recorded rollouts, which would be lost. Write to another file.")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"The folder {target.parent} does not exist. Create it, or choose another file.")
    part = target.with_name(f".{target.name[:200]}.{uuid4().hex[:8]}.part")  # no name that a file may have
    try:
        yield part
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def or_stdout(path: Path | None) -> Path | None:
    """Return the path of standard output for the name `-`, which a command's option takes, and others unchanged."""
    return Path("/dev/stdout") if str(path) == "-" else path


def is_stdout(path: str | PathLike[str]) -> bool:
    """Return whether a path names the file or pipe that is this process's standard output."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(_STDOUT))
    except OSError:
        return False


def _start(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(max(map(len, _RECORDS)))


def _opened(path: Path) -> int:
    """Open what is not a regular file to write. Standard output is used as it is, so that `>>` appends to its file."""
    return os.dup(_STDOUT) if is_stdout(path) else os.open(path, os.O_WRONLY)
