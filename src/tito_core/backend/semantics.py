"""What an engine's logprobs mean, measured at connect and not assumed (law 11)."""

from __future__ import annotations

import uuid

import numpy as np

from tito_core.backend.aborts import generate_whole
from tito_core.backend.protocol import Backend, EngineInfo, TokenRequest
from tito_core.backend.sampling import SamplingParams
from tito_core.ledger.columns import TokenIds
from tito_core.ledger.turn import Semantics

_PROBE = SamplingParams(max_new_tokens=32, temperature=2.0, ignore_eos=True, seed=0)
SAME_NATS = 0.02
"""Two numbers this close, in nats, count as the same quantity: bfloat16 kernels differ by less in the median."""
APART_NATS = 0.2
"""Two numbers this far apart in the median are different quantities; logprobs that vary less cannot tell."""
LEAST_TOKENS = 8
"""With fewer sampled tokens the median says too little."""


async def measure_processing(backend: Backend, info: EngineInfo, prompt_ids: TokenIds) -> bool | None:
    """Tell whether sampled logprobs include the temperature, by sampling at T = 2 and re-scoring.

    Returns:
        False when they equal the raw scores, True when they clearly do not, None when it cannot be told: the context
        is too short, or the policy so certain or so undecided that a temperature changes nothing.
    """
    # Scoring needs room for one more token on vLLM.
    room = _PROBE.max_new_tokens if info.max_model_len is None else info.max_model_len - len(prompt_ids) - 1
    if room < LEAST_TOKENS:
        return None
    sampling = _PROBE.within(room)
    response = await generate_whole(backend, TokenRequest(prompt_ids, sampling, uuid.uuid4().hex))
    scored = await backend.score([*prompt_ids.tolist(), *response.output_ids.tolist()])
    raw = scored[len(prompt_ids) :]
    difference = float(np.median(np.abs(raw - response.logprobs)))
    if difference < SAME_NATS:
        return False if float(np.std(raw)) > APART_NATS else None
    return True if difference > APART_NATS else None


def semantics_of(info: EngineInfo, sampling: SamplingParams) -> Semantics:
    """Say what the logprobs of one request mean, given what was measured of the server."""
    source = f"{info.backend} {info.version or 'of unknown version'}, measured at connect"
    penalised = bool(sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0)
    truncated = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
    constrained = sampling.grammar is not None  # a grammar masks the logits before raw logprobs, too
    if info.processed_logprobs is False:
        return Semantics(False, 1.0, constrained, source)
    # Both engines compute processed logprobs of a greedy request at temperature 1.
    effective = sampling.temperature or 1.0
    # SGLang keeps stop tokens away for min_new_tokens by a penalty, and its logprobs come after penalties.
    adjusted = constrained or penalised or truncated or sampling.min_new_tokens > 0 or bool(sampling.extra)
    known = info.processed_logprobs is True or (sampling.temperature == 1.0 and not adjusted)
    return Semantics(info.processed_logprobs, effective if known else None, adjusted, source)
