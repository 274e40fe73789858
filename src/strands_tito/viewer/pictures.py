"""Images of prompts: a ledger holds their digests, a folder their bytes."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from tito_core.ledger.ledger import Ledger

_KINDS = ((b"\x89PNG\r\n\x1a\n", "png"), (b"\xff\xd8\xff", "jpeg"), (b"GIF87a", "gif"), (b"GIF89a", "gif"))
_RIFF, _WEBP = b"RIFF", b"WEBP"


class Pictures:
    """The images in a folder, found by SHA-256. The folder is read when a rollout with images is first shown.

    Args:
        folder: The folder, or None for no images.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self._folder = None if folder is None else Path(folder)
        self._files: dict[bytes, Path] | None = None

    def of(self, ledger: Ledger) -> Mapping[bytes, str]:
        """Return the ledger's images that are in the folder, as `data:` URLs by digest."""
        digests = {span.sha256 for turn in ledger for span in turn.draft.media}
        if not digests or self._folder is None:
            return {}
        if self._files is None:
            files = sorted(path for path in self._folder.rglob("*") if path.is_file())
            self._files = {hashlib.sha256(path.read_bytes()).digest(): path for path in files}
        urls = {digest: _url(self._files[digest].read_bytes()) for digest in digests if digest in self._files}
        return {digest: url for digest, url in urls.items() if url}


def _url(data: bytes) -> str:
    """Return an image as a `data:` URL; empty unless it is a PNG, JPEG, GIF or WebP. An SVG may hold a script."""
    kind = next((kind for start, kind in _KINDS if data.startswith(start)), "")
    if data.startswith(_RIFF) and data[8:12] == _WEBP:
        kind = "webp"
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}" if kind else ""
