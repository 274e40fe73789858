"""Exporters: one shape, `TrainingSample`, and a module for each trainer that builds the trainer's own types from it.

Importing this package, or a module of it, imports no trainer; calling a module's functions does.
"""

from strands_tito.export.logprobs import LogprobMismatchError, logprobs_for
from strands_tito.export.missing import MissingPackageError
from strands_tito.export.sample import (
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
