"""Optional outputs become columns that agree with the policy's distribution, on each wire."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from backend.test_answer_laws import put, scored
from support.backends import (
    PROMPT,
    VOCAB,
    WIRES,
    Kind,
    engine_name,
    engine_of,
    hash_policy,
    in_process_backend,
    request_of,
)
from tito_conformance.testing import Fault, always
from tito_conformance.testing.script import routed
from tito_core.backend import OptionalOutputs, ProtocolViolationError, TokenResponse
from tito_core.backend.generate import generate

Edit = Callable[[Any], Any]
LAYERS, EXPERTS = 3, 2
EVERYTHING = {"top_logprobs": 3, "prompt_logprobs": True, "routed_experts": (LAYERS, EXPERTS), "sampling_mask": True}


def wanted_on(kind: Kind, **changes: Any) -> OptionalOutputs:
    """All that can be wanted; vLLM's OpenAI endpoint has no sampling mask."""
    return OptionalOutputs.of({**EVERYTHING, "sampling_mask": kind != "vllm-completions", **changes})


def ask(
    kind: Kind,
    edit: Edit | None = None,
    *,
    optional_outputs: OptionalOutputs | None = None,
    delta_start: int = 0,
    prompt: tuple[int, ...] = PROMPT,
    options: dict[str, Any] | None = None,
    **sampling: Any,
) -> tuple[TokenResponse, Any]:
    """One generation of the policy on a server that gives everything, its answer edited on the way."""
    known = {"experts": (LAYERS, EXPERTS), "sampling_masks": kind == "vllm", **(options or {})}
    engine = engine_of(kind, fault=always(Fault(edit=edit)) if edit else None, **known)
    request = request_of(prompt, **{"top_k": 4, "seed": 1, **sampling})
    request = replace(request, optional_outputs=optional_outputs or wanted_on(kind), delta_start=delta_start)
    return asyncio.run(generate(in_process_backend(engine), request)), engine


@pytest.mark.parametrize("kind", WIRES)
@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20).map(tuple),
    at=st.floats(0, 1),
    k=st.integers(1, 12),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    seed=st.integers(0, 1000),
    limit=st.sampled_from([1, 8]),
)
@example(prompt=(5, VOCAB - 1, 0, VOCAB - 1), at=0.5, k=2, temperature=1.0, seed=0, limit=1).via(
    "SGLang reports the last id as 0"
)
@settings(deadline=None, max_examples=10)
def test_columns_are_the_policys_own_and_only_of_the_delta(
    kind: Kind, prompt: tuple[int, ...], at: float, k: int, temperature: float, seed: int, limit: int
) -> None:
    start = round(at * len(prompt))
    optional_outputs = wanted_on(kind, top_logprobs=k)
    sampling = {"temperature": temperature, "seed": seed, "max_new_tokens": limit}
    response, engine = ask(kind, optional_outputs=optional_outputs, delta_start=start, prompt=prompt, **sampling)
    policy, whole, p = hash_policy(), (*prompt, *response.output_ids.tolist()), len(prompt)
    reported = engine.requests[0].reported_temperature
    n = len(response.output_ids)
    columns = dict(response.columns)

    tops = [policy.top(whole, place, k, reported) for place in range(p, p + n)]
    assert columns["top_logprobs"].start == columns["top_ids"].start == p
    assert columns["top_logprobs"].values.tolist() == [[logprob for _, logprob in top] for top in tops]
    for ids, top in zip(columns["top_ids"].values.tolist(), tops, strict=True):
        assert [i for i, lp in top if lp > top[-1][1]] == ids[: sum(lp > top[-1][1] for _, lp in top)]
        assert len(set(ids)) == k, "which ones of those as likely as the last is the engine's own choice"

    first = max(start, 1)
    assert (columns["prompt_logprobs"].start, columns["prompt_logprobs"].rows) == (first, p - first)
    raw = policy.score(prompt, 1, 1.0) if p > 1 else []
    assert columns["prompt_logprobs"].values.tolist() == raw[first - 1 :]

    before = max(start - 1, 0)
    experts = columns["routed_experts"]
    assert (experts.start, experts.shape) == (before, (p + n - 1 - before, LAYERS, EXPERTS))
    assert experts.values.tolist() == routed(whole, LAYERS, EXPERTS)[before:].tolist()

    if kind != "vllm-completions":
        mask = columns["sampling_mask"]
        assert (mask.start, mask.shape) == (p, (n, 4))
        for token, row in zip(response.output_ids.tolist(), mask.values.tolist(), strict=True):
            assert token in row


@pytest.mark.parametrize("kind", WIRES)
def test_without_optional_outputs_nothing_is_sent_or_returned(kind: Kind) -> None:
    response, engine = ask(kind, optional_outputs=OptionalOutputs(), options={"sampling_masks": False})
    assert dict(response.columns) == {}
    sent = {**engine.requests[0].body, **engine.requests[0].body.get("sampling_params", {})}
    named = {"top_logprobs_num", "return_routed_experts", "routed_experts_start_len", "routed_experts_prompt_start"}
    assert not sent.keys() & (named | {"return_sampling_mask", "prompt_logprobs", "priority", "cache_salt"})


@pytest.mark.parametrize("kind", WIRES)
def test_request_fields_of_optional_outputs(kind: Kind) -> None:
    optional_outputs = wanted_on(kind, priority=3, cache_salt="mine")
    _, engine = ask(kind, optional_outputs=optional_outputs, delta_start=3, options={"priorities": True})
    body = dict(engine.requests[0].body)
    params = body.get("sampling_params", body)
    if kind == "sglang":
        assert (body["top_logprobs_num"], body["logprob_start_len"]) == (3, 2)
        assert (body["return_routed_experts"], body["routed_experts_start_len"]) == (True, 2)
        assert body["return_sampling_mask"] is True
    else:
        assert params["logprobs"] == {"vllm": 4, "vllm-completions": 3}[kind], "the sampled one is counted in, or not"
        assert (params["prompt_logprobs"], params["routed_experts_prompt_start"]) == (0, 2)
    assert body["cache_salt"] == "mine"
    assert body["priority"] == {"vllm": -3, "sglang": 3}[engine_name(kind)], "vLLM serves lower ones sooner"


def experts(change: Callable[[np.ndarray[Any, Any]], Any]) -> Edit:
    """Decode as the wire does, change the array, encode again; anything else stays as it is."""

    def changed(text: str, npy: bool = True) -> Any:
        raw = base64.b64decode(text)
        array = np.load(io.BytesIO(raw)) if npy else np.frombuffer(raw, "<i4").reshape(-1, LAYERS, EXPERTS)
        found = change(array)
        if not isinstance(found, np.ndarray):
            return found
        np.save(stream := io.BytesIO(), found)
        return base64.b64encode(stream.getvalue() if npy else found.astype("<i4").tobytes()).decode()

    return put("experts", lambda text: changed(text, npy=False), changed)


# What the core decides of any backend's columns is in test_column_validation.py; here is what each wire reads.
PLANTED: dict[str, tuple[Edit, str]] = {
    "top of fewer tokens": (put("top", []), "Law 2: .*top_logprobs .*"),
    "top unreadable": (put("top", "none"), "Law 2: top_logprobs cannot be read|Expected `array"),
    "top id negative": (
        put("top id", [-9.0, -3, None], {"token_id": -3, "logprob": -9.0}, -9.0),
        r"token id ('token_id:)?-3",
    ),
    "prompt logprobs missing": (put("prompt", [], None), "no prompt_logprobs"),
    "prompt id edited": (scored(2, token=99), "prompt id 13 at offset 2 .* 99"),
    "prompt logprob None": (scored(2, logprob=None), "prompt token 2 |Expected `float"),
    "experts missing": (experts(lambda array: None), "Law 4: .*no routed_experts"),
    "experts short": (experts(lambda array: array[:-1]), "Law 2: routed_experts have 11 rows, expected 12"),
    "experts no base64": (experts(lambda array: "no base64!"), "routed_experts cannot be read"),
    "experts cut": (experts(lambda array: base64.b64encode(b"\x93NUMPY\x01\x00v\x00{").decode()), "cannot be read"),
    "experts half a number": (experts(lambda array: base64.b64encode(b"abcde").decode()), "cannot be read"),
    "mask short": (put("mask", lambda rows: rows[:-1]), "Law 2: .*8 output ids, but sampling_mask of 7 tokens"),
    "mask missing": (put("mask", lambda rows: None), "no sampling_mask"),
}


CASES = [(kind, name) for kind in WIRES for name in PLANTED if kind != "vllm-completions" or "mask " not in name]
"""All but those of a sampling mask where the endpoint has none."""


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_planted_edit_is_refused_with_its_values(kind: Kind, name: str) -> None:
    edit, sentence = PLANTED[name]
    with pytest.raises(ProtocolViolationError, match=sentence) as caught:
        ask(kind, edit, ignore_eos=True)
    assert (caught.value.backend, caught.value.request_id) == (engine_name(kind), "r")


def test_an_npy_cannot_allocate_more_than_its_own_size() -> None:
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (900000000000, 3, 2), }"
    raw = b"\x93NUMPY\x01\x00" + (len(header) + 1).to_bytes(2, "little") + header + b"\n" + bytes(12)
    text = base64.b64encode(raw).decode()
    with pytest.raises(ProtocolViolationError, match=r"12 bytes .*uint8 .*shape"):
        ask("vllm", experts(lambda _: text), optional_outputs=OptionalOutputs(routed_experts=True))


@pytest.mark.parametrize("kind", WIRES)
def test_a_lenient_request_allows_missing_outputs(kind: Kind) -> None:
    engine = engine_of(kind)
    optional_outputs = OptionalOutputs(top_logprobs=2, routed_experts=True, sampling_mask=True)
    request = replace(request_of(top_k=2), optional_outputs=optional_outputs, is_probe=True)
    columns = asyncio.run(generate(in_process_backend(engine), request)).columns
    assert set(columns) == {"top_ids", "top_logprobs"} | ({"sampling_mask"} if kind == "sglang" else set())
