"""Images of vLLM's `/inference/v1/generate`: the `content_parts` of a request, and what the server makes of them."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

from strands_tito.testing.images import BadImage, ImageSettings, PlacedImage, place
from strands_tito.testing.wire import EngineState
from tito_vllm.scripted import errors
from tito_vllm.scripted.errors import Refused


def expand(
    state: EngineState, body: Mapping[str, Any], ids: Sequence[int]
) -> tuple[tuple[int, ...], tuple[PlacedImage, ...]]:
    """Return the prompt as the server reads it, and its images; raise `Refused` where the server refuses it.

    Parts of an unknown type are ignored. With too few placeholders the server decodes the whole prompt and encodes it
    again, so that text which spells a placeholder becomes one.
    """
    parts = [part for part in body.get("content_parts") or () if part.get("type") == "image_url"]
    if not parts:
        return tuple(ids), ()
    settings = state.images
    if settings is None:
        raise Refused(errors.error(f"{state.model} is not a multimodal model"))
    if len(parts) > settings.limit:
        message = f"At most {settings.limit} image(s) may be provided in one prompt."
        raise Refused(errors.bad_value(message, "image"))
    pictures = [_picture(state, index, part) for index, part in enumerate(parts)]
    try:
        return _placed(state, settings, ids, pictures)
    except BadImage as bad:
        raise Refused(errors.error(f"Failed to load image: {bad}")) from None


def placeholders(images: Sequence[PlacedImage]) -> dict[str, list[dict[str, int]]] | None:
    """Return `mm_placeholders` of a response."""
    return {"image": [{"offset": each.offset, "length": each.length} for each in images]} if images else None


def _placed(
    state: EngineState, settings: ImageSettings, ids: Sequence[int], pictures: Sequence[bytes]
) -> tuple[tuple[int, ...], tuple[PlacedImage, ...]]:
    expanded, placed = place(ids, pictures, settings)
    if len(placed) < len(pictures) and state.encode is not None:
        expanded, placed = place(state.encode(state.decode(ids), False), pictures, settings)
    if len(placed) < len(pictures):
        message = f"Failed to apply prompt replacement for mm_items['image'][{len(placed)}]"
        raise Refused(errors.error(message, status=500, kind="InternalServerError"))
    return expanded, placed


def _picture(state: EngineState, index: int, part: Mapping[str, Any]) -> bytes:
    """Return a part's picture. The server believes its `uuid`: a picture that it knows by that name is not read."""
    name, url = part.get("uuid"), part.get("url")
    if name is not None and name in state.known_images:
        return state.known_images[name]
    if url is None and name is None:
        where = f"multi_modal_data['image'][{index}] is empty but multi_modal_uuids['image'][{index}] is missing."
        raise Refused(errors.error(where))
    if url is None:
        raise Refused(errors.error(f"Cache miss for image at index {index} but data is not provided."))
    if not url.startswith("data:"):
        message = "Cannot load local files without `--allowed-local-media-path`."
        raise Refused(errors.error(message, status=500, kind="InternalServerError"))
    try:
        picture = base64.b64decode(url.partition(",")[2], validate=True)
    except binascii.Error:
        raise Refused(errors.error("Failed to load image: Incorrect padding")) from None
    if name is not None:
        state.known_images[name] = picture
    return picture
