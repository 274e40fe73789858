"""What a server's logprobs mean (law 11): measured at connect, and derived for each request."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tito_core.backend.errors import BadRequestError, DamagedAnswerError, ProtocolViolationError, task_group
from tito_core.backend.generate import score
from tito_core.backend.protocol import (
    NO_OPTIONAL_OUTPUTS,
    Backend,
    Capabilities,
    EngineInfo,
    OptionalOutputs,
    TokenRequest,
    TokenResponse,
)
from tito_core.backend.resume import generate_resuming
from tito_core.backend.sampling import SamplingParams
from tito_core.ledger.columns import TokenIds
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


_PROBE = SamplingParams(max_new_tokens=32, temperature=2.0, ignore_eos=True, seed=0)
WIDE_TOP_K = 1000
"""Stands for all tokens on a server that needs a finite `top_k` (vLLM with --return-sampling-mask)."""
SAME_NATS = 0.02
"""Two sets of logprobs are the same quantity if most of them differ by less than this, in nats."""
SAME_SHARE = 0.1
"""The same bound as a share of the logprobs' spread, as bfloat16 resolves logits of 16 only to 0.06 nats. At T = 2 half
of the processed logprobs differ from the raw ones by about three times as much. The spread is that of the middle half,
because a few very unlikely tokens would make it as wide as the difference."""
QUARTILES = 1.35
"""Distance of the quartiles of a normal distribution, in standard deviations."""
MOST = 0.75
"""The quantile that stands for "most"; most are above the opposite one."""
APART_NATS = 0.2
"""Least median difference of different quantities, in nats. With a smaller spread, nothing can be measured."""
ALL_MASS = 0.98
"""A total probability below this is not 1."""
MOST_TIED = 32
"""Maximum number of tokens that are as likely as the second one and are considered."""
SAME_MASS = 0.1
"""A top-2 probability that grows by less than this is unchanged."""
CLEARLY_LESS = 0.8
"""With a top-2 probability below this, a truncation is visible."""
LEAST_TOKENS = 8
"""Fewest tokens for a meaningful median."""
CERTAIN_NATS = 0.5
"""Tokens with a raw logprob above minus this are ignored: they are nearly certain at any temperature."""
EVEN_NATS = 1e-3
"""Least noise of equal logprobs, in nats: float32 sums in another order."""
FAR = 8
"""Logprobs that differ by this many times the server's noise are different quantities."""
BEYOND = 3
"""The same bound where the median also says so. Equal quantities have a median of half of `most`: noise alone would
have to make one six times as large as the other, by chance."""


async def measure(backend: Backend, info: EngineInfo, prompt_ids: TokenIds) -> EngineInfo:
    """Measure a server by sampling at T = 2, once from all tokens and once with top_k = 2.

    Returns:
        `info` with the measured fields. A field stays None if the context is too short, the server refuses the request,
        or the policy is so certain or so uniform that temperature or truncation have no visible effect.
    """
    # Scoring needs room for one more token on vLLM.
    room = _PROBE.max_new_tokens if info.max_model_len is None else info.max_model_len - len(prompt_ids) - 1
    if room < LEAST_TOKENS:
        return info
    probe = TokenRequest(prompt_ids, _PROBE.within(room), "", is_probe=True)
    async with task_group() as group:
        top_two_task = group.create_task(_sample(backend, probe, top_k=2))
        full_task = group.create_task(_sample_widely(backend, probe))
    top_two, columns = top_two_task.result()
    measured = replace(info, capabilities=_supported(info.capabilities, columns))
    if (result := full_task.result()) is None:
        return _described(measured, top_two)
    full, processed = result
    measured = _described(measured, top_two, full)
    return replace(measured, processed_logprobs=processed, truncated_logprobs=_is_truncated(top_two, full))


def _described(info: EngineInfo, *answers: TokenResponse) -> EngineInfo:
    """Return the properties with what the measured answers say of themselves, which later answers must say too."""
    return replace(
        info,
        answering_models=frozenset(answer.model for answer in answers if answer.model is not None),
        reports_versions=all(span.version is not None for answer in answers for span in answer.versions),
    )


async def _sample(backend: Backend, probe: TokenRequest, top_k: int) -> tuple[TokenResponse, frozenset[str] | None]:
    """Sample with all optional outputs; return the answer and its columns, or None for these if the server refuses."""
    sampling = probe.sampling.model_copy(update={"top_k": top_k})
    optional_outputs = OptionalOutputs(
        top_logprobs=2, prompt_logprobs=True, routed_experts=True, sampling_mask=top_k > 0
    )
    request = replace(
        probe,
        sampling=sampling,
        request_id=uuid.uuid4().hex,
        optional_outputs=optional_outputs,
    )
    try:
        response = await generate_resuming(backend, request)
    except (BadRequestError, ProtocolViolationError) as error:
        if isinstance(error, DamagedAnswerError):
            raise
        error.with_traceback(None)
        plain = replace(request, request_id=uuid.uuid4().hex, optional_outputs=NO_OPTIONAL_OUTPUTS)
        return await generate_resuming(backend, plain), None
    return response, frozenset(response.columns)


def _supported(reported: Capabilities, columns: frozenset[str] | None) -> Capabilities:
    if columns is None:
        return reported
    return replace(
        reported,
        top_logprobs=reported.top_logprobs if "top_ids" in columns else 0,
        prompt_logprobs="prompt_logprobs" in columns,
        routed_experts="routed_experts" in columns,
        sampling_mask="sampling_mask" in columns,
    )


async def _sample_widely(backend: Backend, probe: TokenRequest) -> tuple[TokenResponse, bool | None] | None:
    """Sample from all tokens, or from `WIDE_TOP_K` where the server refuses that.

    Returns:
        The answer, and whether its logprobs are processed; None if the server refused both.
    """
    for top_k in (-1, WIDE_TOP_K):
        try:
            full, _ = await _sample(backend, probe, top_k)
        except BadRequestError as error:
            error.with_traceback(None)
            continue
        wide = replace(probe, sampling=probe.sampling.model_copy(update={"top_k": top_k}))
        return full, await _processed(backend, wide, full)
    return None


async def _processed(backend: Backend, probe: TokenRequest, full: TokenResponse) -> bool | None:
    """Return whether logprobs are processed: compare the sample with raw scores, if needed also a sample at T = 1.

    At T = 1 raw and processed logprobs are equal, so their difference there is the server's numerical noise.
    """
    hot = await _compare(backend, probe.input_ids, full)
    if hot is None:
        return None
    processed = _is_processed(hot)
    if processed is not None:
        return processed
    even = probe.sampling.model_copy(update={"temperature": 1.0})
    request = replace(probe, sampling=even, request_id=uuid.uuid4().hex)
    warm = await _compare(backend, probe.input_ids, await generate_resuming(backend, request))
    return None if warm is None else _exceeds_noise(hot, warm)


@dataclass(frozen=True)
class _Difference:
    """The difference of a sample's logprobs from its raw scores, in nats.

    Attributes:
        most: Its upper quartile.
        median: Its median.
        least: Its lower quartile. The median of eight tokens can be noise by chance, this hardly.
        spread: Standard deviation of the raw scores, estimated from their middle half.
    """

    most: float
    median: float
    least: float
    spread: float


async def _compare(backend: Backend, prompt_ids: TokenIds, sample: TokenResponse) -> _Difference | None:
    """Score a sample again; None if too few of its tokens are uncertain."""
    scored = await score(backend, np.concatenate([prompt_ids, sample.output_ids]))
    raw = scored[len(prompt_ids) :]
    uncertain = raw < -CERTAIN_NATS
    if np.count_nonzero(uncertain) < LEAST_TOKENS:
        return None
    difference = np.abs(raw - sample.logprobs)[uncertain]
    low, high = np.quantile(raw[uncertain], (0.25, 0.75))
    least, median, most = np.quantile(difference, (1 - MOST, 0.5, MOST))
    return _Difference(float(most), float(median), float(least), float(high - low) / QUARTILES)


def _apart(spread: float) -> float:
    """Return the least difference of different quantities, in nats."""
    return max(APART_NATS, SAME_SHARE * spread)


def _is_processed(hot: _Difference) -> bool | None:
    if hot.least > _apart(hot.spread):
        return True
    same = hot.most < max(SAME_NATS, SAME_SHARE * hot.spread)
    return False if same and hot.spread > APART_NATS else None


def _exceeds_noise(hot: _Difference, warm: _Difference) -> bool | None:
    noise = max(warm.most, EVEN_NATS)
    if hot.median > (BEYOND if hot.median > _apart(hot.spread) else FAR) * noise:
        return True
    return False if hot.most < 2 * noise and hot.spread > 2 * FAR * noise else None


def _is_truncated(top_two: TokenResponse, full: TokenResponse) -> bool | None:
    """Return whether logprobs are normalised over the kept tokens: then the top 2 of each token sum to 1 at top_k = 2.

    Both samples have the same prompt before their first token, so it shows whether the other tokens had any
    probability. Later tokens differ; they can only show that nothing was truncated, as a certain policy leaves no
    probability to other tokens anyway. A server may keep all tokens tied with the second, which bfloat16 often has.
    """
    if not all("top_logprobs" in response.columns for response in (top_two, full)):
        return None
    cut, free = (np.exp(each.columns["top_logprobs"].values.astype(np.float64)) for each in (top_two, full))
    cut_mass, free_mass, tied = np.nansum(cut, axis=1), float(np.nansum(free[0])), _may_be_tied(cut)
    if free_mass < CLEARLY_LESS:
        if cut_mass[0] >= ALL_MASS:
            return True
        if not tied[0] and cut_mass[0] - free_mass < SAME_MASS:
            return False
    return False if np.median(np.where(tied, 1.0, cut_mass)) < ALL_MASS else None


def _may_be_tied(top_two: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return per row whether tokens tied with the second, which a server keeps, may hold the missing probability."""
    first, second = top_two.max(axis=1), top_two.min(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        ties = (1 - first) / second
    tied: NDArray[np.bool_] = (ties < MOST_TIED) & (np.abs(ties - np.rint(ties)) < 0.01)
    return tied
