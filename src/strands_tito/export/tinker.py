"""Tinker's `Datum`, from a rollout: inputs without the last token, targets without the first."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from strands_tito.export.logprobs import LogprobPolicy, logprobs_for
from strands_tito.export.missing import imported
from strands_tito.export.sample import TrainingSample

if TYPE_CHECKING:
    from tinker import Datum


def datum_of(
    sample: TrainingSample, *, advantage: float, temperature: float = 1.0, logprobs: LogprobPolicy = "checked"
) -> Datum:
    """Return a sample as the input of Tinker's "importance_sampling" and "ppo" losses.

    Args:
        sample: One trajectory, of at least two tokens. One that ended from outside has advantage 0 everywhere.
        advantage: Of the rollout; 0 on what is not trained, since these losses read no mask.
        temperature: What Tinker divides logits by, 1.
        logprobs: See `LogprobPolicy`; "omit" gives none, which these losses do not take.

    Raises:
        MissingPackageError: tinker is not installed.
        LogprobMismatchError: The logprobs are another quantity than Tinker's.
    """
    tinker = imported("tinker", "tinker")
    given = logprobs_for(sample, temperature=temperature, trainer="Tinker", policy=logprobs)
    trained = np.zeros(len(sample), np.float32) if sample.ended_outside else sample.loss_mask.astype(np.float32)
    inputs = {"target_tokens": sample.token_ids[1:].astype(np.int64), "advantages": trained[1:] * np.float32(advantage)}
    if given is not None:
        inputs["logprobs"] = given[1:]
    tensors = {name: tinker.TensorData.from_numpy(values) for name, values in inputs.items()}
    model_input = tinker.ModelInput.from_ints(sample.token_ids[:-1].tolist())
    return cast("Datum", tinker.Datum(model_input=model_input, loss_fn_inputs=tensors))
