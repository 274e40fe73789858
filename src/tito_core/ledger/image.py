"""An image as it is sent to engines. A ledger stores each once, by the digest of its bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256

_PNG = b"\x89PNG\r\n\x1a\n"
_HEADER = _PNG + b"\0\0\0\rIHDR"
"""How a PNG file begins; its width and height follow, 4 bytes each."""


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
        ValueError: `format` is not a name of ASCII letters and digits, as `data:` URLs need, or the bytes are a PNG of
            another size or without its header.
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
        if self.data.startswith(_PNG):
            if not self.data.startswith(_HEADER) or len(self.data) < len(_HEADER) + 8:
                raise ValueError(
                    f"The bytes begin as a PNG file, but its header is incomplete or wrong: {self.data[:24].hex()}. "
                    "Give the whole file."
                )
            size = tuple(int.from_bytes(self.data[at : at + 4]) for at in (len(_HEADER), len(_HEADER) + 4))
            if (self.format, self.width, self.height) != ("png", *size):
                raise ValueError(
                    f"The bytes are a PNG of {size[0]} x {size[1]} pixels, but the image is described as "
                    f"{self.format} of {self.width} x {self.height}. Correct the format and size."
                )
        object.__setattr__(self, "sha256", sha256(self.data).digest())

    def __repr__(self) -> str:
        return f"<Image {self.sha256.hex()[:12]}: {self.format}, {self.width} x {self.height}, {len(self.data)} bytes>"
