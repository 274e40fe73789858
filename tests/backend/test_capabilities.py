"""Capabilities are measured at connect; unsupported outputs are refused before a request is sent."""

from __future__ import annotations

import asyncio
import contextlib
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.backends import PROMPT, VOCAB, WIRES, Kind, bodies, engine_name, engine_of, in_process_backend, request_of
from tito_conformance.testing import Completion
from tito_core.backend import (
    BackendError,
    Capabilities,
    EngineInfo,
    OptionalOutputs,
    SamplingParams,
    UnsupportedByServerError,
)
from tito_core.backend.generate import generate
from tito_core.backend.protocol import MOST_TOP_LOGPROBS
from tito_core.backend.semantics import measure
from tito_core.backend.values import InvalidValueError
from tito_core.settings import Settings


async def found(kind: Kind, **options: Any) -> Capabilities:
    backend = in_process_backend(engine_of(kind, **options))
    return (await measure(backend, await backend.connect(), np.array(PROMPT, np.int32))).capabilities


@pytest.mark.parametrize("kind", WIRES)
async def test_a_server_as_it_starts_by_default(kind: Kind) -> None:
    can = await found(kind)
    assert can.top_logprobs == {"vllm": 19, "vllm-completions": 20, "sglang": VOCAB}[kind]
    assert (can.prompt_logprobs, can.routed_experts) == (True, False)
    assert can.sampling_mask is (kind == "sglang")
    assert can.priority is (False if kind == "sglang" else None), (
        "vLLM takes any, and does not say what it does with it"
    )
    assert can.lower_first is (kind != "sglang")


@pytest.mark.parametrize("kind", WIRES)
async def test_server_options_enable_capabilities(kind: Kind) -> None:
    options = {"experts": (2, 2), "max_logprobs": 5, "priorities": True, "sampling_masks": kind == "vllm"}
    can = await found(kind, **options)
    assert can.routed_experts is True
    assert can.top_logprobs == {"vllm": 4, "vllm-completions": 5, "sglang": VOCAB}[kind]
    assert can.sampling_mask is (kind != "vllm-completions")
    assert can.priority is (True if kind == "sglang" else None)


@pytest.mark.parametrize("kind", WIRES)
async def test_connect_reports_capabilities_without_sampling(kind: Kind) -> None:
    engine = engine_of(kind, experts=(2, 2))
    can = (await in_process_backend(engine).connect()).capabilities
    assert engine.requests == []
    assert can.top_logprobs is not None
    assert can.routed_experts is (True if kind == "sglang" else None)


FLAGS: list[tuple[Kind, dict[str, Any], str]] = [
    ("vllm", {"routed_experts": True}, "Start the server with --enable-return-routed-experts."),
    ("vllm-completions", {"routed_experts": (2, 2)}, "Start the server with --enable-return-routed-experts."),
    ("sglang", {"routed_experts": (2, 2)}, "Start the server with --enable-return-routed-experts."),
    ("sglang", {"priority": 1}, "Start the server with --enable-priority-scheduling."),
    ("sglang", {"priority": 0}, "Start the server with --enable-priority-scheduling."),
    ("vllm", {"sampling_mask": True}, "--return-sampling-mask --logprobs-mode processed_logprobs"),
    ("vllm-completions", {"sampling_mask": True}, "Start the server with --enable-scale-out --return-sampling-mask"),
    ("vllm", {"top_logprobs": 20}, " 19.*--max-logprobs"),
    (
        "vllm-completions",
        {"top_logprobs": 21},
        " 20.*--max-logprobs",
    ),
    ("sglang", {"top_logprobs": VOCAB + 1}, f" {VOCAB}. Lower it."),
]


@pytest.mark.parametrize(("kind", "optional_outputs", "pattern"), FLAGS)
async def test_an_unsupported_output_is_refused_with_the_server_option(
    kind: Kind, optional_outputs: dict[str, Any], pattern: str
) -> None:
    backend = in_process_backend(engine := engine_of(kind))
    info = await measure(backend, await backend.connect(), np.array(PROMPT, np.int32))
    with pytest.raises(UnsupportedByServerError, match=f"this {engine_name(kind)} server") as caught:
        Settings.of(optional_outputs=optional_outputs, sampling={"top_k": 2}).at(info)
    assert re.search(pattern, str(caught.value))
    sent = len(bodies(engine))
    if "top_logprobs" in optional_outputs:  # without the measurement, this much is known: more would kill SGLang
        request = replace(request_of(), optional_outputs=OptionalOutputs.of(optional_outputs))
        with pytest.raises(UnsupportedByServerError, match="exceeds the limit of this"):
            await generate(backend, request)
        assert len(bodies(engine)) == sent
        assert not engine.state.dead


def test_sglang_does_not_report_the_shape_of_experts() -> None:
    info = EngineInfo("sglang", "m", 100, "9", capabilities=Capabilities(routed_experts=True, expert_shape=False))
    with pytest.raises(UnsupportedByServerError, match=r"Give routed_experts=\(layers, experts per token\)"):
        Settings.of(optional_outputs={"routed_experts": True}).at(info)
    Settings.of(optional_outputs={"routed_experts": (2, 2)}).at(info)
    Settings.of(optional_outputs={"routed_experts": True}).at(EngineInfo("toy", "m", 100, "9"))  # it may report it


@pytest.mark.parametrize(("sampling", "fits"), [({}, False), ({"top_k": 1}, True), ({"temperature": 0.0}, True)])
def test_a_sampling_mask_needs_a_finite_top_k(sampling: dict[str, Any], fits: bool) -> None:
    info = EngineInfo("sglang", "m", 100, "9")
    chosen = Settings.of(optional_outputs={"sampling_mask": True}, sampling=sampling)
    if fits:
        assert chosen.at(info).optional_outputs.sampling_mask
        return
    with pytest.raises(UnsupportedByServerError, match="Set top_k"):
        chosen.at(info)


def test_optional_outputs_are_the_same_in_each_turn() -> None:
    info = EngineInfo("sglang", "m", 100, "9")
    chosen = Settings.of(optional_outputs={"sampling_mask": True}, sampling={"top_k": 3}).at(info)
    with pytest.raises(ValueError, match="optional_outputs cannot change in a rollout"):
        chosen.changed(info, {"optional_outputs": {}})
    with pytest.raises(UnsupportedByServerError, match="Set top_k"):
        chosen.changed(info, {"top_k": -1})
    assert chosen.changed(info, {"top_k": 5}).sampling.top_k == 5


BAD: list[tuple[dict[str, Any], str]] = [
    ({"top_logprob": 3}, "'top_logprob'.*'top_logprobs'"),
    ({"experts": 3}, "'experts'.*routed_experts"),
    ({5: 3}, "optional output 5.*Available: top_logprobs, "),
    ({"top_logprobs": -1}, "greater than or equal to 0"),
    ({"top_logprobs": 1025}, "less than or equal to 1024"),
    ({"top_logprobs": True}, "valid integer"),
    ({"prompt_logprobs": 5}, "valid boolean"),
    ({"routed_experts": (0, 2)}, "greater than or equal to 1"),
    ({"routed_experts": (2,)}, "Field required"),
    ({"priority": 2**31}, "less than 2147483648"),
    ({"cache_salt": ""}, "at least 1 character"),
    ({"cache_salt": "x" * 129}, "at most 128 characters"),
    ({"cache_salt": "a/b"}, "cache_salt must not contain '@', '/'"),
    ({"cache_salt": "a\0"}, "cache_salt must not contain"),
]


@pytest.mark.parametrize(("given_outputs", "pattern"), BAD)
def test_invalid_optional_outputs_are_refused_at_construction(given_outputs: dict[str, Any], pattern: str) -> None:
    with pytest.raises(InvalidValueError, match=pattern):
        Settings.of(optional_outputs=given_outputs)


@pytest.mark.parametrize("name", ["priority", "cache_salt", "return_routed_experts", "top_logprobs_num"])
def test_an_optional_output_cannot_be_passed_in_extra(name: str) -> None:
    with pytest.raises(InvalidValueError, match=rf"extra .*'{name}': use optional_outputs="):
        SamplingParams(extra={name: 1})


@pytest.mark.parametrize("kind", WIRES)
@given(
    optional_outputs=st.builds(
        OptionalOutputs,
        top_logprobs=st.one_of(st.integers(0, 30), st.integers(VOCAB - 3, MOST_TOP_LOGPROBS)),
        prompt_logprobs=st.booleans(),
        routed_experts=st.one_of(st.booleans(), st.tuples(st.integers(1, 3), st.integers(1, 3))),
        sampling_mask=st.booleans(),
        priority=st.one_of(st.none(), st.integers(-(2**31) + 1, 2**31 - 1)),
        cache_salt=st.one_of(st.none(), st.text("salt ✓\n", min_size=1, max_size=128)),
    ),
    sampling=st.fixed_dictionaries(
        {},
        optional={
            "top_k": st.integers(1, 5000),
            "temperature": st.sampled_from([0.0, 1.0]),
            "grammar": st.just({"kind": "regex", "value": "a"}),
        },
    ),
    start=st.integers(0, len(PROMPT)),
)
@settings(deadline=None, max_examples=12)
def test_no_optional_output_crashes_a_server(
    kind: Kind, optional_outputs: OptionalOutputs, sampling: dict[str, Any], start: int
) -> None:
    engine = engine_of(kind, lambda _: Completion([5] * 8))
    request = replace(request_of(**sampling), optional_outputs=optional_outputs, delta_start=start)
    with contextlib.suppress(BackendError):
        asyncio.run(generate(in_process_backend(engine), request))
    assert not engine.state.dead


@pytest.mark.parametrize("name", ["top_logprobs", "prompt_logprobs", "routed_experts", "sampling_mask"])
def test_what_a_server_without_an_option_for_it_does_not_give_is_refused(name: str) -> None:
    none = Capabilities(top_logprobs=0, prompt_logprobs=False, routed_experts=False, sampling_mask=False)
    with pytest.raises(UnsupportedByServerError, match=r"(Lower it|Leave it out)\."):
        Settings.of(optional_outputs={name: 1 if name == "top_logprobs" else True}, sampling={"top_k": 2}).at(
            EngineInfo("toy", "m", 100, "1", capabilities=none)
        )
