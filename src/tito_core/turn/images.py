"""The images of a turn: read the new ones, send the old ones again, and expand the delta by what the server read."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
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
from tito_core.chat.messages import image_blocks
from tito_core.ledger.columns import TokenIds
from tito_core.ledger.errors import LawViolationError
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.provenance import Provenance
from tito_core.ledger.turn import CallRecord, Draft, Image, MediaSpan, Turn

if TYPE_CHECKING:
    from tito_core.policy import PolicyParts


class ImagePrompt(NamedTuple):
    """A prompt with images, ready to send.

    Attributes:
        input_ids: The whole prompt, collapsed, int32, shape (p,).
        text: Its text.
        images: Its images.
    """

    input_ids: TokenIds
    text: IdText
    images: PromptImages


async def new_images(policy: PolicyParts, messages: Messages, answered: int) -> tuple[Image, ...]:
    """Read the images of the messages after the parent's answer, in the order in which the template shows them.

    Args:
        policy: Its template and server say whether and where images may stand.
        messages: The whole history.
        answered: Number of leading messages up to the parent's answer; 0 for a root.

    Raises:
        ImageError: The template cannot show one of them there, or one cannot be read.
        UnsupportedByServerError: The server takes no images.
    """
    found = image_blocks(messages, answered)
    images: list[Image] = []
    for content in found:
        places = _places_of(content, messages, answered)
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


def _places_of(content: Mapping[str, Any], messages: Messages, answered: int) -> list[_Place]:
    """Find an image in the new messages, by identity. A dict may stand in several places."""
    found: list[_Place] = []
    for index, message in enumerate(messages[answered:], answered):
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
    policy: PolicyParts, ledger: Ledger, parent: int | None, delta: TokenIds, new: tuple[Image, ...]
) -> ImagePrompt | None:
    """Return the collapsed prompt with all its images, or None for a prompt of text.

    Args:
        policy: The policy.
        ledger: The ledger; it holds the images of earlier turns.
        parent: The turn that the prompt extends, or None.
        delta: The ids of the new messages, with one placeholder for each new image.
        new: The new images, in order.

    Raises:
        ImageError: The prompt holds another number of placeholders than images.
    """
    media = ledger.media(parent) if new or ledger.images else ()  # a rollout of text does not walk its path for this
    if not media and not new:
        if policy.template.certificate.content_tokens == "inert":
            _check_written(delta, ledger.header.media_ids, 0)
        return None
    placeholder = policy.template.placeholder_id
    if placeholder is None:
        raise ImageError(
            "The history has images, and this policy's chat template has no placeholder for them. Use the model's own "
            "template."
        )
    spans = [(span.offset, span.length) for span in media]
    path = collapsed(ledger.path_ids(parent), spans)
    old = tuple(_stored(ledger, span) for span in media)
    media_ids = policy.template.certificate.media_ids
    if int(np.count_nonzero(np.isin(path, media_ids))) != len(media):
        raise _stray_error(ledger, parent, media_ids)
    _check_written(delta, media_ids, len(new))
    if media:
        text = policy.collapsed_prompts.text(ledger, parent, delta, path)
    else:
        text = policy.prompts.text(ledger, parent, delta)
    echo = None if new else policy.prompts.text(ledger, parent, delta)
    lengths = tuple(length for _, length in spans)
    input_ids = np.concatenate([path, delta])
    return ImagePrompt(
        input_ids, text.for_array(input_ids), PromptImages((*old, *new), placeholder, lengths, echo, media_ids)
    )


def _check_written(delta: TokenIds, media_ids: tuple[int, ...], images: int) -> None:
    """Refuse other placeholders of media than those of the new images: no media span would hold them."""
    written = int(np.count_nonzero(np.isin(delta, media_ids))) if media_ids else 0
    if written != images:
        raise ImageError(
            f"Law 6: the new messages became {written} media placeholders for {images} images, so nothing was sent. "
            "With content_tokens='as-template' remove those that the messages' text spells; else report this template."
        )


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


class ReadDelta(NamedTuple):
    """A turn's delta as the server read it.

    Attributes:
        ids: Expanded, int32, shape (p,).
        provenance: uint8, shape (p,); placeholders are `PROMPT`.
        media: The spans of its images.
    """

    ids: TokenIds
    provenance: Any
    media: tuple[MediaSpan, ...]


def read_delta(delta: EncodedText, images: PromptImages | None, response: TokenResponse) -> ReadDelta:
    """Expand a delta by the spans that the server read."""
    if images is None or not images.new:
        return ReadDelta(delta.ids, delta.provenance, ())
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
    return ReadDelta(expanded(delta.ids, images.placeholder, lengths), np.repeat(provenance, repeats), media)


def sampled_placeholders(output_ids: TokenIds, media_ids: tuple[int, ...]) -> list[CallRecord]:
    """Return a record for each media placeholder that the policy sampled; no request after it may carry images."""
    reason = "The policy sampled a media placeholder; later requests of this path may not carry images."
    found = np.flatnonzero(np.isin(output_ids, media_ids)) if media_ids else ()
    return [CallRecord(None, "suspect", int(at), int(at) + 1, reason) for at in found]


class PathTexts(NamedTuple):
    """Texts of a turn's path.

    Attributes:
        expanded: That of the ledger's ids.
        collapsed: That of the ids as the next request sends them; None for a path without images.
    """

    expanded: IdText
    collapsed: IdText | None = None


def answered_texts(
    policy: PolicyParts, ledger: Ledger, draft: Draft, sent: IdText, images: PromptImages | None, output: TokenIds
) -> PathTexts:
    """Return the texts of a draft's path before it is committed.

    Raises:
        LawViolationError: The draft holds other tokens than the request and the response (law 4).
    """
    if images is None:
        return PathTexts(policy.prompts.answered(ledger, draft, sent, output))
    spans = [(span.offset, span.length) for span in (*ledger.media(draft.parent), *draft.media)]
    travelled, ids = sent.then(output), ledger.path_ids(draft.parent, draft.columns.ids)
    if not travelled.matches(collapsed(ids, spans)):
        raise LawViolationError(4, f"turn {len(ledger)} does not hold the tokens of its request and response.")
    return PathTexts(policy.prompts.text(ledger, draft.parent, draft.columns.ids), travelled)


def keep_texts(policy: PolicyParts, ledger: Ledger, turn: Turn, texts: PathTexts) -> None:
    """Keep the texts of a committed turn's path. Never raise: the turn is committed."""
    policy.prompts.keep(ledger, turn.index, turn.parent, texts.expanded)
    if texts.collapsed is not None:
        policy.collapsed_prompts.keep(ledger, turn.index, turn.parent, texts.collapsed)
