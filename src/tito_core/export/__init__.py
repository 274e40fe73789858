"""Exporters: one shape, `TrainingSample`, and a module for each trainer that builds the trainer's own types from it.

Importing this package, or a module of it, imports no trainer; calling a module's functions does.
"""

from tito_core.export.logprobs import LogprobMismatchError, logprobs_for
from tito_core.export.missing import MissingPackageError
from tito_core.export.sample import (
    BranchedRolloutError,
    Identity,
    TrainingSample,
    sample_of,
    samples_of,
    trained_tokens,
)

__all__ = [
    "BranchedRolloutError",
    "Identity",
    "LogprobMismatchError",
    "MissingPackageError",
    "TrainingSample",
    "logprobs_for",
    "sample_of",
    "samples_of",
    "trained_tokens",
]
