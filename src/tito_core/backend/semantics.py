"""What an engine's logprobs mean, measured at connect and not assumed (law 11)."""

from __future__ import annotations

import uuid

import numpy as np

from tito_core.backend.protocol import Backend, EngineInfo, TokenRequest
from tito_core.backend.sampling import SamplingParams
from tito_core.ledger.turn import Semantics, TokenIds

_PROBE = SamplingParams(max_new_tokens=32, temperature=2.0, ignore_eos=True, seed=0)
SAME_NATS = 0.02
"""Two numbers this close, in nats, count as the same quantity: bfloat16 kernels differ by less in the median."""
APART_NATS = 0.2
"""Two numbers this far apart in the median are different quantities."""


async def measure_processing(backend: Backend, info: EngineInfo, prompt_ids: TokenIds) -> bool | None:
    """Tell whether sampled logprobs include the temperature, by sampling at T = 2 and re-scoring.

    Returns:
        False when they equal the raw scores, True when they clearly do not, None when it cannot be told.
    """
    room = (info.max_model_len or 4096) - len(prompt_ids)
    sampling = _PROBE.model_copy(update={"max_new_tokens": min(_PROBE.max_new_tokens, room)})
    response = await backend.generate(TokenRequest(prompt_ids, sampling, uuid.uuid4().hex))
    scored = await backend.score([*prompt_ids.tolist(), *response.output_ids.tolist()])
    difference = float(np.median(np.abs(scored[len(prompt_ids) :] - response.logprobs)))
    if difference < SAME_NATS:
        return False
    return True if difference > APART_NATS else None


def semantics_of(info: EngineInfo, sampling: SamplingParams) -> Semantics:
    """Say what the logprobs of one request mean, given what was measured of the server."""
    source = f"{info.backend} {info.version or 'of unknown version'}, measured at connect"
    penalised = bool(sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0)
    truncated = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
    constrained = sampling.grammar is not None  # a grammar masks the logits before raw logprobs, too
    if info.processed_logprobs is False:
        return Semantics(False, 1.0, constrained, source)
    # A greedy request is scored at temperature 1 by SGLang; a processed mode elsewhere is not known to.
    effective = sampling.temperature or 1.0
    adjusted = constrained or penalised or truncated or bool(sampling.extra)
    known = info.processed_logprobs is True or (sampling.temperature == 1.0 and not adjusted)
    return Semantics(info.processed_logprobs, effective if known else None, adjusted, source)
