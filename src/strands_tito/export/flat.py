"""A rollout as lists of a fixed size at most, for trainers that take one prompt and one response a rollout."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from strands_tito.export.logprobs import LogprobPolicy, logprobs_for
from strands_tito.export.sample import TrainingSample, experts_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Flat:
    """One prompt and one response. The lists of the response have one length, at least 1.

    Attributes:
        prompt_ids: The prompt.
        response_ids: Sampled tokens and those between them.
        mask: 1 where a token is trained.
        logprobs: Of trained tokens; 0.0 on others. None where they were to be left out.
        experts: The engine's, (tokens - 1, layers, experts), or None.
        cut: Tokens that were left out at the end, since the response was longer than asked for.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    mask: list[int]
    logprobs: list[float] | None
    experts: npt.NDArray[np.int16] | None
    cut: int


def flat_of(
    sample: TrainingSample,
    *,
    trainer: str,
    temperature: float,
    logprobs: LogprobPolicy = "checked",
    most_prompt: int | None = None,
    most_response: int | None = None,
) -> Flat:
    """Lay a sample out.

    No token of a rollout that ended from outside is trained: its reward says nothing of the policy.

    Args:
        sample: The sample.
        trainer: The trainer's name, for errors.
        temperature: What it divides its logits by.
        logprobs: See `LogprobPolicy`.
        most_prompt: Longest prompt; what is more comes first in the response, untrained, so that nothing is lost.
        most_response: Longest response; what is more is cut off at its end, with a warning.

    Raises:
        LogprobMismatchError: The logprobs are another quantity than the trainer's.
        ValueError: The engine gave experts for some tokens only.
    """
    given = logprobs_for(sample, temperature=temperature, trainer=trainer, policy=logprobs)
    start = sample.prompt_length if most_prompt is None else min(sample.prompt_length, most_prompt)
    stop = len(sample) if most_response is None else min(len(sample), start + most_response)
    cut = len(sample) - stop
    if cut:
        logger.warning(
            "rollout=<%s>, cut=<%d> | %s takes responses of %d tokens: the rest is not trained",
            sample.identity.rollout_id, cut, trainer, stop - start,
        )  # fmt: skip
    experts = experts_of(sample)
    mask = np.zeros(stop - start, np.uint8) if sample.ended_outside else sample.loss_mask[start:stop]
    return Flat(
        sample.token_ids[:start].tolist(),
        sample.token_ids[start:stop].tolist(),
        mask.tolist(),
        None if given is None else given[start:stop].tolist(),
        None if experts is None else experts[:stop].astype(np.int16),
        cut,
    )


def nothing(end_id: int, *, logprobs: bool = True) -> Flat:
    """Stand for a rollout in which nothing was sampled: an end token on either side, which is not trained."""
    return Flat([end_id], [end_id], [0], [0.0] if logprobs else None, None, 0)
