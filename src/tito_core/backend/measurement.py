"""What an engine's logprobs mean and what it gives beside them, measured at connect and not assumed (law 11)."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tito_core.backend.checked import score
from tito_core.backend.engine_info import EngineInfo
from tito_core.backend.errors import BadRequestError, ProtocolViolationError
from tito_core.backend.optional_outputs import NO_OPTIONAL_OUTPUTS, Capabilities, OptionalOutputs
from tito_core.backend.protocol import Backend, TokenRequest, TokenResponse
from tito_core.backend.resume import generate_whole
from tito_core.backend.retries import together
from tito_core.backend.sampling import SamplingParams
from tito_core.ledger.columns import TokenIds

_PROBE = SamplingParams(max_new_tokens=32, temperature=2.0, ignore_eos=True, seed=0)
SAME_NATS = 0.02
"""Numbers of which most are this close, in nats, count as the same quantity."""
SAME_SHARE = 0.1
"""So do numbers this close, as a share of their spread, since bfloat16 tells logits of 16 only to 0.06 nats apart. At
T = 2 half of the processed logprobs are about three times as far from the raw ones. The spread is that of the middle
half: a few tokens far below the others would make it as wide as those are different."""
QUARTILES = 1.35
"""How far the quartiles of normal numbers lie apart, in standard deviations."""
MOST = 0.75
"""Of numbers that are the same."""
APART_NATS = 0.2
"""Two numbers this far apart in the median are different quantities; logprobs that vary less cannot tell."""
ALL_MASS = 0.98
"""Less probability than this is not all of it."""
MOST_ALIKE = 32
"""More tokens that are as likely as the second are not looked for."""
SAME_MASS = 0.1
"""In one place, two tokens that have no more than this beyond what they had have as much as before."""
CLEARLY_LESS = 0.8
"""Two tokens with less than this leave something to cut off."""
LEAST_TOKENS = 8
"""With fewer sampled tokens the median says too little."""
CERTAIN_NATS = 0.5
"""A token less unlikely than this says little: what is all but certain is so at any temperature."""
EVEN_NATS = 1e-3
"""Numbers of one quantity are taken to be no nearer than this, in nats: float32's, summed in another order."""
FAR = 8
"""So many times further apart than numbers of one quantity are on this server, two numbers are different ones."""


async def measure(backend: Backend, info: EngineInfo, prompt_ids: TokenIds) -> EngineInfo:
    """Find out what a server's logprobs mean and what it gives beside them, by sampling at T = 2, freely and of two.

    Returns:
        `info` with what was found. What cannot be told stays None: the context is too short, the server refuses to
        sample so, or the policy is so certain or so undecided that a temperature or a truncation changes nothing.
    """
    # Scoring needs room for one more token on vLLM.
    room = _PROBE.max_new_tokens if info.max_model_len is None else info.max_model_len - len(prompt_ids) - 1
    if room < LEAST_TOKENS:
        return info
    probe = TokenRequest(prompt_ids, _PROBE.within(room), "")
    async with together() as group:
        of_two = group.create_task(_sampled(backend, probe, top_k=2))
        freely = group.create_task(_freely(backend, probe))
    cut, gives = of_two.result()
    found = replace(info, capabilities=_found(info.capabilities, gives))
    if (whole := freely.result()) is None:
        return found
    free, processed = whole
    return replace(found, processed_logprobs=processed, truncated_logprobs=_is_truncated(cut, free))


def of_all(found: Sequence[EngineInfo]) -> EngineInfo:
    """Return what was measured of several servers alike; what one of them did not tell is not known of all."""
    whole = found[0]
    for other in found[1:]:
        if other.processed_logprobs is None:
            whole = replace(whole, processed_logprobs=None)
        if other.truncated_logprobs is None:
            whole = replace(whole, truncated_logprobs=None)
    return whole


async def _sampled(
    backend: Backend, probe: TokenRequest, top_k: int = -1
) -> tuple[TokenResponse, frozenset[str] | None]:
    """Sample with all that can be wanted, and give what came; None where the server would have none of it."""
    sampling = probe.sampling.model_copy(update={"top_k": top_k})
    optional_outputs = OptionalOutputs(
        top_logprobs=2, prompt_logprobs=True, routed_experts=True, sampling_mask=top_k > 0
    )
    request = replace(
        probe, sampling=sampling, request_id=uuid.uuid4().hex, optional_outputs=optional_outputs, lenient=True
    )
    try:
        response = await generate_whole(backend, request)
    except (BadRequestError, ProtocolViolationError) as error:
        error.with_traceback(None)
        plain = replace(request, request_id=uuid.uuid4().hex, optional_outputs=NO_OPTIONAL_OUTPUTS)
        return await generate_whole(backend, plain), None
    return response, frozenset(response.columns)


def _found(before: Capabilities, gives: frozenset[str] | None) -> Capabilities:
    if gives is None:
        return before
    return replace(
        before,
        top_logprobs=before.top_logprobs if "top_ids" in gives else 0,
        prompt_logprobs="prompt_logprobs" in gives,
        routed_experts="routed_experts" in gives,
        sampling_mask="sampling_mask" in gives,
    )


async def _freely(backend: Backend, probe: TokenRequest) -> tuple[TokenResponse, bool | None] | None:
    """Sample freely, and tell whether the logprobs are processed; None where the server refuses to sample so."""
    try:
        free, _ = await _sampled(backend, probe)
    except BadRequestError as error:  # a vLLM server that returns sampling masks samples of a finite top_k only
        error.with_traceback(None)
        return None
    return free, await _processed(backend, probe, free)


async def _processed(backend: Backend, probe: TokenRequest, free: TokenResponse) -> bool | None:
    """Tell by the raw logprobs of the free sample; where that leaves it open, by how far those of one at T = 1 are.

    At T = 1 both kinds are the same quantity, so what lies between them there is what this server's numbers vary by.
    """
    hot = await _compared(backend, probe.input_ids, free)
    if hot is None:
        return None
    found = _is_processed(hot)
    if found is not None:
        return found
    even = probe.sampling.model_copy(update={"temperature": 1.0})
    request = replace(probe, sampling=even, request_id=uuid.uuid4().hex)
    warm = await _compared(backend, probe.input_ids, await generate_whole(backend, request))
    return None if warm is None else _is_beyond(hot, warm)


@dataclass(frozen=True)
class _Compared:
    """How far a sample's logprobs are from the raw ones, in nats, of most and in the median, and how far those spread.

    `spread` is a standard deviation, of the middle half.
    """

    most: float
    median: float
    spread: float


async def _compared(backend: Backend, prompt_ids: TokenIds, sample: TokenResponse) -> _Compared | None:
    """Score a sample again; None where too few of its tokens tell anything."""
    scored = await score(backend, np.concatenate([prompt_ids, sample.output_ids]))
    raw = scored[len(prompt_ids) :]
    telling = raw < -CERTAIN_NATS
    if np.count_nonzero(telling) < LEAST_TOKENS:
        return None
    apart, (low, high) = np.abs(raw - sample.logprobs)[telling], np.quantile(raw[telling], (0.25, 0.75))
    return _Compared(float(np.quantile(apart, MOST)), float(np.median(apart)), float(high - low) / QUARTILES)


def _is_processed(hot: _Compared) -> bool | None:
    if hot.median > max(APART_NATS, SAME_SHARE * hot.spread):
        return True
    same = hot.most < max(SAME_NATS, SAME_SHARE * hot.spread)
    return False if same and hot.spread > APART_NATS else None


def _is_beyond(hot: _Compared, even: _Compared) -> bool | None:
    noise = max(even.most, EVEN_NATS)
    if hot.median > FAR * noise:
        return True
    return False if hot.most < 2 * noise and hot.spread > 2 * FAR * noise else None


def _is_truncated(cut: TokenResponse, free: TokenResponse) -> bool | None:
    """Tell by the two likeliest of each token: of two they have all the probability, if that of the rest was cut off.

    The first token has the same prompt before it both times, so it tells where the rest had some. Later ones, which
    differ, can only tell that nothing was cut off: a policy that is certain leaves nothing to the rest by itself. Of
    tokens that are as likely as the second, as they often are in bfloat16, a server may leave all.
    """
    if not all("top_logprobs" in response.columns for response in (cut, free)):
        return None
    two, all_ = (np.exp(each.columns["top_logprobs"].values.astype(np.float64)) for each in (cut, free))
    of_two, of_all, alike = np.nansum(two, axis=1), float(np.nansum(all_[0])), _alike(two)
    if of_all < CLEARLY_LESS:
        if of_two[0] >= ALL_MASS:
            return True
        if not alike[0] and of_two[0] - of_all < SAME_MASS:
            return False
    return False if np.median(np.where(alike, 1.0, of_two)) < ALL_MASS else None


def _alike(two: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Tell where all that two tokens lack may be that of others as likely as the second, which a server leaves, too."""
    likeliest, second = two.max(axis=1), two.min(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        lacking = (1 - likeliest) / second
    found: NDArray[np.bool_] = (lacking < MOST_ALIKE) & (np.abs(lacking - np.rint(lacking)) < 0.01)
    return found
