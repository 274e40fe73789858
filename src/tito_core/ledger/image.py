"""An image as it is sent to engines. A ledger stores each once, by the digest of its bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Image:
    """An image.

    Attributes:
        data: The bytes that travel: a PNG, JPEG, GIF or WebP file, upright, opaque and RGB.
        format: "png", "jpeg", "gif" or "webp".
        width: In pixels.
        height: In pixels.
        sha256: Digest of `data`, 32 bytes; computed, so that it cannot differ from the bytes.

    Raises:
        ValueError: `format` is not a name of ASCII letters and digits, as `data:` URLs need.
    """

    data: bytes
    format: str
    width: int
    height: int
    sha256: bytes = field(init=False)

    def __post_init__(self) -> None:
        if not (self.format.isascii() and self.format.isalnum()):
            raise ValueError(f"The format of an image must be a name such as 'png', not {self.format[:40]!r}.")
        object.__setattr__(self, "data", b"".join([self.data]))  # plain: encoders refuse subclasses (numpy.bytes_)
        object.__setattr__(self, "sha256", sha256(self.data).digest())

    def __repr__(self) -> str:
        return f"<Image {self.sha256.hex()[:12]}: {self.format}, {self.width} x {self.height}, {len(self.data)} bytes>"
