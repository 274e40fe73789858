"""Find a template's image placeholder, and certify where it may be used (laws 6 and 7)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strands.types.content import Messages

from tito_core.chat.delta import DeltaSource
from tito_core.chat.image_probes import RESULT, USER, count_images, image_cases
from tito_core.chat.probes import Case, user_message
from tito_core.chat.referee import Referee, RefusedError
from tito_core.chat.rendering import TemplateError
from tito_core.chat.traced import Traced

if TYPE_CHECKING:
    from tito_core.chat.certify import Trial

    Attempt = Callable[[Sequence[Case]], Trial]

PLACEHOLDERS = (
    "<|image_pad|>",  # Qwen-VL
    "<image_soft_token>",  # Gemma
    "<|media_pad|>",  # Kimi-VL
    "<|image|>",
    "<|IMAGE_PAD|>",
    "<image>",
    "[IMG]",
)
"""Placeholders of families whose templates write several control tokens for an image, such as its start and end."""
_OTHER_MEDIA = (
    "<|video_pad|>", "<|audio_pad|>", "<|video|>", "<|audio|>", "<|VIDEO|>", "<|AUDIO|>", "<video>", "<audio>",
    "<audio_soft_token>",
)  # fmt: skip
"""Placeholders of videos and audio."""
_ADDED_BY_SERVERS = {
    "<start_of_image>": "Gemma 3",
    "<|image>": "Gemma 4",
    "<fake_token_around_image>": "Idefics 3 and SmolVLM",
    "<|image_start|>": "Muse, Llama 4 and LFM2-VL",
    "<img>": "InternVL and Nemotron Omni",
    "[IMG_BREAK]": "Pixtral",
    "<slice>": "MiniCPM-V",
    "<|START_OF_IMG|>": "Cohere's vision models",
    "<IMG_START>": "Ovis 2",
    "<patch_start>": "Step 3",
    "]<]start of image[>[": "MiniMax",
}
"""Tokens that the image processors of families put around and between placeholders (transformers 5.23)."""


@dataclass(frozen=True, slots=True)
class ImageCertificate:
    """What certification found out about images.

    Attributes:
        placeholder: The control token that servers repeat, or None if the template has none.
        places: Places where images are certified: "user messages", "tool results".
        refused: The other places, each with the reason.
        media_ids: Ids of the vocabulary's placeholders of images, videos and audio; empty if there is no placeholder.
    """

    placeholder: str | None
    places: tuple[str, ...]
    refused: tuple[tuple[str, str], ...]
    media_ids: tuple[int, ...] = ()


def certify_images(
    source: DeltaSource, referee: Referee, attempt: Attempt, *, named: str | None, tools: bool
) -> ImageCertificate:
    """Certify images for the candidate that was chosen on texts.

    Args:
        source: The candidate.
        referee: The plain rendering.
        attempt: Tries the candidate on probes, up to the first difference.
        named: The placeholder that the tokenizer names, or None.
        tools: Whether the template shows tool results.
    """
    try:
        placeholder = _placeholder(source, named)
    except TemplateError as error:
        return ImageCertificate(None, (), tuple((place, str(error)) for place in (USER, RESULT)))
    added = source.encoder.added
    media = {added[text] for text in (placeholder, *PLACEHOLDERS, *_OTHER_MEDIA) if text in added}
    places, refused = [], []
    for place in (USER, RESULT):
        reason = (
            "It shows no tool results."
            if place == RESULT and not tools
            else _fault(source, referee, attempt, added[placeholder], media, list(image_cases(place)))
        )
        if reason is None:
            places.append(place)
        else:
            refused.append((place, reason))
    if not places:
        return ImageCertificate(None, (), tuple(refused))
    return ImageCertificate(placeholder, tuple(places), tuple(refused), tuple(sorted(media)))


def _placeholder(source: DeltaSource, named: str | None) -> str:
    """Return the control token that stands for an image.

    Raises:
        TemplateError: The template shows no images, or writes no control token, or several unknown ones for each.
    """
    blank: Any = {"image": {"format": "png", "source": {"bytes": b""}}}
    counts = []
    for images in (0, 1, 2):
        question = user_message("Why n001.")
        question["content"] += [blank] * images
        counts.append(Counter(token for _, _, token in source.encoder.controls(_rendered(source, [question]))))
    one, two = counts[1] - counts[0], counts[2] - counts[0]
    texts = {index: text for text, index in source.encoder.added.items()}
    found = [texts[token] for token, count in one.items() if count == 1 and two[token] == 2]
    known = [text for text in (named, *PLACEHOLDERS) if text in found]
    if not found:
        raise TemplateError("The template writes no control token for an image. Use a template that shows images.")
    if len(found) > 1 and not known:
        raise TemplateError(
            f"The template writes several control tokens for an image, {', '.join(found)}, and none is a known "
            "placeholder. Report this template."
        )
    placeholder = str(known[0] if known else found[0])
    for text, families in _ADDED_BY_SERVERS.items():
        if text in source.encoder.added and (text == placeholder or text not in found):
            raise TemplateError(
                f"Servers of {families} put other tokens, such as {text}, around and between an image's placeholders, "
                "so the echo could not be checked (law 4). Use another family."
            )
    return placeholder


def _fault(
    source: DeltaSource, referee: Referee, attempt: Attempt, token: int, media: Set[int], cases: Sequence[Case]
) -> str | None:
    """Return why images cannot be used in a place, or None if every probe is right.

    The placeholder is `token`. The others of `media` must not be written: no media span would hold them (law 4).
    """
    for case in cases:
        try:
            text = _rendered(source, case.history, case)
            delta = source.delta(case.answer, case.new, min(source.stops), tools=case.tools or (), history=case.before)
            plain = referee.render(case.history, case.system, case.tools)
        except (TemplateError, RefusedError) as error:
            return f"It refuses the probe {case.name!r}: {error}"
        controls = Counter(control for _, _, control in source.encoder.controls(text))
        if strange := controls.keys() & (media - {token}):
            names = sorted(text for text, index in source.encoder.added.items() if index in strange)
            return f"It writes {', '.join(names)}, which stands for other media, in the probe {case.name!r}."
        shown = controls[token]
        if shown != (images := count_images(case.history)):
            return f"It writes {shown} placeholders for the {images} images of the probe {case.name!r}."
        if str.__str__(text) != plain:
            return f"Content cannot be traced through the probe {case.name!r}."
        written = delta.ids.tolist().count(token)
        if written != (images := count_images(case.new)):
            return f"It writes {written} placeholders for the {images} new images of the probe {case.name!r}."
    trial = attempt(cases)
    if trial.refused:
        return f"It refuses the probe {trial.refused[0][0]!r}: {trial.refused[0][1]}"
    if trial.difference is not None:
        probe, difference = trial.difference
        return f"It renders an image differently depending on what precedes it. On the probe {probe!r}, {difference}"
    return None


def _rendered(source: DeltaSource, messages: Messages, case: Case | None = None) -> Traced:
    tools = (case.tools if case is not None else None) or source.rendering.default_tools
    return source.rendering.of_messages(messages, case.system if case is not None else None, tools)
