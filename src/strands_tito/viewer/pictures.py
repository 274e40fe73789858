"""Images of prompts: a ledger holds them, or only their digests and a folder their bytes."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from tito_core.ledger.image import Image
from tito_core.ledger.ledger import Ledger

_KINDS = ((b"\x89PNG\r\n\x1a\n", "png"), (b"\xff\xd8\xff", "jpeg"), (b"GIF87a", "gif"), (b"GIF89a", "gif"))
_RIFF, _WEBP = b"RIFF", b"WEBP"


class Pictures:
    """The images of ledgers, and those in a folder, found by SHA-256. It is read when a rollout first needs it.

    Args:
        folder: The folder, or None for none.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self._folder = None if folder is None else Path(folder)
        self._files: dict[bytes, Path] | None = None

    def of(self, ledger: Ledger) -> Mapping[bytes, str]:
        """Return the ledger's images as `data:` URLs by digest: those that it holds, and those in the folder."""
        urls = dict(urls_of(ledger.images.values()))
        missing = {span.sha256 for turn in ledger for span in turn.draft.media} - urls.keys()
        if missing and self._folder is not None:
            files = self._read(self._folder)
            urls |= {digest: _url(files[digest].read_bytes()) for digest in missing if digest in files}
        return {digest: url for digest, url in urls.items() if url}

    def _read(self, folder: Path) -> Mapping[bytes, Path]:
        if self._files is None:
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            self._files = {hashlib.sha256(path.read_bytes()).digest(): path for path in files}
        return self._files


def urls_of(images: Iterable[Image]) -> Mapping[bytes, str]:
    """Return images as `data:` URLs by digest; an image that is no PNG, JPEG, GIF or WebP is left out."""
    urls = {image.sha256: _url(image.data) for image in images}
    return {digest: url for digest, url in urls.items() if url}


def _url(data: bytes) -> str:
    """Return an image as a `data:` URL; empty unless it is a PNG, JPEG, GIF or WebP. An SVG may hold a script."""
    kind = next((kind for start, kind in _KINDS if data.startswith(start)), "")
    if data.startswith(_RIFF) and data[8:12] == _WEBP:
        kind = "webp"
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}" if kind else ""
