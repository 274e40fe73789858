"""The images of a prompt: it travels collapsed, one placeholder token an image, and the server expands it."""

from __future__ import annotations

from binascii import b2a_base64
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np

from tito_core.backend.errors import BadRequestError, UnsupportedByServerError
from tito_core.backend.id_text import IdText
from tito_core.ledger.columns import TokenIds
from tito_core.ledger.turn import Image

if TYPE_CHECKING:
    from tito_core.ledger.ledger import Ledger


@dataclass(frozen=True, slots=True)
class ImageSupport:
    """Whether a server takes images, as found at connect.

    Attributes:
        accepted: Whether it does. A backend that does not know images leaves False.
        most: Maximum number of images in one request, or None if not reported.
        remedy: How to get a server that takes images, as a sentence; for the error where `accepted` is False.
    """

    accepted: bool = False
    most: Annotated[int, msgspec.Meta(ge=0)] | None = None
    remedy: str = "Serve a model that takes images."


NO_IMAGES = ImageSupport()


@dataclass(frozen=True, slots=True, eq=False)
class PromptImages:
    """The images of a prompt, in the order of their placeholders.

    Attributes:
        images: All of them, those of earlier turns included. They are sent again with each request.
        placeholder: Id of the placeholder token. `input_ids` hold it once for each image and nowhere else.
        lengths: Number of placeholder tokens that the server made of each of the first images, which earlier turns
            sent. Images after these are new: their lengths are unknown until the server echoes them.
        echo_text: Text of the expanded prompt, if no image is new and the text was cached.
        media_ids: Ids of all media placeholders of the vocabulary, where known. An answer that sampled one is not
            resumed.
    """

    images: tuple[Image, ...]
    placeholder: int
    lengths: tuple[int, ...] = ()
    echo_text: IdText | None = None
    media_ids: tuple[int, ...] = ()

    @property
    def new(self) -> tuple[Image, ...]:
        """The images that no earlier turn sent."""
        return self.images[len(self.lengths) :]


def expanded(input_ids: TokenIds, placeholder: int, lengths: Sequence[int]) -> TokenIds:
    """Return a prompt with its first placeholders, as many as there are lengths, repeated by these lengths.

    Args:
        input_ids: int32, shape (n,), with at least as many placeholders as lengths.
        placeholder: Id of the placeholder token.
        lengths: Numbers of tokens, in order.
    """
    repeats = np.ones(len(input_ids), np.int64)
    repeats[np.flatnonzero(input_ids == placeholder)[: len(lengths)]] = lengths
    return np.repeat(input_ids, repeats)


def collapsed(ids: TokenIds, spans: Sequence[tuple[int, int]]) -> TokenIds:
    """Return expanded ids with each span (offset, length) of placeholders replaced by its first one."""
    keep = np.ones(len(ids), np.bool_)
    for offset, length in spans:
        keep[offset + 1 : offset + length] = False
    return ids[keep]


def media_ids_of(ledger: Ledger) -> tuple[int, ...]:
    """Return the ids of media placeholders: those that the ledger's certificate names, and those of its images."""
    seen = [turn for turn in ledger if turn.draft.media] if ledger.images else []
    starts = [(turn, turn.path_length - turn.own_length) for turn in seen]
    used = {int(turn.draft.prompt_ids[span.offset - start]) for turn, start in starts for span in turn.draft.media}
    return tuple(sorted({*ledger.header.media_ids, *used}))


def stray_placeholders(ids: TokenIds, spans: Sequence[tuple[int, int]], media_ids: Collection[int]) -> int:
    """Return how many media placeholders of expanded ids stand for no image: the policy sampled them.

    An engine that reads such ids together with the images would put images in other places.

    Args:
        ids: int32, shape (n,).
        spans: The images' placeholders (offset, length).
        media_ids: Ids of the placeholders, where they are known besides those of the spans.
    """
    media = {*media_ids, *(int(ids[offset]) for offset, _ in spans)}
    return int(np.count_nonzero(np.isin(collapsed(ids, spans), list(media)))) - len(spans)


def data_url(image: Image) -> str:
    """Return an image as a `data:` URL."""
    return f"data:image/{image.format};base64,{b2a_base64(image.data, newline=False).decode()}"


def data_url_json(image: Image) -> msgspec.Raw:
    """Return an image as a `data:` URL in JSON, in a third of the time of encoding `data_url`."""
    head = b'"data:image/%b;base64,' % image.format.encode()
    return msgspec.Raw(b"".join((head, b2a_base64(image.data, newline=False), b'"')))


PIXELS_PER_TOKEN, LEAST_TOKENS = 28 * 28, 256
"""An image is expected to become at most one token for each 28 x 28 pixels, or 256 tokens if it is small."""


def clamp_for_images(
    images: Sequence[Image], max_new_tokens: int, prompt_length: int, max_model_len: int | None
) -> int:
    """Return how many tokens to sample where the tokens of new images must fit too: at most `max_new_tokens`.

    The server alone knows how many tokens an image becomes. A generous number is left to the images, but not more than
    half of the room: the server refuses what does not fit then.

    Args:
        images: The new images.
        max_new_tokens: Maximum number of tokens to sample.
        prompt_length: Tokens of the prompt, in which each new image counts as one token.
        max_model_len: Maximum length of prompt and answer, above `prompt_length`; None if unknown.
    """
    if not images or max_model_len is None:
        return max_new_tokens
    expected = sum(max(LEAST_TOKENS, image.width * image.height // PIXELS_PER_TOKEN) for image in images)
    room = max_model_len - prompt_length
    return min(max_new_tokens, room - min(expected, room // 2))


def check_images(images: PromptImages, input_ids: TokenIds, support: ImageSupport, *, backend: str) -> None:
    """Check the images of a request before it is sent. A wrong count would be answered, with other tokens.

    Raises:
        UnsupportedByServerError: The server takes no images.
        BadRequestError: The prompt has another number of placeholders than images, or more images than the server
            takes.
    """
    count = len(images.images)
    if not support.accepted:
        raise UnsupportedByServerError(
            f"The prompt has {count} images, and this {backend} server takes none, so it was not sent. "
            f"{support.remedy}",
            backend=backend,
        )
    found = int(np.count_nonzero(input_ids == images.placeholder))
    if found != count or len(images.lengths) > count:
        raise BadRequestError(
            f"Law 6: the prompt has {found} placeholder tokens {images.placeholder} for {count} images, "
            f"{len(images.lengths)} of them of earlier turns, so it was not sent: the server would put images in other "
            "places.",
            backend=backend,
        )
    if support.most is not None and count > support.most:
        raise BadRequestError(
            f"The history has {count} images, and this {backend} server takes at most {support.most} in one request, "
            "so it was not sent. Remove images from the history, or raise the server's limit.",
            backend=backend,
        )
