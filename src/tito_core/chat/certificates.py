"""Certificates made before, on disk: one small file for each template, tokenizer and set of arguments."""

from __future__ import annotations

import hashlib
import os
import tempfile
from functools import cache
from pathlib import Path

import platformdirs

from tito_core.chat.certificate import Certificate


def default_folder() -> Path:
    """Give the folder of certificates: in `TITO_CACHE_DIR` where set, else in the platform's cache directory."""
    chosen = os.environ.get("TITO_CACHE_DIR")
    return (Path(chosen).expanduser() if chosen else Path(platformdirs.user_cache_dir("tito"))) / "certificates"


class CertificateStore:
    """Reads and writes certificates; a folder that cannot be used means that none is kept, and a bad file is none."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or default_folder()

    def key(self, *facts: str) -> str:
        """Give the name under which what holds for these facts, under this very code, is kept."""
        return hashlib.sha256("\0".join((_code(), *facts)).encode("utf-8", "surrogatepass")).hexdigest()[:32]

    def load(self, key: str) -> Certificate | None:
        """Read a certificate, or give None."""
        try:
            return Certificate.from_json((self.folder / f"{key}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def save(self, key: str, certificate: Certificate) -> None:
        """Write a certificate, whole or not at all."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, path = tempfile.mkstemp(dir=self.folder, suffix=".part")
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                stream.write(certificate.to_json())
            os.replace(path, self.folder / f"{key}.json")
        except OSError:
            return  # a cache that cannot be written costs a tenth of a second the next time


@cache
def _code() -> str:
    """Digest this package: certificates hold for the code that made them."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()
