"""Images of SGLang's `/generate`: `image_data` of a request, and what the server makes of them."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from strands_tito.testing.images import BadImage, ImageSettings, PlacedImage, place
from strands_tito.testing.wire import EngineState, WireResponse
from tito_sglang.scripted.errors import Killed, Refused, Rejected

_BROKEN = WireResponse(500, {"content-type": "text/plain; charset=utf-8"}, b"Internal Server Error")


def expand(
    state: EngineState, body: Mapping[str, Any], ids: Sequence[int]
) -> tuple[tuple[int, ...], tuple[PlacedImage, ...]]:
    """Return the prompt as the server reads it, and its images. A text model's server ignores images.

    With fewer placeholders than images the server decodes the prompt and encodes it again, so that text which spells a
    placeholder becomes one; images without a placeholder are then dropped.

    Raises:
        Refused: A 500.
        Rejected: A 400, or an error event of a stream.
        Killed: The request crashes the server.
    """
    found, settings = body.get("image_data"), state.images
    if found is None or settings is None:
        return tuple(ids), ()
    if body.get("mm_hashes"):
        raise Killed  # measured with a picture that the server had not seen
    given = found if isinstance(found, list) else [found]
    hashes = body.get("mm_content_hashes") or [None] * len(given)
    if len(hashes) != len(given):
        raise Rejected(f"mm_content_hashes has {len(hashes)} entries for {len(given)} images")
    pictures = [_picture(index, one, known) for index, (one, known) in enumerate(zip(given, hashes, strict=True))]
    try:
        return _placed(state, settings, ids, pictures)
    except BadImage as bad:
        raise Rejected(f"Could not decode image: {bad}".replace("object>", "object at 0x7f60f4716ed0>")) from None


def _placed(
    state: EngineState, settings: ImageSettings, ids: Sequence[int], pictures: Sequence[bytes]
) -> tuple[tuple[int, ...], tuple[PlacedImage, ...]]:
    count = sum(token == settings.placeholder for token in ids)
    if state.encode is not None and (settings.decodes or count < len(pictures)):
        ids = state.encode(state.decode(ids), False)
        count = sum(token == settings.placeholder for token in ids)
        if settings.decodes and count > len(pictures):
            raise Rejected(f"Prompt has {count} image placeholders but {len(pictures)} image inputs were provided")
    if count > len(pictures):
        raise Refused(_BROKEN)
    return place(ids, pictures, settings)


def _picture(index: int, given: Any, known: str | None) -> bytes:
    """Return a picture; its content hash, if given, must be that of its bytes."""
    url = given["url"] if isinstance(given, dict) else given
    try:
        picture = base64.b64decode(url.partition(",")[2], validate=True)
    except binascii.Error:
        raise Rejected("Could not decode image: Incorrect padding") from None
    own = f"sha256:{sha256(picture).hexdigest()}"
    if known is not None and known != own:
        raise Rejected(f"content hash mismatch for media_data[{index}]: expected {known}, got {own}")
    return picture
