"""The images of a turn: read the new ones, send the old ones again, and expand the delta by what the server read."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from strands.types.content import Messages

from tito_core.backend.errors import UnsupportedByServerError
from tito_core.backend.id_text import IdText
from tito_core.backend.images import PromptImages, collapsed, expanded
from tito_core.backend.protocol import TokenResponse
from tito_core.chat.encoder import EncodedText
from tito_core.chat.images import RESULT, USER, ImageError, known_image, read_image
from tito_core.chat.message_check import unsupported
from tito_core.ledger.columns import TokenIds
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.provenance import Provenance, Provenances
from tito_core.ledger.turn import Draft, Image, MediaSpan

if TYPE_CHECKING:
    from tito_core.policy import PolicyParts


async def read_new_images(
    policy: PolicyParts, blocks: Sequence[Mapping[str, Any]], messages: Messages, path_messages: int
) -> tuple[Image, ...]:
    """Read the images of the messages after the parent's answer.

    Args:
        policy: Its template and server say whether and where images may stand.
        blocks: The images, as `image_blocks` returns them, in the order in which the template shows them.
        messages: The whole history.
        path_messages: Number of leading messages up to the parent's answer; 0 for a root.

    Raises:
        ImageError: The template cannot show one of them there, or one cannot be read.
        UnsupportedByServerError: The server takes no images.
    """
    images: list[Image] = []
    for content in blocks:
        places = _places_of(content, messages, path_messages)
        for place in places:
            _check_place(policy, place)
        try:
            image = known_image(content)
            # Decoding a large picture takes a tenth of a second.
            images.append(await asyncio.to_thread(read_image, content) if image is None else image)
        except ImageError as error:
            raise ImageError(places[0].error(str(error))) from error
    return tuple(images)


class _Place(NamedTuple):
    """Where an image stands: the kind of place, and the words of an error."""

    kind: str
    what: str
    role: str
    where: str

    def error(self, why: str) -> str:
        return unsupported(self.what, self.role, self.where, f"which cannot be sent: {why}")


def _places_of(content: Mapping[str, Any], messages: Messages, path_messages: int) -> list[_Place]:
    """Find an image in the new messages, by identity. A dict may stand in several places."""
    found: list[_Place] = []
    for index, message in enumerate(messages[path_messages:], path_messages):
        for number, block in enumerate(message["content"]):
            where = f"messages[{index}]['content'][{number}]"
            if block.get("image") is content:
                found.append(_Place(USER, "a block of kind 'image'", message["role"], where))
            result = block.get("toolResult")
            for place, item in enumerate(result["content"] if result else ()):
                if item.get("image") is content:
                    what = f"a block of kind 'image' in the tool result {block['toolResult']['toolUseId']!r}"
                    found.append(_Place(RESULT, what, message["role"], f"{where}['toolResult']['content'][{place}]"))
    return found


def _check_place(policy: PolicyParts, place: _Place) -> None:
    certificate, support, backend = policy.template.certificate, policy.info.images, policy.backend.name
    if place.kind not in certificate.images:
        refused = dict(certificate.images_refused)
        reason = refused.get(place.kind) or next(iter(refused.values()), "It was not certified for images.")
        raise ImageError(place.error(f"the chat template shows no images in {place.kind} (law 7). {reason}"))
    if not support.accepted:
        why = f"this {backend} server takes no images. {support.remedy}"
        raise UnsupportedByServerError(place.error(why), backend=backend)


def image_prompt(
    policy: PolicyParts,
    ledger: Ledger,
    parent: int | None,
    media: Sequence[MediaSpan],
    delta: TokenIds,
    new: Sequence[Image],
) -> tuple[TokenIds, IdText, PromptImages]:
    """Return the collapsed ids of a prompt with images, their text form, and all its images.

    Args:
        policy: The policy.
        ledger: The ledger; it holds the images of earlier turns.
        parent: The turn that the prompt extends, or None.
        media: The images of its path.
        delta: The ids of the new messages, with one placeholder for each new image.
        new: The new images, in order.

    Raises:
        ImageError: The policy's template has no placeholder, a stored image has no bytes, or the path has placeholders
            that stand for no image (law 4).
    """
    placeholder, media_ids = policy.template.placeholder_id, policy.template.certificate.media_ids
    if placeholder is None:
        raise ImageError(
            "The history has images, and this policy's chat template has no placeholder for them. Use the model's own "
            "template."
        )
    path = collapsed(ledger.path_ids(parent), [(span.offset, span.length) for span in media])
    images = (*(_stored(ledger, span) for span in media), *new)
    if int(np.count_nonzero(np.isin(path, media_ids))) != len(media):
        raise _stray_error(ledger, parent, media_ids)
    lengths = tuple(span.length for span in media)
    echo = None if new else policy._prompts.text(ledger, parent, delta)
    ids = np.concatenate([path, delta])
    text = policy._prompts.collapsed(ledger, parent, path).then(delta).for_array(ids)
    return ids, text, PromptImages(images, placeholder, lengths, echo, media_ids)


def collapsed_ids(ledger: Ledger, draft: Draft) -> TokenIds:
    """Return the ids of a draft's path as the next request sends them, int32, shape (n,)."""
    spans = [(span.offset, span.length) for span in (*ledger.media(draft.parent), *draft.media)]
    return collapsed(ledger.path_ids(draft.parent, draft.columns.ids), spans)


def _stray_error(ledger: Ledger, parent: int | None, media_ids: tuple[int, ...]) -> ImageError:
    """Return the error for a path with placeholders that stand for no image: servers would put images there."""
    turns = () if parent is None else ledger.path(parent)
    sampled = any(np.isin(turn.draft.output_ids, media_ids).any() for turn in turns)
    cause = "the policy sampled a media placeholder" if sampled else "a message's text spelled a media placeholder"
    return ImageError(
        f"Law 4: {cause} (one of the tokens {', '.join(map(str, media_ids))}) in an earlier turn, so no later request "
        "of this path may carry images: the server would put an image in its place. Nothing was sent. End the rollout, "
        "or rewind the history to before that turn."
    )


def _stored(ledger: Ledger, span: MediaSpan) -> Image:
    image = ledger.images.get(span.sha256)
    if image is None:
        raise ImageError(
            f"The ledger holds no bytes of the image {span.sha256.hex()[:12]} at token {span.offset}, so its path "
            "cannot be continued. Load the ledger from its file."
        )
    return image


def expanded_delta(
    delta: EncodedText, images: PromptImages, response: TokenResponse
) -> tuple[TokenIds, Provenances, tuple[MediaSpan, ...]]:
    """Expand a delta by the spans that the server read: its ids, their provenance, and the spans of its images.

    The provenance of placeholders is `PROMPT`.
    """
    lengths = [length for _, length in response.media]
    places = np.flatnonzero(delta.ids == images.placeholder)
    provenance = delta.provenance.copy()
    provenance[places] = Provenance.PROMPT
    repeats = np.ones(len(delta.ids), np.int64)
    repeats[places] = lengths
    media = tuple(
        MediaSpan(offset, length, image.sha256, image.format, image.width, image.height)
        for (offset, length), image in zip(response.media, images.new, strict=True)
    )
    return expanded(delta.ids, images.placeholder, lengths), np.repeat(provenance, repeats), media
