"""Tinker: a trajectory as a `Datum`, with inputs without the last token and targets without the first."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from strands_tito.export.sample import TrainingSample
from strands_tito.export.trainer import LogprobPolicy, import_optional, logprobs_for, refuse_images

if TYPE_CHECKING:
    from tinker import Datum


def datum_of(
    sample: TrainingSample,
    *,
    advantage: float | npt.ArrayLike,
    temperature: float = 1.0,
    logprobs: LogprobPolicy = "checked",
) -> Datum:
    """Return a sample as the input of Tinker's "importance_sampling" and "ppo" losses.

    Args:
        sample: One trajectory of at least two tokens. If it ended from outside, the advantage is 0 everywhere.
        advantage: The rollout's advantage, or one for each token, shape (n,), such as those that you compute of
            `sample.credit`. It is 0 on untrained tokens, because these losses read no mask.
        temperature: Tinker's logit temperature, always 1.
        logprobs: See `LogprobPolicy`. These losses need logprobs, so that "omit" serves other losses only.

    Raises:
        ImagesNotSupportedError: The sample has images.
        MissingPackageError: tinker is not installed.
        LogprobMismatchError: The logprobs are not the quantity that Tinker computes.
        ValueError: The advantages are neither one number nor one for each token, or not finite where it is trained.
    """
    refuse_images(sample.images, "Tinker", sample.identity.rollout_id)
    tinker = import_optional("tinker", "tinker")
    values = logprobs_for(sample, temperature=temperature, trainer="Tinker", policy=logprobs)
    with np.errstate(over="ignore"):  # refused below
        given = np.asarray(advantage, np.float32)
    if given.shape not in ((), (len(sample),)):
        raise ValueError(
            f"Advantages of shape {given.shape}: give one number, or one for each of {len(sample)} tokens."
        )
    is_trained = (sample.loss_mask == 1) & (not sample.ended_outside)
    advantages = np.where(is_trained, given, np.float32(0))  # a product would keep the NaN of a missing reward
    if wrong := np.flatnonzero(~np.isfinite(advantages)).tolist():
        raise ValueError(
            f"The advantage is {advantages[wrong[0]]} at token {wrong[0]}, which is trained: give it a finite one, "
            "or leave the rollout out."
        )
    inputs = {"target_tokens": sample.token_ids[1:].astype(np.int64), "advantages": advantages[1:]}
    if values is not None:
        inputs["logprobs"] = values[1:]
    tensors = {name: tinker.TensorData.from_numpy(column) for name, column in inputs.items()}
    model_input = tinker.ModelInput.from_ints(sample.token_ids[:-1].tolist())
    return cast("Datum", tinker.Datum(model_input=model_input, loss_fn_inputs=tensors))
