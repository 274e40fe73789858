"""The measurement at connect: its requests, and its results for any numbers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from support.backends import PROMPT
from tito_core.backend import BadRequestError, Capabilities, EngineInfo, ProtocolViolationError, SamplingParams
from tito_core.backend import semantics as measurement
from tito_core.backend.protocol import NO_OPTIONAL_OUTPUTS, TokenRequest, TokenResponse
from tito_core.backend.semantics import measure
from tito_core.ledger.columns import Column
from tito_core.ledger.turn import Finish, VersionSpan

IDS = np.array(PROMPT, np.int32)
INFO = EngineInfo("fake", "m", None, "1")


class MeasuredServer:
    """A backend that reports and scores given logprobs, and records its requests.

    At T = 1 it reports and scores the pair `even`; by default almost certain tokens, which decide nothing.
    """

    name = "fake"

    def __init__(
        self,
        reported: Sequence[float],
        scored: Sequence[float],
        top: tuple[Sequence[float], Sequence[float]] | None = None,
        refuses: Sequence[Exception | None] = (),
        even: tuple[Sequence[float], Sequence[float]] | None = None,
    ) -> None:
        self.reported, self.scored, self.top, self.refuses = reported, scored, top, list(refuses)
        self.even = ([-0.1] * len(reported), [-0.1] * len(reported)) if even is None else even
        self.requests: list[TokenRequest] = []
        self.sequences: list[list[int]] = []

    async def generate(self, request: TokenRequest, on_chunk: Any = None) -> TokenResponse:
        self.requests.append(request)
        if self.refuses and (error := self.refuses.pop(0)) is not None:
            raise error
        reported = self.even[0] if request.sampling.temperature == 1.0 else self.reported
        ids = np.arange(len(reported), dtype=np.int32)
        columns: dict[str, Column] = {}
        if self.top is not None:
            pair = self.top[0 if request.sampling.top_k == 2 else 1]
            table = np.log(np.array([pair] * len(ids), np.float64)).astype(np.float32)
            columns = {"top_ids": Column.of(5, np.zeros(table.shape, np.int32)), "top_logprobs": Column.of(5, table)}
        spans = (VersionSpan(0, len(ids), None),)
        logprobs = np.array(reported, np.float32)
        return TokenResponse(
            ids, logprobs, Finish.LENGTH, None, 5, None, 0.1, request.request_id, spans, columns=columns
        )

    async def score(self, token_ids: Sequence[int]) -> Any:
        self.sequences.append(list(token_ids))
        scored = self.even[1] if self.requests[-1].sampling.temperature == 1.0 else self.scored
        return np.array([np.nan, *[-9.0] * (len(PROMPT) - 1), *scored], np.float32)


def found(backend: MeasuredServer, info: EngineInfo = INFO) -> EngineInfo:
    """Measure with the backend's responses, unvalidated: it invents columns that no server could return together."""

    async def given(backend: Any, request: TokenRequest) -> TokenResponse:
        response: TokenResponse = await backend.generate(request)
        return response

    async def scores(backend: Any, token_ids: Any) -> Any:
        return await backend.score(token_ids.tolist())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measurement, "generate_resuming", given)
        patch.setattr(measurement, "score", scores)
        return asyncio.run(measure(backend, info, IDS))


def test_it_samples_with_top_k_2_and_without_and_scores_the_latter() -> None:
    backend = MeasuredServer([-1.0] * 32, [-2.0] * 32)
    assert found(backend).processed_logprobs is True
    cut, free = backend.requests
    for request, top_k in ((cut, 2), (free, -1)):
        assert request.sampling == SamplingParams(
            max_new_tokens=32, temperature=2.0, ignore_eos=True, seed=0, top_k=top_k
        )
        assert request.optional_outputs.model_dump() == {
            "top_logprobs": 2,
            "prompt_logprobs": True,
            "routed_experts": True,
            "sampling_mask": top_k == 2,
            "priority": None,
            "cache_salt": None,
        }
        assert request.is_probe
        assert request.input_ids is IDS
    assert len({request.request_id for request in backend.requests} - {""}) == 2
    assert backend.sequences == [[*PROMPT, *range(32)]]


def test_a_short_context_is_filled_and_a_too_short_one_is_not_measured() -> None:
    backend = MeasuredServer([-1.0] * 8, [-2.0] * 8)
    found(backend, EngineInfo("fake", "m", 14, "1"))
    assert [request.sampling.max_new_tokens for request in backend.requests] == [8, 8]
    short = EngineInfo("fake", "m", 13, "1")
    backend = MeasuredServer([], [])
    assert found(backend, short) is short
    assert backend.requests == []


@pytest.mark.parametrize("apart", [0.0, 0.01, 0.05, 0.19, 0.21, 1.0])
@pytest.mark.parametrize("spread", [0.0, 0.1, 0.3, 1.0, 4.0])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_logprobs_near_the_scores_are_raw_and_far_ones_are_processed(apart: float, spread: float, sign: float) -> None:
    scored = [-5.0 - spread, -5.0 + spread] * 8
    info = found(MeasuredServer([value + sign * apart for value in scored], scored))
    if apart > max(0.2, 0.1 * spread):
        assert info.processed_logprobs is True
    elif apart < max(0.02, 0.1 * spread):
        assert info.processed_logprobs is (False if spread > 0.2 else None)
    else:
        assert info.processed_logprobs is None
    assert info.truncated_logprobs is None


def test_three_very_unlikely_tokens_are_no_spread() -> None:
    """Of 32: else what lies 0.3 nats apart in most places would count as the same."""
    scored = [*np.linspace(-10.6, -9.4, 29).tolist(), -24.0, -24.0, -24.0]
    reported = [value + 0.3 for value in scored[:29]] + [-12.5] * 3
    assert found(MeasuredServer(reported, scored)).processed_logprobs is True


def test_an_open_result_is_measured_again_at_temperature_1() -> None:
    backend = MeasuredServer([-1.1] * 32, [-1.0] * 32, even=([-1.0] * 31, [-1.0] * 31))
    assert found(backend).processed_logprobs is True
    _, free, even = backend.requests
    assert even.sampling == free.sampling.model_copy(update={"temperature": 1.0})
    assert (even.optional_outputs, even.is_probe) == (NO_OPTIONAL_OUTPUTS, True)
    assert even.request_id not in ("", free.request_id)
    assert backend.sequences == [[*PROMPT, *range(32)], [*PROMPT, *range(31)]]


@pytest.mark.parametrize(
    ("apart", "spread", "noise", "processed"),
    [
        (0.1, 0.4, 0.0, True),
        (0.1, 0.4, 0.012, True),
        (0.1, 0.4, 0.013, None),
        (0.1, 0.4, 0.04, None),
        (0.009, 0.02, 0.0, True),
        (0.007, 0.02, 0.0, None),
        (0.0015, 0.02, 0.0, False),
        (0.0015, 0.015, 0.0, None),
        (0.015, 0.18, 0.01, False),
        (0.015, 0.15, 0.01, None),
        (0.03, 0.5, 0.016, False),
        (0.0, 0.0, 0.0, None),
    ],
)
def test_an_open_result_is_decided_by_the_noise_of_the_server(
    apart: float, spread: float, noise: float, processed: bool | None
) -> None:
    """`spread` as a standard deviation, of numbers: half lie at each end."""
    scored = [-5.0 - spread * 0.675, -5.0 + spread * 0.675] * 8
    even = ([value + noise for value in scored], scored)
    assert found(MeasuredServer([value - apart for value in scored], scored, even=even)).processed_logprobs is processed


class Policy(MeasuredServer):
    """Samples from logits, by a place's own, and says raw or processed logprobs, as exact as `noise` is small."""

    def __init__(self, logits: NDArray[np.float64], processes: bool, noise: float, draws: np.random.Generator) -> None:
        super().__init__([], [])
        self.logits, self.processes, self.noise, self.draws = logits, processes, noise, draws

    async def generate(self, request: TokenRequest, on_chunk: Any = None) -> TokenResponse:
        heat = request.sampling.temperature
        raw, processed = self.of(self.logits), self.of(self.logits / heat)
        sampled = np.argmax(processed + self.draws.gumbel(size=processed.shape), axis=1)
        exact = (processed if self.processes else raw)[np.arange(32), sampled]
        self.reported = (exact + self.blur()).tolist()
        self.scored = (raw[np.arange(32), sampled] + self.blur()).tolist()
        self.even = (self.reported, self.scored)
        return await super().generate(request)

    def blur(self) -> NDArray[np.float64]:
        return self.draws.normal(0, self.noise, 32)

    def of(self, logits: NDArray[np.float64]) -> NDArray[np.float64]:
        whole: NDArray[np.float64] = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
        return whole


@settings(max_examples=15)
@given(
    st.integers(0, 2**32 - 1),
    st.floats(0.0, 8.0),
    st.floats(0.0, 0.12),
    st.sampled_from([40, 1000, 5000]),
    st.floats(0.0, 1.0),
)
@example(8017427, 8.0, 0.109375, 40, 0.5)  # noise makes the median of the few uncertain tokens large
def test_raw_and_processed_are_not_confused_in_the_second_measurement(
    seed: int, scale: float, noise: float, vocabulary: int, certain: float
) -> None:
    draws = np.random.default_rng(seed)
    logits = draws.normal(0, scale, (32, vocabulary))
    logits[draws.random(32) < certain, 7] += 20 * scale
    for processes in (False, True):
        assert found(Policy(logits, processes, noise, draws)).processed_logprobs in (processes, None)


@settings(max_examples=15)
@given(st.integers(0, 2**32 - 1), st.floats(0.1, 8.0), st.floats(0.0, 1e-4), st.sampled_from([1000, 5000]))
def test_a_server_of_exact_numbers_is_always_measured(seed: int, scale: float, noise: float, vocabulary: int) -> None:
    """SGLang draws again at each connect: random weights, spread by 0.75 nats, were left open at one in twelve."""
    draws = np.random.default_rng(seed)
    logits = draws.normal(0, scale, (32, vocabulary))
    for processes in (False, True):
        assert found(Policy(logits, processes, noise, draws)).processed_logprobs is processes


def masses(first: tuple[float, float], rest: tuple[float, float], places: int = 8) -> bool | None:
    """Find out from the probability that two tokens have in the first place and in the others, cut off and freely."""

    class Masses(MeasuredServer):
        async def generate(self, request: TokenRequest, on_chunk: Any = None) -> TokenResponse:
            response = await super().generate(request)
            which = 0 if request.sampling.top_k == 2 else 1
            mass = np.array([first[which], *[rest[which]] * (places - 1)])
            table = np.log(np.stack([mass - 0.125, np.full(places, 0.125)], axis=1)).astype(np.float32)
            columns = {"top_ids": Column.of(5, np.zeros(table.shape, np.int32)), "top_logprobs": Column.of(5, table)}
            return replace(response, columns=columns)

    return found(Masses([-1.0] * places, [-1.0] * places)).truncated_logprobs


CUT: list[tuple[tuple[float, float], tuple[float, float], bool | None]] = [
    # the first place, cut off and freely; the others
    ((1.0, 0.3), (1.0, 0.3), True),
    ((0.99, 0.79), (0.5, 0.3), True),  # the others: equally likely ones that a server left
    ((0.3, 0.3), (0.99, 0.3), False),  # the others: certain by themselves
    ((0.85, 0.79), (1.0, 0.3), False),
    ((0.3, 0.32), (0.3, 0.3), False),
    ((0.66, 0.4), (1.0, 0.3), None),
    ((0.66, 0.4), (0.9, 0.3), False),
    ((1.0, 0.81), (1.0, 0.3), None),  # certain where both can be compared
    ((1.0, 0.81), (0.97, 0.3), False),
    ((0.9, 0.9), (0.9, 0.9), False),
    ((1.0, 1.0), (1.0, 1.0), None),
]


@pytest.mark.parametrize(("first", "rest", "truncated"), CUT)
def test_a_truncation_shows_in_the_mass_of_the_top_two(
    first: tuple[float, float], rest: tuple[float, float], truncated: bool | None
) -> None:
    assert masses(first, rest) is truncated


def left(*logits: float, of: int) -> tuple[float, float]:
    """Return the two likeliest of some tokens, at T = 2, among the first of them."""
    weights = np.exp(np.array(logits) / 2)
    weights = np.sort(weights)[::-1][:of] / np.sum(np.sort(weights)[::-1][:of])
    return float(weights[0]), float(weights[1])


@pytest.mark.parametrize(
    ("logits", "stay"),
    [
        ((3.0, 3.0, 3.0, -2.0, -3.0), 3),
        ((4.0, 3.5, 3.5, -2.0, -3.0), 3),
        ((4.0, 3.5, 3.5, 3.5, 3.5, -4.0), 5),
    ],
)
def test_a_server_that_keeps_tied_tokens_is_not_taken_for_untruncated(logits: tuple[float, ...], stay: int) -> None:
    """As both engines do with top_k, and of bfloat16's logits many are equal."""
    cut, free = left(*logits, of=stay), left(*logits, of=len(logits))
    assert found(MeasuredServer([-1.0] * 8, [-1.0] * 8, (cut, free))).truncated_logprobs is None
    assert found(MeasuredServer([-1.0] * 8, [-1.0] * 8, (free, free))).truncated_logprobs is False
    assert found(MeasuredServer([-1.0] * 8, [-1.0] * 8, (left(*logits, of=2), free))).truncated_logprobs is True


def test_without_top_logprobs_truncation_stays_unknown() -> None:
    class Half(MeasuredServer):
        async def generate(self, request: TokenRequest, on_chunk: Any = None) -> TokenResponse:
            self.top = ((0.75, 0.25), (0.2, 0.2)) if request.sampling.top_k == 2 else None
            return await super().generate(request)

    assert found(Half([-1.0] * 8, [-1.0] * 8)).truncated_logprobs is None


REFUSED = BadRequestError("no", backend="fake")


def test_refused_optional_outputs_are_left_out() -> None:
    for error in (REFUSED, ProtocolViolationError("no", backend="fake")):
        backend = MeasuredServer([-1.0] * 8, [-2.0] * 8, refuses=[error, None, error])
        before = Capabilities(top_logprobs=7, prompt_logprobs=True)
        info = found(backend, EngineInfo("fake", "m", None, "1", capabilities=before))
        assert info.capabilities is before, "nothing is known of what it gives"
        assert [bool(request.optional_outputs.top_logprobs) for request in backend.requests] == [
            True,
            False,
            True,
            False,
        ]
        assert len({request.request_id for request in backend.requests}) == 4
        assert len(backend.sequences) == 1


def test_a_server_that_samples_from_few_only_still_has_capabilities() -> None:
    backend = MeasuredServer([-1.0] * 8, [], ((0.5, 0.5), (0.5, 0.5)), refuses=[None, *[REFUSED] * 4])
    info = found(backend)
    assert info.capabilities == Capabilities(None, prompt_logprobs=False, routed_experts=False, sampling_mask=False)
    assert (info.processed_logprobs, info.truncated_logprobs, backend.sequences) == (None, None, [])


NAMES = {"top_ids": "top_logprobs", **{name: name for name in ("prompt_logprobs", "routed_experts", "sampling_mask")}}


@pytest.mark.parametrize("came", [(), *[(name,) for name in NAMES], tuple(NAMES)])
@pytest.mark.parametrize("free", [True, False])
def test_returned_columns_are_capabilities(came: tuple[str, ...], free: bool) -> None:
    class Gives(MeasuredServer):
        async def generate(self, request: TokenRequest, on_chunk: Any = None) -> TokenResponse:
            response = await super().generate(request)
            return replace(response, columns={name: Column.of(5, np.zeros((8, 1), np.int32)) for name in came})

    before = Capabilities(top_logprobs=7, expert_shape=True, options={"priority": "--p"})
    backend = Gives([-1.0] * 8, [-1.0] * 8, refuses=[] if free else [None, REFUSED, REFUSED])
    can = found(backend, EngineInfo("fake", "m", None, "1", capabilities=before)).capabilities
    assert can == replace(
        before,
        top_logprobs=7 if "top_ids" in came else 0,
        **{name: name in came for name in ("prompt_logprobs", "routed_experts", "sampling_mask")},
    )
