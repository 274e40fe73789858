"""The semantics of one request's logprobs (law 11)."""

from __future__ import annotations

from tito_core.backend.engine_info import EngineInfo
from tito_core.backend.sampling import SamplingParams
from tito_core.ledger.turn import Semantics


def semantics_of(info: EngineInfo, sampling: SamplingParams) -> Semantics:
    """Return the semantics of one request's logprobs, from the measured properties of the server."""
    source = f"{info.backend} {info.version or 'of unknown version'}, measured at connect"
    penalties = bool(sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0)
    # SGLang implements min_new_tokens as a penalty on stop tokens, and takes all its logprobs after penalties.
    penalised = penalties or sampling.min_new_tokens > 0 or bool(sampling.extra)
    truncated = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
    constrained = sampling.grammar is not None  # a grammar also masks the logits of raw logprobs
    normalised_over_kept = truncated and info.truncated_logprobs is not False
    if info.processed_logprobs is False:
        moved = constrained or (penalised and not info.raw_before_penalties)
        return Semantics(False, 1.0, moved or (truncated and info.truncated_logprobs is True), source)
    # Both engines compute processed logprobs of a greedy request at temperature 1.
    effective = sampling.temperature or 1.0
    adjusted = constrained or penalised or normalised_over_kept
    known = info.processed_logprobs is True or (effective == 1.0 and not adjusted)  # then raw ones are the same
    return Semantics(info.processed_logprobs, effective if known else None, adjusted, source)
