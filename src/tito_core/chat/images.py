"""Images: read for a request, and certified for a template.

`read_image` makes images as they are sent: upright, opaque, RGB, and read only once. Engines agree on the pixels of
such files within rounding. A transparent picture or one that is rotated by its EXIF tag gives other logprobs on each
engine, up to 1.9 nats apart with the same echo. `certify_images` tries each place where a template may show images, on
probes.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
from strands.types.content import Message, Messages

from tito_core.chat.delta import DeltaSource
from tito_core.chat.messages import UnsupportedContentError
from tito_core.chat.probes import TOOLS, Case, assistant_message, call_message, result_message, user_message
from tito_core.chat.referee import Referee, RefusedError
from tito_core.chat.rendering import TemplateError
from tito_core.chat.traced import Traced
from tito_core.ledger.errors import how_to_install
from tito_core.ledger.turn import Image

if TYPE_CHECKING:
    from PIL.Image import Image as Picture


FORMATS = ("png", "jpeg", "gif", "webp")
MAX_PIXELS = 64_000_000
"""Most pixels of a picture. Its header is read first: a file of 1 kB can decode to gigabytes."""
MAX_ASPECT = 200
"""Greatest ratio of the sides: Qwen-VL's image processors refuse more."""
_ORIENTATION = 0x0112
"""The EXIF tag; 1 is upright."""
_images: WeakValueDictionary[bytes, Image] = WeakValueDictionary()
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
    return _images.get(sha256(content["source"]["bytes"]).digest())


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
        image = _images[sha256(data).digest()] = _read(data)
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


USER, RESULT = "user messages", "tool results"
"""Places of images; each is certified by itself."""
_IMAGE: Any = {"image": {"format": "png", "source": {"bytes": b""}}}


def _text(number: int) -> dict[str, str]:
    return {"text": f"Look n{number:03}."}


def _user(*blocks: Any) -> Message:
    return {"role": "user", "content": list(blocks)}


def _blocks(blocks: Sequence[Any], number: int) -> list[Any]:
    """Return blocks, with texts of other numbers for each number of a case, since layouts are probed with others."""
    return [_text(900 + 10 * number + block) if isinstance(block, int) else block for block in blocks]


def _answer(number: int) -> Message:
    return assistant_message(f"Seen n{number:03}.")


def _call(number: int, count: int = 1, first: int = 0) -> Message:
    return call_message(*(("look", {"at": f"the door n{number + i:03}."}) for i in range(count)), first=first)


_QUESTIONS: dict[str, list[Any]] = {
    "image before a text": [_IMAGE, 1],
    "image after a text": [1, _IMAGE],
    "image between texts": [1, _IMAGE, 2],
    "two images": [1, _IMAGE, _IMAGE],
    "images and texts in turn": [_IMAGE, 1, _IMAGE, 2, 3],
    "image alone": [_IMAGE],
}
_RESULTS: dict[str, list[list[Any]]] = {
    "result of a text and an image": [[1, _IMAGE]],
    "result of an image and a text": [[_IMAGE, 1]],
    "result of an image alone": [[_IMAGE]],
    "result of two images": [[_IMAGE, 1, _IMAGE]],
    "two results with images": [[_IMAGE, 1], [2, _IMAGE]],
}
"""Images, and numbers of texts."""
_BEFORE: dict[str, Callable[[], Messages]] = {
    "first": lambda: [user_message("Why n001.")],
    "after an image": lambda: [_user(_text(1), _IMAGE)],
    "after an image and its answer": lambda: [_user(_IMAGE, _text(1)), _answer(2), user_message("Why n003.")],
}
_BEFORE_RESULTS: dict[str, Callable[[], Messages]] = {
    **_BEFORE,
    "after a result with an image": lambda: [
        user_message("Why n001."),
        _call(2, first=8),
        result_message([_text(3), _IMAGE], first=8),
    ],
}


def image_cases(place: str) -> Iterator[Case]:
    """Yield the probes of a place, `USER` or `RESULT`. Images that follow others find templates that number them."""
    if place == USER:
        for name, blocks in _QUESTIONS.items():
            for number, (where, before) in enumerate(_BEFORE.items()):
                yield Case(f"{name}, {where}", before(), _answer(500), [_user(*_blocks(blocks, number))])
        return
    for name, results in _RESULTS.items():
        for number, (where, before) in enumerate(_BEFORE_RESULTS.items()):
            turn = _call(500 + 10 * number, len(results))
            result = result_message(*(_blocks(blocks, number) for blocks in results))
            yield Case(f"{name}, {where}", before(), turn, [result], tools=TOOLS)
            if name == "result of a text and an image":
                new = [_user(*result["content"], *_blocks([2, _IMAGE], number))]
                yield Case(f"{name}, and a question, {where}", before(), turn, new, tools=TOOLS)


def count_images(messages: Messages) -> int:
    """Return the number of images in messages."""
    results = [block["toolResult"] for message in messages for block in message["content"] if "toolResult" in block]
    blocks: list[Any] = [*messages, *results]
    return sum("image" in item for block in blocks for item in block["content"])


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


Judge = Callable[[Sequence[Case]], str | None]
"""Returns why deltas are wrong on probes, or None if they are right."""


@dataclass(frozen=True, slots=True)
class ImageCertificate:
    """What certification found out about images.

    Attributes:
        placeholder: The control token that servers repeat, or None if the template has none.
        places: Places where images are certified: "user messages", "tool results".
        refused: The other places, each with the reason.
        media_ids: Ids of the placeholders of images, videos and audio in the vocabulary; may be empty.
    """

    placeholder: str | None
    places: tuple[str, ...]
    refused: tuple[tuple[str, str], ...]
    media_ids: tuple[int, ...] = ()


def certify_images(
    source: DeltaSource, referee: Referee, judge: Judge, *, image_token: str | None, tools: bool
) -> ImageCertificate:
    """Certify images for the candidate that was chosen on texts.

    Args:
        source: The candidate.
        referee: The plain rendering.
        judge: Returns why the candidate's deltas are wrong on probes, or None.
        image_token: The placeholder that the tokenizer names, or None.
        tools: Whether the template shows tool results.
    """
    try:
        placeholder = _placeholder(source, image_token)
    except TemplateError as error:
        return ImageCertificate(None, (), tuple((place, str(error)) for place in (USER, RESULT)))
    added = source.encoder.added
    media = {added[text] for text in (placeholder, *PLACEHOLDERS, *_OTHER_MEDIA) if text in added}
    places, refused = [], []
    for place in (USER, RESULT):
        reason = (
            "It shows no tool results."
            if place == RESULT and not tools
            else _fault(source, referee, judge, added[placeholder], media, list(image_cases(place)))
        )
        if reason is None:
            places.append(place)
        else:
            refused.append((place, reason))
    if not places:
        return ImageCertificate(None, (), tuple(refused))
    return ImageCertificate(placeholder, tuple(places), tuple(refused), tuple(sorted(media)))


def _placeholder(source: DeltaSource, image_token: str | None) -> str:
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
    usual = [text for text in (image_token, *PLACEHOLDERS) if text in found]
    if not found:
        raise TemplateError("The template writes no control token for an image. Use a template that shows images.")
    if len(found) > 1 and not usual:
        raise TemplateError(
            f"The template writes several control tokens for an image, {', '.join(found)}, and none is a known "
            "placeholder. Report this template."
        )
    placeholder = str(usual[0] if usual else found[0])
    for text, families in _ADDED_BY_SERVERS.items():
        if text in source.encoder.added and (text == placeholder or text not in found):
            raise TemplateError(
                f"Servers of {families} put other tokens, such as {text}, around and between an image's placeholders, "
                "so the echo could not be checked (law 4). Use another family."
            )
    return placeholder


def _fault(
    source: DeltaSource, referee: Referee, judge: Judge, token: int, media: Set[int], cases: Sequence[Case]
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
        if (written := controls[token]) != (images := count_images(case.history)):
            return f"It writes {written} placeholders for the {images} images of the probe {case.name!r}."
        if str.__str__(text) != plain:
            return f"Content cannot be traced through the probe {case.name!r}."
        written = delta.ids.tolist().count(token)
        if written != (images := count_images(case.new)):
            return f"It writes {written} placeholders for the {images} new images of the probe {case.name!r}."
    return judge(cases)


def _rendered(source: DeltaSource, messages: Messages, case: Case | None = None) -> Traced:
    tools = (case.tools if case is not None else None) or source.rendering.default_tools
    return source.rendering.of_messages(messages, case.system if case is not None else None, tools)
