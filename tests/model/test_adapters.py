"""LoRA adapters: one a rollout, measured at their first use, recorded with each turn, and never mixed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strands_tito import Adapter, Policy
from strands_tito.errors import (
    AdapterNotInEffectError,
    BackendError,
    BadRequestError,
    InvalidValueError,
    ProtocolViolationError,
    UnsupportedByServerError,
)
from strands_tito.inspect.verify import rescore
from support.scripted import BACKENDS, backend_of, engine_of, tokenizer
from tito_conformance.testing import Fault, HashPolicy, ScriptedEngine, ScriptedRequest, always
from tito_conformance.testing.wire import FRESH
from tito_core.backend import EngineAdmin
from tito_core.ledger import Ledger, check_ledger
from tito_core.store import LedgerFile, from_json, to_json

NAMES = ("one", "two")


def script() -> HashPolicy:
    return HashPolicy(len(tokenizer()), alphabet=range(40, 90), eos_ids=[int(tokenizer().eos_token_id)])


def served(kind: str, **options: Any) -> ScriptedEngine:
    scale_out = kind != "vllm-completions"
    return engine_of(kind.partition("-")[0], script(), adapters=NAMES, scale_out=scale_out, **options)


async def policy_of(kind: str, engine: ScriptedEngine, **options: Any) -> Policy:
    backend = backend_of(engine, kind.partition("-")[0])
    return await Policy.connect_async(backend=backend, tokenizer=tokenizer(), **options)


async def rollout(policy: Policy, adapter: Any, turns: int = 1, **options: Any) -> Ledger:
    model = policy.model(adapter=adapter, sampling={"max_new_tokens": 8}, **options)
    messages: list[Any] = []
    for number in range(turns):
        messages.append({"role": "user", "content": [{"text": f"Question {number}?"}]})
        text = ""
        async for event in model.stream(messages):
            text += event.get("contentBlockDelta", {}).get("delta", {}).get("text", "")
        messages.append({"role": "assistant", "content": [{"text": text}]})
    return model.ledger


def scores(request: ScriptedRequest) -> bool:
    return request.scoring or request.max_new_tokens == 0


WIRES = (*BACKENDS, "vllm-completions")


@pytest.mark.parametrize("kind", WIRES)
@given(played=st.lists(st.tuples(st.sampled_from([None, *NAMES]), st.integers(1, 3), st.booleans()), max_size=6))
@settings(max_examples=4)
def test_rollouts_with_different_adapters_share_a_policy_and_do_not_mix(
    kind: str, played: list[tuple[str | None, int, bool]]
) -> None:
    async def play() -> None:
        engine = served(kind, latency=lambda request: 0.001 * (len(request.prompt_ids) % 3))
        policy = await policy_of(kind, engine)
        ledgers = await asyncio.gather(*(rollout(policy, name, turns, stream=s) for name, turns, s in played))
        for ledger, (name, turns, _) in zip(ledgers, played, strict=True):
            check_ledger(ledger)
            expected = None if name is None else Adapter(name)
            assert [turn.draft.adapter for turn in ledger] == [expected] * turns
            found = (await rescore(ledger, policy.backend)).differences
            assert len(found) == sum(len(turn.draft.output_ids) for turn in ledger)
            assert found.max() < 1e-5

    asyncio.run(play())


@pytest.mark.parametrize("kind", BACKENDS)
async def test_requests_and_scores_name_the_adapter(kind: str) -> None:
    engine = served(kind)
    policy = await policy_of(kind, engine)
    before = len(engine.requests)
    ledger = await rollout(policy, "one", turns=2)
    sent = [request.adapter for request in engine.requests[before:]]
    assert sent == [None, "one", None, "one", "one"], "three scores before the first turn"
    await rescore(ledger, policy.backend)
    assert engine.requests[-1].adapter == "one"
    await rollout(policy, None)
    assert engine.requests[-1].adapter is None
    assert not [e for e in engine.exchanges if e.path.endswith("/models")][1:], "its name means no other server"


async def test_ledgers_name_adapter_and_version_and_are_stored(tmp_path: Path) -> None:
    with LedgerFile(tmp_path / "turns.tito", "a") as file:
        policy = await policy_of("sglang", served("sglang"), store=file)
        ledger = await rollout(policy, Adapter("one", "7"), turns=2)
    assert [span.version for span in ledger.trajectories[0].versions] == ["default+one@7"] * 2
    assert [span.version for span in ledger[0].draft.engine.versions] == ["default"], "as the server reported it"
    with LedgerFile(tmp_path / "turns.tito") as file:
        for loaded in (*file, from_json(to_json(ledger))):
            assert [turn.draft.adapter for turn in loaded] == [Adapter("one", "7")] * 2
            assert to_json(loaded) == to_json(ledger)


async def test_a_version_that_the_server_does_not_report_is_the_adapters_alone() -> None:
    policy = await policy_of("vllm-completions", served("vllm-completions"))
    ledger = await rollout(policy, Adapter("one", "7"))
    assert [span.version for span in ledger.trajectories[0].versions] == ["one@7"]


async def test_a_turn_without_an_adapter_is_stored_as_before() -> None:
    ledger = await rollout(await policy_of("vllm", served("vllm")), None)
    assert "adapter" not in to_json(ledger)["turns"][0]


async def test_one_ledger_with_several_adapters_is_rescored_by_each() -> None:
    policy = await policy_of("sglang", served("sglang"))
    ledger = policy.ledger()
    for name in (*NAMES, None):
        await rollout(policy, name, ledger=ledger)
    assert [turn.draft.adapter for turn in ledger] == [Adapter("one"), Adapter("two"), None]
    assert (await rescore(ledger, policy.backend)).differences.max() < 1e-5


@pytest.mark.parametrize("kind", BACKENDS)
async def test_an_adapter_that_the_server_ignores_is_refused_before_it_samples(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = served(kind)
    monkeypatch.setattr(type(engine.state), "weights_of", lambda self, adapter: self.weights)
    policy = await policy_of(kind, engine)
    before = len(engine.requests)
    with pytest.raises(AdapterNotInEffectError, match=r"one scores as the model alone does on .*fresh=True"):
        await rollout(policy, "one")
    assert all(scores(request) for request in engine.requests[before:])


async def test_a_fresh_adapter_is_reported_and_recorded(caplog: pytest.LogCaptureFixture) -> None:
    engine = served("vllm")
    engine.state.load_adapter("new", FRESH)
    policy = await policy_of("vllm", engine)
    with caplog.at_level("WARNING", "tito_core.backend.adapters"):
        ledger = await rollout(policy, Adapter("new", fresh=True))
    assert ledger[0].draft.adapter == Adapter("new", fresh=True)
    assert "new scores as the model alone does" in caplog.text
    policy = await policy_of("vllm", engine)
    with pytest.raises(AdapterNotInEffectError):
        await rollout(policy, "new")


async def test_a_new_version_that_serves_the_old_weights_is_refused() -> None:
    engine = served("sglang")
    engine.state.load_adapter("one-2", "one")
    policy = await policy_of("sglang", engine)
    await rollout(policy, "one")
    with pytest.raises(AdapterNotInEffectError, match="one-2 scores as the adapter one does"):
        await rollout(policy, "one-2")
    await rollout(policy, "two")


async def test_after_new_weights_of_the_model_a_new_version_that_serves_the_old_adapter_is_refused() -> None:
    engine = served("vllm")
    engine.state.load_adapter("one-2", "one")
    engine.state.load("/w/0")
    policy = await policy_of("vllm", engine)
    await rollout(policy, "one")
    await rollout(policy, "two")
    engine.state.load("/w/1")
    del engine.state.adapters["two"]
    with pytest.raises(AdapterNotInEffectError, match="one-2 scores as the adapter one does"):
        await rollout(policy, "one-2")
    with pytest.raises(BadRequestError, match="two"):
        await rollout(policy, "two")
    engine.state.load_adapter("three", "three")
    assert len(await rollout(policy, "three")) == len(await rollout(policy, "one")) == 1


async def test_new_weights_of_the_model_between_its_scores_do_not_refuse_an_adapter() -> None:
    engine = served("sglang")
    engine.state.load("/w/0")
    policy = await policy_of("sglang", engine)
    folders = iter(["/w/1"])

    def updated(request: ScriptedRequest) -> float:
        if request.adapter and scores(request):
            engine.state.load(next(folders, engine.state.folders[-1]))
        return 0

    engine.latency = updated
    before = len(engine.requests)
    assert len(await rollout(policy, "one")) == 1
    assert sum(scores(request) for request in engine.requests[before:]) == 5, "two more"
    engine.latency = lambda request: engine.state.load(f"/w/{len(engine.requests)}") or 0
    with pytest.raises(AdapterNotInEffectError):  # as a gateway to several models
        await rollout(policy, "two")


async def test_adapters_that_are_measured_at_once_are_compared() -> None:
    engine = served("vllm", latency=lambda request: 0.05 if request.adapter == "one" else 0)
    engine.state.adapters["two"] = "one"
    policy = await policy_of("vllm", engine)
    found = await asyncio.gather(*(rollout(policy, name) for name in NAMES), return_exceptions=True)
    assert {type(each) for each in found} == {Ledger, AdapterNotInEffectError}


async def test_rollouts_that_begin_together_share_one_measurement() -> None:
    engine = served("sglang")
    policy = await policy_of("sglang", engine)
    before = sum(scores(request) for request in engine.requests)
    await asyncio.gather(*(rollout(policy, "one") for _ in range(8)))
    assert sum(scores(request) for request in engine.requests) - before == 3


async def test_a_measurement_during_which_the_server_is_replaced_is_made_again() -> None:
    replaced: list[Policy] = []

    def forgotten_once(request: ScriptedRequest) -> float:
        if request.adapter and scores(request) and replaced:
            replaced.pop()._adapters.forget()  # as the check of a replaced server does
        return 0

    engine = served("vllm", latency=forgotten_once)
    policy = await policy_of("vllm", engine)
    replaced.append(policy)
    before = sum(scores(request) for request in engine.requests)
    await rollout(policy, "one")
    assert (replaced, sum(scores(request) for request in engine.requests) - before) == ([], 6)


async def test_an_interrupted_server_with_other_weights_under_a_name_is_refused() -> None:
    engine = served("sglang")
    policy = await policy_of("sglang", engine)
    await rollout(policy, "one")
    for folder in ("/w/0", "/w/1"):  # the first is the weights that it started with
        engine.state.load(folder)
        policy._adapters.forget()  # as the check of a replaced server does
        assert len(await rollout(policy, "one")) == 1
    await rollout(policy, "two")
    policy._adapters.forget()
    engine.state.adapters["one"], engine.state.adapters["two"] = "two", "one"
    for name in NAMES:
        with pytest.raises(AdapterNotInEffectError, match=f"has other weights under the adapter name {name} than"):
            await rollout(policy, name)


async def test_a_measurement_that_fails_is_made_again() -> None:
    engine = served("vllm")
    policy = await policy_of("vllm", engine)
    engine.fault = always(Fault(status=400, content_type="application/json", body=b'{"error": {"message": "no"}}'))
    with pytest.raises(BackendError):
        await rollout(policy, "one")
    engine.fault = None
    assert len(await rollout(policy, "one")) == 1


async def test_an_answer_of_another_adapter_is_refused() -> None:
    """vLLM's answers name the adapter; SGLang's do not."""
    engine = served("vllm")
    policy = await policy_of("vllm", engine)

    def renamed(number: int, request: ScriptedRequest) -> Fault | None:
        return None if scores(request) else Fault(edit=lambda body: {**body, "model": "two"})

    engine.fault = renamed
    with pytest.raises(ProtocolViolationError, match="the adapter 'one' was requested, but the answer is of 'two'"):
        await rollout(policy, "one")


@pytest.mark.parametrize("kind", BACKENDS)
async def test_adapters_are_loaded_and_unloaded_and_a_name_is_used_once(kind: str) -> None:
    engine = served(kind)
    backend: Any = backend_of(engine, kind)
    policy = await Policy.connect_async(backend=backend, tokenizer=tokenizer())
    assert isinstance(backend, EngineAdmin)
    await backend.load_adapter("math-1", "/adapters/math-1")
    assert len(await rollout(policy, "math-1")) == 1
    with pytest.raises(BadRequestError, match="'math-1' was used before"):
        await backend.load_adapter("math-1", "/adapters/math-2")
    with pytest.raises(BadRequestError, match="already"):
        await backend.load_adapter("one", "/adapters/other")  # another process loaded it
    await backend.unload_adapter("math-1")
    with pytest.raises(BadRequestError, match="math-1"):
        await rollout(policy, "math-1")
    with pytest.raises(BadRequestError, match="'math-1' was used before"):
        await backend.load_adapter("math-1", "/adapters/math-2")
    with pytest.raises(BadRequestError):
        await backend.unload_adapter("unknown")


async def test_a_name_has_one_version() -> None:
    policy = await policy_of("vllm", served("vllm"))
    policy.model(adapter="one")
    with pytest.raises(InvalidValueError, match=r"'one' was used as .* a new name"):
        policy.model(adapter=Adapter("one", "2"))


async def test_bad_adapters_are_refused_at_once() -> None:
    policy = await policy_of("vllm", served("vllm"))
    bad: list[Any] = ["", 3, "math@2", Adapter(""), Adapter("a", 3), Adapter("a", fresh=1), ("one", "1")]  # type: ignore[arg-type]
    for value in bad:
        with pytest.raises(InvalidValueError):
            policy.model(adapter=value)
    with pytest.raises(ValueError, match="adapter cannot change in a rollout"):
        policy.model(adapter="one").update_config(adapter="two")
    without = replace(policy.info, capabilities=replace(policy.info.capabilities, adapters=False))
    with pytest.raises(UnsupportedByServerError, match="does not send adapters"):
        replace(policy, info=without).model(adapter="one")
