"""Strands' image blocks -> images as they are sent: upright, opaque, RGB, and read only once.

Engines agree on the pixels of such files within rounding. A transparent picture or one that is rotated by its EXIF tag
gives other logprobs on each engine, up to 1.9 nats apart with the same echo.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np

from tito_core.chat.messages import UnsupportedContentError
from tito_core.ledger.errors import how_to_install
from tito_core.ledger.image import Image

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

FORMATS = ("png", "jpeg", "gif", "webp")
MAX_PIXELS = 64_000_000
"""Most pixels of a picture. Its header is read first: a file of 1 kB can decode to gigabytes."""
MAX_ASPECT = 200
"""Greatest ratio of the sides: Qwen-VL's image processors refuse more."""
_ORIENTATION = 0x0112
"""The EXIF tag; 1 is upright."""
_known: WeakValueDictionary[bytes, Image] = WeakValueDictionary()
"""Images by the digest of the bytes that they were made of, as long as a ledger or a request holds them."""


class ImageError(UnsupportedContentError):
    """An image cannot be sent. Nothing was sent, and the ledger is unchanged."""


def known_image(content: Mapping[str, Any]) -> Image | None:
    """Return the image of Strands' `ImageContent` if it was read before; this is fast.

    Raises:
        ImageError: Its format is not supported.
    """
    declared = str(content["format"])
    if declared.lower() not in FORMATS:
        raise ImageError(f"The format {declared[:40]!r} is not supported. Send one of {', '.join(FORMATS)}.")
    return _known.get(sha256(content["source"]["bytes"]).digest())


def read_image(content: Mapping[str, Any]) -> Image:
    """Return the image of Strands' `ImageContent`. Any thread may call it.

    Bytes that are already upright, opaque and RGB are kept, also if they are of another format than the block says.
    Others become a PNG: rotated as their EXIF tag says, on white, RGB.

    Raises:
        ImageError: The bytes cannot become an image; the error says why and what to do.
    """
    image = known_image(content)
    if image is None:
        data: bytes = content["source"]["bytes"]
        image = _known[sha256(data).digest()] = _read(data)
    return image


def _read(data: bytes) -> Image:
    try:
        from PIL import Image as pillow
        from PIL import ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise ImageError(f"Images need Pillow, which is not installed: {how_to_install('images')}.") from error
    too_many = f"more than the {MAX_PIXELS:,} pixels that this provider decodes. Send a smaller picture."
    try:
        with pillow.open(io.BytesIO(data), formats=FORMATS) as picture:
            width, height = picture.size
            if width * height > MAX_PIXELS:
                raise ImageError(f"The picture has {width} x {height} pixels, {too_many}")
            if max(width, height) > MAX_ASPECT * min(width, height):
                raise ImageError(
                    f"The picture has {width} x {height} pixels. Image processors refuse sides with a ratio above "
                    f"{MAX_ASPECT}: crop or pad it."
                )
            if (frames := getattr(picture, "n_frames", 1)) > 1:
                raise ImageError(f"The picture has {frames} frames. Send the one that the model should see.")
            kind = str(picture.format).lower()
            layouts = [tile[3] for tile in picture.tile]
            picture.load()
            if _travels_unchanged(picture):
                return Image(data, kind, width, height)
            _scale_clear_colour(picture, layouts)
            upright = _on_white(ImageOps.exif_transpose(picture))
    except ImageError:
        raise
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning) as error:
        raise ImageError(f"The picture has {too_many}") from error
    except UnidentifiedImageError as error:
        raise ImageError(
            f"The {len(data)} bytes are not a picture of a supported format ({', '.join(FORMATS)}). Check the bytes."
        ) from error
    except Exception as error:  # a decoder may raise any exception on broken data
        raise ImageError(
            f"The {len(data)} bytes are a broken picture ({type(error).__name__}: {error}). Check the bytes."
        ) from error
    out = io.BytesIO()
    upright.save(out, "png")
    return Image(out.getvalue(), "png", *upright.size)


def _travels_unchanged(picture: Picture) -> bool:
    upright = picture.getexif().get(_ORIENTATION, 1) in (0, 1)
    return upright and picture.mode == "RGB" and "transparency" not in picture.info


def _scale_clear_colour(picture: Picture, layouts: Sequence[object]) -> None:
    """Scale the transparent colour of a PNG as Pillow scaled the samples of grey with 2 or 4 bits.

    Args:
        picture: The decoded picture.
        layouts: Pillow's names of the file's samples, such as "L;2".

    Raises:
        ImageError: The samples have 16 bits of red, green and blue. Pillow keeps the high bytes, and the colour needs
            both.
    """
    clear = picture.info.get("transparency")
    if clear is not None and "RGB;16B" in layouts:
        raise ImageError(
            f"The picture is a PNG with 16 bits a channel and the transparent colour {clear}, which Pillow cannot "
            "compare exactly. Convert the picture to 8 bits a channel, or to RGBA."
        )
    for layout, most in (("L;2", 3), ("L;4", 15)):
        if clear is not None and layout in layouts:
            picture.info["transparency"] = (clear & most) * 255 // most  # PNG: only the low bits count


def _on_white(picture: Picture) -> Picture:
    """Return a picture as opaque RGB, on a white background; 16-bit grey is scaled to 8 bits, not clipped."""
    from PIL import Image as pillow

    if picture.mode.startswith("I"):
        grey = np.asarray(picture.convert("I"))
        grey = np.where(grey == picture.info.get("transparency", -1), 65535, grey)  # before the low bytes are gone
        picture = pillow.fromarray((grey // 257).astype(np.uint8))
    clear = picture.has_transparency_data
    if not clear:
        return picture.convert("RGB")
    above = picture.convert("RGBA")
    background = pillow.new("RGBA", above.size, (255, 255, 255, 255))
    return pillow.alpha_composite(background, above).convert("RGB")
