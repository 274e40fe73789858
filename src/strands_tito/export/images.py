"""The images of a sample: where their placeholders are, pictures and tensors for trainers, and who cannot take them."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from strands_tito.export.optional_dependency import import_optional
from tito_core.backend.images import stray_placeholders
from tito_core.ledger.columns import TokenIds
from tito_core.ledger.image import Image
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.trajectory import Trajectory

if TYPE_CHECKING:
    from PIL.Image import Image as Picture


class ImagesNotSupportedError(ValueError):
    """A rollout has images, and the trainer would train it without them, or with them in other places."""


class SampledPlaceholderError(ImagesNotSupportedError):
    """The policy of one rollout sampled the placeholder of images. Other rollouts of the batch are not concerned."""


class ImageGridError(ValueError):
    """A processor makes another number of tokens of an image than the engine did."""


@dataclass(frozen=True, slots=True, eq=False)
class SampleImage:
    """An image of a sample.

    Attributes:
        offset: Column index of its first placeholder.
        length: Number of placeholders.
        image: The file as the engine read it.
    """

    offset: int
    length: int
    image: Image

    @property
    def stop(self) -> int:
        """Column index after its last placeholder."""
        return self.offset + self.length


def images_of(trajectory: Trajectory) -> tuple[SampleImage, ...]:
    """Return the images of a trajectory, in order.

    Raises:
        ValueError: The ledger does not hold the file of one of them.
    """
    if len(trajectory.images) != len(trajectory.media):
        raise ValueError(
            f"The trajectory has {len(trajectory.media)} images, but the ledger holds the files of "
            f"{len(trajectory.images)}. Load the rollout from the file that was written when it was sampled."
        )
    pairs = zip(trajectory.media, trajectory.images, strict=True)
    return tuple(SampleImage(span.offset, span.length, image) for span, image in pairs)


def refuse_images(images: Iterable[object], trainer: str, rollout_id: str) -> None:
    """Refuse a rollout with images, for a trainer whose input has no place for them.

    Raises:
        ImagesNotSupportedError: There are images.
    """
    count = sum(1 for _ in images)
    if count:
        raise ImagesNotSupportedError(
            f"Rollout {rollout_id} has {count} images, and {trainer} has no place for them: its tokens would be "
            "trained without them. From Python, call an exporter that takes images (verl.output_of, slime.fields_of "
            "with processor=..., verifiers.trace_of), write `tito export --to parquet`, or leave such rollouts out."
        )


def refuse_ledger_images(rollout: Ledger, trainer: str) -> None:
    """Refuse a rollout in which any turn has an image; see `refuse_images`."""
    refuse_images((span for turn in rollout for span in turn.draft.media), trainer, rollout.uuid)


def refuse_stray_placeholders(
    token_ids: TokenIds, images: Sequence[SampleImage], media_ids: Collection[int], trainer: str, rollout_id: str
) -> None:
    """Refuse tokens with more placeholders than those of their images, for a trainer that puts images in their places.

    Tokens without images too: trainers pack them with others, so that a neighbour's image would take the place.

    Args:
        token_ids: int32, shape (n,).
        images: The images.
        media_ids: Ids of the placeholders; see `TrainingSample.media_ids`.
        trainer: The trainer's name, for the error.
        rollout_id: The rollout, for the error.

    Raises:
        SampledPlaceholderError: The policy sampled a placeholder.
    """
    stray = stray_placeholders(token_ids, [(each.offset, each.length) for each in images], media_ids)
    if stray:
        raise SampledPlaceholderError(
            f"Rollout {rollout_id} has {len(images)} images, and its policy sampled {stray} more placeholders, of the "
            f"tokens {', '.join(map(str, media_ids))}: {trainer} would put images in other places than the engine did. "
            "Leave such rollouts out, or ban the tokens in sampling, as docs/images.md shows."
        )


def pictures_of(images: Sequence[SampleImage]) -> list[Picture]:
    """Return the images as Pillow's RGB pictures.

    Raises:
        MissingPackageError: Pillow is not installed.
    """
    pillow = import_optional("PIL.Image", "images")
    return [pillow.open(io.BytesIO(each.image.data)).convert("RGB") for each in images]


def processed(images: Sequence[SampleImage], processor: Any) -> dict[str, Any]:
    """Return what a processor makes of images: `pixel_values`, `image_grid_thw` and others, as PyTorch tensors.

    Args:
        images: At least one image.
        processor: The model's processor of transformers (`AutoProcessor`), or its image processor.

    Raises:
        MissingPackageError: Pillow is not installed.
        ImageGridError: The number of tokens differs from the engine's.
    """
    image_processor = getattr(processor, "image_processor", processor)
    tensors = dict(image_processor(images=pictures_of(images), return_tensors="pt"))
    grid = tensors.get("image_grid_thw")
    if grid is not None:
        check_grid(images, np.asarray(grid), int(image_processor.merge_size))
    return tensors


def check_grid(images: Sequence[SampleImage], grid: npt.NDArray[Any], merge: int) -> None:
    """Check that each image has as many placeholders as its grid has tokens: t * h * w / merge².

    Args:
        images: The images.
        grid: Integers, shape (images, 3): frames, rows and columns of patches.
        merge: Side of the square of patches that one token stands for.

    Raises:
        ImageGridError: A number differs: the trainer's processor is not that of the engine.
    """
    tokens = [int(row.prod()) // merge**2 for row in grid]
    lengths = [each.length for each in images]
    if tokens != lengths:
        raise ImageGridError(
            f"The processor makes {tokens} tokens of the images, the engine made {lengths}. Give the trainer the "
            "processor of the engine's model, with the same limits of pixels (preprocessor_config.json)."
        )


def whole_images(images: Sequence[SampleImage], stop: int) -> int:
    """Return the largest cut at or before `stop` that splits no image."""
    return next((each.offset for each in images if each.offset < stop < each.stop), stop)
