"""A rollout as one prompt and one response of bounded length, for trainers that take exactly that."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from strands_tito.export.images import (
    ImagesNotSupportedError,
    SampleImage,
    refuse_images,
    refuse_stray_placeholders,
    whole_images,
)
from strands_tito.export.logprobs import LogprobPolicy, logprobs_for
from strands_tito.export.sample import TrainingSample, experts_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class PromptResponse:
    """One prompt and one response. `response_ids`, `mask` and `logprobs` have one length, at least 1.

    Attributes:
        prompt_ids: The prompt.
        response_ids: Sampled tokens and the tokens between them.
        mask: 1 on trained tokens of the response.
        logprobs: Logprobs of trained tokens, 0.0 on others; None with `logprobs="omit"`.
        experts: Routed experts, shape (tokens - 1, layers, experts), or None.
        truncated: Number of tokens cut from the end of the response.
        images: The images of prompt and response, in order.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    mask: list[int]
    logprobs: list[float] | None
    experts: npt.NDArray[np.int16] | None
    truncated: int
    images: tuple[SampleImage, ...] = ()


def prompt_response_of(
    sample: TrainingSample,
    *,
    trainer: str,
    temperature: float,
    logprobs: LogprobPolicy = "checked",
    max_prompt_length: int | None = None,
    max_response_length: int | None = None,
    takes_images: bool = False,
) -> PromptResponse:
    """Split a sample into prompt and response.

    If the rollout ended from outside, the mask is 0 everywhere: its reward does not measure the policy.

    Args:
        sample: The sample.
        trainer: The trainer's name, for errors.
        temperature: The trainer's logit temperature.
        logprobs: See `LogprobPolicy`.
        max_prompt_length: Longest prompt. The rest of a longer one moves to the start of the response, untrained; an
            image moves whole.
        max_response_length: Longest response. A longer one is cut at its end, with a warning, never inside an image.
        takes_images: Whether the trainer trains with the images.

    Raises:
        ImagesNotSupportedError: The sample has images, and the trainer takes none, or the response begins with an image
            that is longer than a response may be.
        SampledPlaceholderError: The policy sampled the placeholder of images: they would be put in other places.
        LogprobMismatchError: The logprobs are not the quantity that the trainer computes.
        ValueError: The engine reported experts for some tokens only.
    """
    if not takes_images:
        refuse_images(sample.images, trainer, sample.identity.rollout_id)
    values = logprobs_for(sample, temperature=temperature, trainer=trainer, policy=logprobs)
    start = sample.prompt_length if max_prompt_length is None else min(sample.prompt_length, max_prompt_length)
    start = whole_images(sample.images, start)
    stop = len(sample) if max_response_length is None else min(len(sample), start + max_response_length)
    stop = whole_images(sample.images, stop)
    if stop <= start and sample.images:
        raise ImagesNotSupportedError(
            f"The response of rollout {sample.identity.rollout_id} would begin with an image that does not fit into "
            f"{max_response_length} tokens. Raise max_response_length or max_prompt_length."
        )
    images = tuple(each for each in sample.images if each.stop <= stop)
    if takes_images:
        refuse_stray_placeholders(
            sample.token_ids[:stop], images, sample.media_ids, trainer, sample.identity.rollout_id
        )
    truncated = len(sample) - stop
    if truncated:
        logger.warning(
            "rollout=<%s>, cut=<%d> | response cut: %s takes at most %d tokens, the rest is not trained",
            sample.identity.rollout_id, truncated, trainer, stop - start,
        )  # fmt: skip
    experts = experts_of(sample)
    mask = np.zeros(stop - start, np.int64) if sample.ended_outside else sample.loss_mask[start:stop]
    return PromptResponse(
        sample.token_ids[:start].tolist(),
        sample.token_ids[start:stop].tolist(),
        mask.tolist(),
        None if values is None else values[start:stop].tolist(),
        None if experts is None else experts[:stop].astype(np.int16),
        truncated,
        images,
    )


def empty_response(end_id: int, *, logprobs: bool = True) -> PromptResponse:
    """Return a placeholder for a rollout without turns: one untrained end token as prompt and one as response."""
    return PromptResponse([end_id], [end_id], [0], [0.0] if logprobs else None, None, 0)
