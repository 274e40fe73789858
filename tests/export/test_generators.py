"""SkyRL's generator output and verifiers' traces: the packages run under `make trainers`."""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from strands_tito.export import BranchedRolloutError, LogprobMismatchError, MissingPackageError, samples_of
from strands_tito.export.skyrl import STOP_REASON, generator_output_of
from strands_tito.export.tinker import datum_of
from strands_tito.export.trainer import UnreadRewardError, trained_turns
from strands_tito.export.verifiers import STOP, trace_of
from strands_tito.export.verl import output_of
from support.drafts import make_draft
from support.rollout_forests import HOT, chain, grow, rollouts
from support.trainer_packages import run
from tito_compat.spans import emit_spans
from tito_core.ledger import Ledger
from tito_core.termination import Termination

SKYRL: dict[str, Any] = {"temperature": 1.0, "end_id": 2, "logprobs": "as-recorded"}


def spelled(ids: Any) -> str:
    return " ".join(map(str, ids))


def rewarded(ledger: Ledger) -> Ledger:
    ledger.annotate("reward", 1)
    return ledger


@pytest.fixture
def skyrl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the names of the output's fields are SkyRL's here; its own code is in `skyrl_check.py`."""
    output = type("Named", (), {"__annotations__": {"pixel_values": None}})
    monkeypatch.setitem(sys.modules, "skyrl", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "skyrl.train.generators.base", SimpleNamespace(GeneratorOutput=output))


@pytest.fixture
def raw_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces come as the mapping that verifiers would validate; its own types are in `verifiers_check.py`."""
    node = type("Node", (), {"model_fields": {"sampling_mask": None}})  # as from 0.4 on
    fields = {"nodes": SimpleNamespace(annotation=list[node])}  # type: ignore[valid-type]
    raw = SimpleNamespace(WireTrace=SimpleNamespace(model_validate=lambda trace: trace, model_fields=fields))
    monkeypatch.setitem(sys.modules, "verifiers", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "verifiers.v1", raw)


@pytest.mark.parametrize(
    ("extra", "export"),
    [
        ("skyrl", lambda: generator_output_of([chain((2, 2))], **SKYRL)),
        ("verifiers", lambda: trace_of(chain((2, 2)), temperature=1.0, decode=spelled)),
        ("verl", lambda: output_of(Ledger(), temperature=1.0, end_id=2)),
    ],
)
def test_a_package_that_is_not_there_is_told(
    extra: str, export: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, extra, None)
    with pytest.raises(MissingPackageError, match=rf"'\.\[{extra}\]'"):
        export()


def test_every_termination_has_its_word() -> None:
    assert set(STOP_REASON) == set(STOP) == set(Termination)


@pytest.mark.usefixtures("skyrl")
@settings(max_examples=20)
@given(rollouts(experts=False))
def test_every_trajectory_is_a_step(ledger: Ledger) -> None:
    found = generator_output_of([rewarded(ledger)], branches="steps", trajectory_ids=["a"], **SKYRL)
    every = samples_of(ledger)  # of one agent, and with a reward: those that train no token come first
    samples = [sample for trains in (False, True) for sample in every if sample.loss_mask.any() == trains]
    assert found["is_last_step"] == [False] * (len(samples) - 1) + [True]
    assert found["trajectory_ids"] == ["a"] * len(samples)
    is_by_token = any(sample.credit is not None for sample in samples)
    for row, sample in enumerate(samples):
        assert found["prompt_token_ids"][row] + found["response_ids"][row] == sample.token_ids.tolist()
        expected = [0] * sample.response_length if sample.ended_outside else sample.response_mask.tolist()
        assert found["loss_masks"][row] == expected
        rewards = found["rewards"][row]
        assert isinstance(rewards, list) == is_by_token
        if sample.ended_outside or not is_by_token:
            assert np.sum(rewards) == (0.0 if sample.ended_outside else 1.0)
        else:
            credit = np.zeros(len(sample)) if sample.credit is None else sample.credit.copy()
            credit[-1] += 1.0
            assert rewards == credit[sample.prompt_length :].tolist()
    assert found["pixel_values"] is None


def of_a_solver(*later: dict[str, Any]) -> Ledger:
    """Return a rollout of a solver's turn of 2 sampled tokens, and of later ones of 3 each with roots of their own."""
    ledger = Ledger()
    for number, changes in enumerate(({"agent": "solver"}, *later)):
        ledger.commit(make_draft(None, 0, [100] * 2, [200] * (2 + bool(number)), **changes))
    return ledger


@pytest.mark.usefixtures("skyrl")
@pytest.mark.parametrize("branches", ["error", "last", "steps"])
def test_one_rollout_without_a_turn_of_the_agent_takes_no_other_away(branches: Any, caplog: Any) -> None:
    both, alone = rewarded(of_a_solver({"agent": "judge"})), rewarded(of_a_solver({"agent": "solver"}))
    options: dict[str, Any] = {"branches": branches, "trajectory_ids": ["a", "b"], **SKYRL}
    found = generator_output_of([both, alone], agent="judge", **options)
    assert (found["loss_masks"], found["rewards"]) == ([[1] * 3, [0]], [1.0, 0.0])
    assert "agents=<" not in caplog.text
    found = generator_output_of([both, alone], agent="jugde", **options)
    assert (found["loss_masks"], found["rewards"]) == ([[0], [0]], [0.0, 0.0])
    assert "rollouts=<2>, agent=<jugde>, agents=<solver, judge> | not trained: SkyRL" in caplog.text


@pytest.mark.usefixtures("skyrl")
@pytest.mark.parametrize(
    ("agent", "rewards", "lost"),
    [
        ("judge", {0: 1.0, 1: -1.0}, r"1 rows \(judge 1\) are lost, 1 of 2 in absolute value\. Pass agent="),
        ("solver", {0: 1.0, 1: -2.0}, r"1 rows \(solver 1\) are lost, 1 of 3 in absolute value\. Pass agent="),
        ("judge", {0: 1.0, 1: 0.0}, r"1 rows \(judge 1\) are lost, 0 of 1 in absolute value\. Pass agent="),
        ("solver", {0: 0.0, 1: 1.0}, r"1 rows \(solver 1\) are lost, 0 of 1 in absolute value\. Pass agent="),
        ("solver", {0: 1.0, 1: 1.0}, None),
        ("judge", {1: -1.0}, None),
        ("judge", {None: 1.0}, None),
        ("judge", {None: 1.0, 0: 0.5}, None),
    ],
)
def test_rewards_that_step_wise_training_ignores_are_refused_of_another_agent_and_counted_of_the_same(
    agent: str, rewards: dict[Any, float], lost: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = of_a_solver({"agent": agent})
    for turn, reward in rewards.items():
        ledger.annotate("reward", reward, turn=turn)
    options: dict[str, Any] = {"trajectory_ids": ["a"], **SKYRL}
    if lost is not None and agent == "judge":
        with pytest.raises(UnreadRewardError, match=rf"Rollout {ledger.uuid}: SkyRL's step-wise .* {lost}"):
            generator_output_of([ledger], branches="steps", **options)
        generator_output_of([ledger], branches="steps", agent="judge", **options)
        generator_output_of([ledger], branches="last", **options)
    else:
        generator_output_of([ledger], branches="steps", **options)
    if lost is not None and agent == "solver":
        assert re.search(rf"rollout=<{ledger.uuid}> \| SkyRL's step-wise .* {lost}", caplog.text)
    else:
        assert "lost" not in caplog.text


@pytest.mark.usefixtures("skyrl")
@pytest.mark.parametrize(
    ("later", "rewards", "rows"),
    [
        ([{"agent": "judge"}], {0: 1.0}, [([0] * 3, [0.0] * 3), ([1, 1], [0.0, 1.0])]),
        ([{"agent": "judge"}], {None: 1.0}, [([1] * 3, 1.0), ([1, 1], 1.0)]),
        ([{"agent": "judge"}], {1: 1.0}, [([0, 0], [0.0] * 2), ([1] * 3, [0.0, 0.0, 1.0])]),
        ([{"agent": "solver"}], {None: 1.0}, [([1, 1], 1.0), ([1] * 3, 1.0)]),
        ([{"agent": "solver", "constrained": True}], {None: 1.0}, [([0] * 3, 1.0), ([1, 1], 1.0)]),
        ([{"agent": "solver", "constrained": True}], {1: 1.0}, [([0] * 3, [0.0, 0.0, 1.0]), ([0, 0], [0.0] * 2)]),
    ],
)
def test_the_step_whose_reward_counts_for_all_is_last(later: Any, rewards: Any, rows: Any) -> None:
    """SkyRL gives all rows of a rollout the advantage of its last."""
    ledger = of_a_solver(*later)
    for turn, reward in rewards.items():
        ledger.annotate("reward", reward, turn=turn)
    found = generator_output_of([ledger], branches="steps", trajectory_ids=["a"], **SKYRL)
    assert list(zip(found["loss_masks"], found["rewards"], strict=True)) == rows
    assert found["is_last_step"] == [False, True]


def test_tinkers_advantage_is_zero_where_nothing_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, ints = SimpleNamespace(from_numpy=np.copy), SimpleNamespace(from_ints=list)
    fake = {"TensorData": tensors, "ModelInput": ints, "Datum": lambda **fields: fields["loss_fn_inputs"]}
    monkeypatch.setitem(sys.modules, "tinker", SimpleNamespace(**fake))
    (sample,) = samples_of(chain((2, 2)))
    missing = np.array([np.nan, np.nan, 1, 2])  # the credit of prompt tokens, or the reward that an error took away
    found: Any = datum_of(sample, advantage=missing)
    assert found["advantages"].tolist() == [0, 1, 2]
    found = datum_of(replace(sample, termination=Termination.ENGINE_ERROR), advantage=float("nan"))
    assert found["advantages"].tolist() == [0, 0, 0]
    for wrong in (missing[:1], missing[None]):
        with pytest.raises(ValueError, match="one number, or one for each of 4 tokens"):
            datum_of(sample, advantage=wrong)
    for wrong in (np.array([0, 0, np.nan, 2]), np.float64(1e39)):
        with pytest.raises(ValueError, match=r"is (nan|inf) at token 2, which is trained"):
            datum_of(sample, advantage=wrong)


@pytest.mark.usefixtures("skyrl")
def test_what_skyrl_cannot_be_told_is_refused() -> None:
    branched = rewarded(chain((3, 2), (1, 2)))
    grow(branched, 0, 2, 2)
    with pytest.raises(BranchedRolloutError):
        generator_output_of([branched], **SKYRL)
    with pytest.raises(ValueError, match="trajectory_ids"):
        generator_output_of([branched], branches="steps", **SKYRL)
    for wrong in ("step", "list"):
        with pytest.raises(ValueError, match=f"branches is '{wrong}', expected one of 'error', 'last', 'steps'"):
            generator_output_of([branched], branches=wrong, **SKYRL)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"None of the rollouts has a reward.*ledger\.annotate"):
        generator_output_of([chain((3, 2))], **SKYRL)
    with pytest.raises(LogprobMismatchError, match="SkyRL compares"):
        generator_output_of([rewarded(chain((3, 2), semantics=HOT))], temperature=1.0, end_id=2)
    empty = generator_output_of([Ledger()], **SKYRL)
    assert (empty["response_ids"], empty["loss_masks"], empty["rewards"]) == ([[2]], [[0]], [0.0])


@pytest.mark.usefixtures("skyrl")
def test_the_form_of_skyrls_rewards_is_that_of_the_call_or_as_it_is_told() -> None:
    plain, judged = rewarded(chain((3, 2))), rewarded(chain((3, 2)))
    judged.annotate("reward", 0.5, turn=0)
    for ledgers, token_rewards, rewards in (
        ([plain], None, [1.0]),
        ([plain], True, [[0.0, 1.0]]),
        ([plain, judged], None, [[0.0, 1.0], [0.0, 1.5]]),
        ([plain, judged], False, [1.0, 1.5]),
    ):
        assert generator_output_of(ledgers, token_rewards=token_rewards, **SKYRL)["rewards"] == rewards


@pytest.mark.usefixtures("skyrl")
def test_one_group_without_any_reward_is_masked_since_others_of_its_batch_may_have_some(caplog: Any) -> None:
    """SkyRL's fully async trainer asks for one group a call, and ends the run on an error."""
    ledgers, ids = [chain((3, 2)), chain((3, 2))], [SimpleNamespace(instance_id=name) for name in "aab"]
    found = generator_output_of(ledgers, trajectory_ids=ids[:2], **SKYRL)
    assert (found["loss_masks"], found["rewards"]) == ([[0, 0]] * 2, [0.0, 0.0])
    assert all(f"rollout=<{ledger.uuid}> | not trained: without a reward" in caplog.text for ledger in ledgers)
    with pytest.raises(ValueError, match=r"None of the rollouts has a reward.*pass their trajectory_ids"):
        generator_output_of(ledgers, trajectory_ids=ids[1:], **SKYRL)


@pytest.mark.usefixtures("raw_traces")
@settings(max_examples=20)
@given(rollouts(experts=False))
def test_a_traces_nodes_are_the_turns(ledger: Ledger) -> None:
    trace: Any = trace_of(ledger, temperature=1.0, decode=spelled, logprobs="as-recorded")
    for turn in ledger:
        before, answer = trace["nodes"][2 * turn.index : 2 * turn.index + 2]
        assert before["token_ids"] == turn.draft.prompt_ids.tolist()
        assert answer["token_ids"] == turn.draft.output_ids.tolist()
        assert answer["message"] == {"role": "assistant", "content": spelled(turn.draft.output_ids.tolist())}
        assert answer["parent"] == 2 * turn.index
        assert before["parent"] == (None if turn.parent is None else 2 * turn.parent + 1)
        call = trace["calls"][turn.index]
        assert trace["nodes"][call["node"]] is answer
        assert call["usage"]["completion_tokens"] == len(turn.draft.output_ids)
        assert sum(answer["mask"]) == len(answer["logprobs"]) == (0 if turn.draft.constrained else len(answer["mask"]))
    assert trace["ok"] is not samples_of(ledger)[0].ended_outside


@pytest.mark.usefixtures("raw_traces")
def test_traces_without_logprobs_or_with_others_are_refused() -> None:
    with pytest.raises(LogprobMismatchError, match="verifiers compares"):
        trace_of(chain((3, 2), semantics=HOT), temperature=1.0, decode=spelled)
    with pytest.raises(ValueError, match="not 'omit'"):
        trace_of(chain((3, 2)), temperature=1.0, decode=spelled, logprobs="omit")  # type: ignore[arg-type]


@pytest.mark.usefixtures("raw_traces")
def test_a_hole_in_a_traces_experts_is_refused() -> None:
    from support.drafts import make_draft
    from tito_core.ledger import Column

    ledger = Ledger()
    hole = {"routed_experts": Column.of(2, np.zeros((1, 1, 1), np.uint8))}
    ledger.commit(make_draft(None, 0, [100] * 2, [200] * 2, extras=hole))
    with pytest.raises(ValueError, match=r"Turn 0 ends at token 4.* 1 tokens from token 2 .*routed_experts"):
        trace_of(ledger, temperature=1.0, decode=spelled, logprobs="as-recorded")


@pytest.mark.trainers
@pytest.mark.parametrize("version", ["0.3.1", "0.4.0"])
def test_verifiers_branches_are_the_trajectories(version: str) -> None:
    output = run("verifiers_check.py", f"verifiers-{version}")
    assert f"verifiers: ok, {version}, " in output.splitlines()[-1]


if "PRIME_RL_SRC" in os.environ:  # prime-rl is in no registry: its source has to be there

    @pytest.mark.trainers
    def test_prime_rl_trains_each_sampled_token_once() -> None:
        source = Path(os.environ["PRIME_RL_SRC"])
        paths = [source / "src", source / "packages" / "prime-rl-configs" / "src"]
        output = run("prime_rl_check.py", "verifiers-0.3.1", paths=paths)
        assert output.splitlines()[-1].startswith("prime-rl: ok, ")


@pytest.mark.trainers
@pytest.mark.parametrize("version", ["0.3.0", "0.4.0"])
def test_skyrl_checks_the_output_and_makes_tensors_of_it(version: str) -> None:
    output = run("skyrl_check.py", f"skyrl-{version}")
    assert f"skyrl: ok, {version}, " in output.splitlines()[-1]


@settings(max_examples=25)
@given(rollouts(), st.booleans())
def test_each_turn_comes_once_with_its_prompt_and_after_its_parent(ledger: Ledger, constrained: bool) -> None:
    found = list(
        trained_turns(ledger, trainer="X", temperature=1.0, logprobs="as-recorded", train_constrained=constrained)
    )
    expected = [turn.index for turn in ledger if constrained or not turn.draft.constrained]
    assert Counter(each.turn.index for each in found) == Counter(expected)
    seen: set[int] = set()
    for each in found:
        parent = each.turn.parent
        if parent is not None and (constrained or not ledger[parent].draft.constrained):
            assert parent in seen
        seen.add(each.turn.index)
        whole = [*each.prompt_ids.tolist(), *each.turn.draft.output_ids.tolist()]
        assert whole == ledger.path_ids(each.turn.index).tolist()


@settings(max_examples=25)
@given(rollouts())
def test_spans_hold_the_ids_by_the_names_that_are_read(ledger: Ledger) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    count = emit_spans(ledger, provider.get_tracer("test"), temperature=1.0, logprobs="as-recorded")
    spans = exporter.get_finished_spans()
    turns = list(trained_turns(ledger, trainer="X", temperature=1.0, logprobs="as-recorded"))
    assert count == len(spans) == len(turns)
    for span, each in zip(spans, turns, strict=True):
        attributes = dict(span.attributes or {})
        prompt, output = tuple(each.prompt_ids.tolist()), tuple(each.turn.draft.output_ids.tolist())
        assert span.name == "openai.chat.completion"
        assert attributes["prompt_token_ids"] == attributes["llm.hosted_vllm.prompt_token_ids"] == prompt
        assert attributes["response_token_ids"] == attributes["llm.hosted_vllm.response_token_ids"] == output
        assert (attributes["llm.token_count.prompt"], attributes["llm.token_count.completion"]) == (
            len(prompt),
            len(output),
        )
        scores = [entry["logprob"] for entry in json.loads(str(attributes["logprobs.content"]))]
        assert scores == each.turn.draft.logprobs.tolist()


def test_other_logprobs_are_refused_or_left_out_of_spans() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    with pytest.raises(LogprobMismatchError, match="the reader of the spans compares"):
        emit_spans(chain((3, 2), semantics=HOT), tracer, temperature=1.0)
    assert emit_spans(chain((3, 2), semantics=HOT), tracer, temperature=1.0, logprobs="omit") == 1
    (span,) = exporter.get_finished_spans()
    assert "logprobs.content" not in (span.attributes or {})


@pytest.mark.trainers
@pytest.mark.parametrize("version", ["1.0.0", "1.0.2"])
def test_agent_lightning_makes_triplets_and_a_batch(version: str) -> None:
    output = run("agent_lightning_check.py", f"agentlightning-{version}")
    assert f"agentlightning: ok, {version}, " in output.splitlines()[-1]


@pytest.mark.trainers
def test_agent_lightnings_older_adapter_makes_triplets_of_spans() -> None:
    output = run("spans_check.py", "agentlightning-0.3.0")
    assert "agentlightning: ok, 0.3.0, " in output.splitlines()[-1]


@pytest.mark.trainers
@pytest.mark.parametrize("version", ["0.30.0", "0.38.0"])
def test_tinkers_own_types_take_them(version: str) -> None:
    output = run("tinker_check.py", f"tinker-{version}")
    assert f"tinker: ok, {version}, " in output.splitlines()[-1]
