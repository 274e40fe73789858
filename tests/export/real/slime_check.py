"""Rollouts through slime's own code: its `Sample`, what it checks and packs, and its loop around our `generate`."""

from __future__ import annotations

import ast
import asyncio
import copy
import inspect
import json
import tempfile
from argparse import Namespace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from slime.observability import rollout_data_utils
from slime.observability.rollout_data_utils import (
    load_debug_rollout_data,
    save_debug_rollout_data,
    tensorize_rollout_data_for_training,
    validate_rollout_id_annotated,
    validate_rollout_routed_experts_for_replay,
)
from slime.rollout.sglang_rollout import generate_and_rm_group
from slime.utils.ppo_utils import calculate_log_probs_and_entropy
from slime.utils.types import Sample
from strands import Agent

from strands_tito.export import samples_of
from strands_tito.export.files import ExportOptions, write
from strands_tito.export.slime import STATUS, complete_aborted, fan_out, fill, rewards_by_group
from strands_tito.integrations.slime_generate import PARTIAL
from support.kept_sets import sampled
from support.multiplying import ANSWER, CALL, SAMPLED, editing, multiply, says
from support.rollout_forests import REWARDS, group_of_one_prompt, rollouts
from support.scripted import END, engine_of, ids_of, tokenizer
from support.slime_facts import PARAMETERS, arguments
from tito_conformance.testing import Completion, ScriptedServer
from tito_core.ledger import Ledger
from tito_core.termination import record_termination

OPTIONS: dict[str, Any] = {"decode": lambda ids: " ".join(map(str, ids)), "temperature": 1.0, "logprobs": "as-recorded"}
seen = 0


def expect_equal(one: Sample, other: Sample) -> None:
    np.testing.assert_equal(one.to_dict(), other.to_dict())


@settings(max_examples=60, deadline=None, database=None)
@given(rollouts(experts=True))
def samples_are_slimes(ledger: Ledger) -> None:
    global seen
    base = Sample(index=3, group_index=1, prompt="Add.", metadata={"own": 1})
    found = fan_out(base, ledger, **OPTIONS)
    assert base == Sample(index=3, group_index=1, prompt="Add.", metadata={"own": 1})
    validate_rollout_id_annotated([[found]])
    total = 0
    for sample, ours in zip(found, samples_of(ledger), strict=True):
        seen += 1
        sample._validate_response_metadata_lengths()
        expect_equal(Sample.from_dict(copy.deepcopy(sample.to_dict())), sample)
        assert sample.status is Sample.Status[STATUS[ours.termination]]
        assert sample.effective_response_length == ours.loss_mask.sum()
        assert (sample.rollout_id, sample.index, sample.metadata["own"]) == (3, 3, 1)
        assert sample.reward == ours.total
        args = Namespace(num_layers=2, moe_router_topk=2)
        if len(sample.tokens) > 1:
            experts = torch.as_tensor(sample.rollout_routed_experts)
            validate_rollout_routed_experts_for_replay([experts], args)
            assert experts.dtype == torch.int32, "as slime's own"
        total += sample.effective_response_length
    assert total == sum(len(turn.draft.output_ids) for turn in ledger if not turn.draft.constrained)
    batch: dict[str, Any] = {
        "tokens": [sample.tokens for sample in found],
        "loss_masks": [sample.loss_mask for sample in found],
        "rollout_log_probs": [sample.rollout_log_probs for sample in found],
    }
    tensorize_rollout_data_for_training(batch)
    for row, ours in enumerate(samples_of(ledger)):
        assert batch["tokens"][row].tolist() == ours.token_ids.tolist()
        kept = batch["loss_masks"][row].bool()
        expected = ours.logprobs[ours.loss_mask.astype(bool)]
        np.testing.assert_array_equal(batch["rollout_log_probs"][row][kept].numpy(), expected)
    with tempfile.TemporaryDirectory() as folder:
        save_debug_rollout_data(folder + "/{rollout_id}.pt", found, rollout_id=1, evaluation=False)
        for loaded, sample in zip(
            load_debug_rollout_data(folder + "/{rollout_id}.pt", rollout_id=1), found, strict=True
        ):
            expect_equal(loaded, sample)


def make_agent(model: Any, row: Sample) -> Agent:
    assert isinstance(row, Sample)
    return Agent(model=model, tools=[multiply], callback_handler=None)


def make_editing_agent(model: Any, row: Sample) -> Agent:
    return editing(make_agent(model, row))


async def reward(args: Any, sample: Any, **_: Any) -> Any:
    return [1.0] * len(sample) if isinstance(sample, list) else 1.0


def args_of(url: str, folder: str, **more: Any) -> Namespace:
    ours = {
        "custom_generate_function_path": "strands_tito.integrations.slime_generate.generate",
        "custom_rm_path": "slime_check.reward",
        "tito_agent": "slime_check:make_agent",
    }
    return arguments(url, folder, **{**ours, **more})


def group(args: Namespace, size: int, samples: list[Sample] | None = None) -> list[Any]:
    from slime.rollout.sglang_rollout import GenerateState
    from slime.utils.misc import SingletonMeta

    from strands_tito.integrations import slime_generate

    SingletonMeta._instances.clear()  # each of these groups has a server of its own
    slime_generate._policies.clear()
    GenerateState(args)
    prompts = samples or [Sample(index=i, group_index=0, prompt="What is 25 * 17?") for i in range(size)]
    return asyncio.run(generate_and_rm_group(args, prompts, dict(PARAMETERS)))


def slimes_loop_runs_ours(folder: str) -> None:
    with ScriptedServer(engine_of("sglang", says)) as server:
        found = group(args_of(server.base_url, folder), 3)
        branched = group(args_of(server.base_url, folder, tito_agent="slime_check:make_editing_agent"), 2)
        one = group(args_of(server.base_url, folder, tito_branches="last"), 2)
    assert [len(samples) for samples in found] == [1, 1, 1]
    assert [len(samples) for samples in branched] == [2, 2]
    validate_rollout_id_annotated([found])
    validate_rollout_id_annotated([branched])
    assert all(isinstance(sample, Sample) for sample in one)
    for sample in [*(samples[0] for samples in found), *one]:
        assert sample.status is Sample.Status.COMPLETED
        assert sample.reward == 1.0
        assert sum(sample.loss_mask) == len(SAMPLED)
        assert sample.response.startswith(CALL + END)
        assert sample.response.endswith(ANSWER + END)
        assert sample.metadata["tito"]["termination"] == "completed"
    for samples in branched:
        assert {sample.rollout_id for sample in samples} == {samples[0].index}
        trained = [[t for t, m in zip(s.tokens[-s.response_length :], s.loss_mask, strict=True) if m] for s in samples]
        assert trained == [ids_of(CALL + END), ids_of(ANSWER + END)]


def slimes_conversion() -> Any:
    """Return slime's function from samples to training data, out of a class whose module needs GPUs to be imported."""
    source = Path(inspect.getsourcefile(Sample) or "").parents[1] / "ray" / "rollout.py"
    wanted = ("_post_process_rewards", "_convert_samples_to_train_data")
    functions = [
        node
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name in wanted
    ]
    names: dict[str, Any] = {"Sample": Sample, "torch": torch, "get_source": lambda sample: "x"}
    names["validate_rollout_routed_experts_for_replay"] = validate_rollout_routed_experts_for_replay
    exec(compile(ast.Module(functions, []), str(source), "exec"), names)  # type: ignore[arg-type]

    def convert(samples: list[Sample], prompts: int, size: int, function: Any) -> Any:
        manager = SimpleNamespace(custom_reward_post_process_func=function)
        manager.custom_convert_samples_to_train_data_func = None
        manager.args = Namespace(
            advantage_estimator="grpo", rewards_normalization=True, grpo_std_normalization=True, reward_key=None,
            n_samples_per_prompt=size, rollout_batch_size=prompts, rollout_top_p=1.0, use_rollout_routing_replay=False,
        )  # fmt: skip
        manager._post_process_rewards = lambda *given: names["_post_process_rewards"](manager, *given)
        return names["_convert_samples_to_train_data"](manager, samples)

    return convert


def samples_of_groups(groups: list[list[Ledger]]) -> list[Sample]:
    found: list[Sample] = []
    for number, group in enumerate(groups):
        for place, ledger in enumerate(group):
            base = Sample(index=10 * number + place, group_index=number)
            found += [complete_aborted(one) for one in fan_out(base, ledger, **OPTIONS)]
    return found


def a_group_is_compared_with_itself() -> None:
    convert = slimes_conversion()
    plain = [group_of_one_prompt(name)[:2] for name in ("a", "b")]
    for ledger, reward in zip([*plain[0], *plain[1]], (1.0, 0.9, 0.2, 0.1), strict=True):
        ledger.annotate("reward", reward)
    ours = convert(samples_of_groups(plain), 2, 2, rewards_by_group)["rewards"]
    np.testing.assert_allclose(ours, convert(samples_of_groups(plain), 2, 2, None)["rewards"], atol=1e-3)
    assert np.sign(ours).tolist() == [1, -1, 1, -1]

    easy, hard = group_of_one_prompt("a"), group_of_one_prompt("b")
    for ledger in easy[:3]:
        ledger.annotate("reward", 10.0 + ledger.annotation("reward"))
    samples = samples_of_groups([easy[:5], hard[:5]])
    for sample in samples:
        sample.remove_sample |= sample.reward is None  # as the export to a file writes one without a reward
        sample.reward = 0.0 if sample.reward is None else sample.reward
    data = convert(samples, 2, 5, rewards_by_group)
    rewards = np.array(REWARDS)
    expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    one = [*expected, expected[2], 0.0, 0.0]  # the branched rollout has two samples
    np.testing.assert_allclose(data["rewards"], one * 2, atol=1e-6)
    trained = [bool(np.any(mask)) for mask in data["loss_masks"]]
    assert trained == [True, True, True, True, False, False] * 2
    theirs = np.array(convert(samples, 2, 5, None)["rewards"])
    assert (theirs[:4] > 0).all(), "slime's own function compares the two prompts"
    assert (theirs[6:] < 0).all()


def a_file_is_converted() -> None:
    """A null reward, or a rollout without turns, must not end slime's conversion."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "out"
        ledgers = group_of_one_prompt("a") + group_of_one_prompt("b")
        write(ledgers, "slime", path, ExportOptions(lambda _: OPTIONS["decode"], logprobs="as-recorded"))
        rows = [Sample.from_dict(json.loads(line)) for line in path.read_text().splitlines()]
    data = slimes_conversion()(rows, 2, 6, rewards_by_group)
    assert len(data["rewards"]) == 12
    assert [sample.group_index for sample in rows] == [0] * 6 + [1] * 6
    assert data["rewards"][:6] == data["rewards"][6:]


def an_aborted_rollout_goes_on(folder: str, masks: bool) -> None:
    def script(request: Any) -> Completion:
        answer = says(request)
        if "425" in tokenizer().decode(list(request.prompt_ids)) and not request.measures and not resumed:
            return Completion(answer.output_ids[:2], finish="abort")
        return answer

    resumed = False
    with ScriptedServer(engine_of("sglang", script)) as server:
        args = args_of(server.base_url, folder, partial_rollout=True, mask_offpolicy_in_partial_rollout=masks)
        (cut,) = group(args, 1)
        assert cut.status is Sample.Status.ABORTED
        assert cut.reward == 0.0, "one None among rewards would end slime's training, were this abort not its own"
        assert cut.remove_sample
        assert cut.response == CALL + END
        assert sum(cut.loss_mask) == cut.response_length == len(ids_of(CALL + END))
        kept = copy.deepcopy(cut)
        resumed = True
        (done,) = group(args, 1, [kept])
    assert done.status is Sample.Status.COMPLETED
    assert done.reward == 1.0
    assert PARTIAL not in done.metadata
    assert not done.remove_sample
    assert done.tokens[: len(cut.tokens)] == cut.tokens
    assert done.response.endswith(ANSWER + END)
    own = len(ids_of(ANSWER + END))
    assert sum(done.loss_mask) == own + (0 if masks else len(ids_of(CALL + END)))
    assert done.loss_mask[-own:] == [1] * own
    assert done.metadata["tito"]["rollout"] == cut.metadata["tito"]["rollout"]


def kept_sets_are_slimes() -> None:
    """slime's own check of the offsets, its tensors, and the set of each trained token."""
    truth = sampled(3, 3, top=12, mask=True, top_p=0.8, top_k=6)
    (sample,) = fan_out(Sample(index=3), truth.ledger, **{**OPTIONS, "logprobs": "checked", "top_p_replay": True})
    sample._validate_response_metadata_lengths()
    names = ("rollout_top_p_token_ids", "rollout_top_p_token_offsets")
    batch: dict[str, Any] = {"tokens": [sample.tokens], "loss_masks": [sample.loss_mask]}
    batch |= {name: [getattr(sample, name)] for name in names}
    tensorize_rollout_data_for_training(batch)
    ids, offsets = (batch[name][0] for name in names)
    assert (ids.dtype, len(offsets)) == (torch.int32, sample.response_length + 1)
    spans = [ids[start:stop].tolist() for start, stop in pairwise(offsets.tolist())]
    assert [span for span, mask in zip(spans, sample.loss_mask, strict=True) if mask] == truth.kept
    values = [value for value, mask in zip(sample.rollout_log_probs, sample.loss_mask, strict=True) if mask]
    np.testing.assert_allclose(values, truth.over_kept, atol=2e-4)


def an_empty_kept_set_is_the_token_alone() -> None:
    """Why a trained token without a set is refused: slime's own loss gives it logprob 0 and no gradient."""
    source = Path(inspect.getfile(rollout_data_utils)).parents[1] / "backends" / "megatron_utils" / "loss.py"
    wanted = ("_fill_topp_mask_rows", "_build_topp_keep_mask")  # the module itself imports Megatron
    body = [node for node in ast.parse(source.read_text(encoding="utf-8")).body if getattr(node, "name", "") in wanted]
    alone = {"get_context_parallel_world_size": lambda: 1, "get_tensor_model_parallel_rank": lambda: 0}
    names: dict[str, Any] = {"torch": torch, "mpu": SimpleNamespace(**alone)}
    exec(compile(ast.Module(body, []), str(source), "exec"), names)
    keep = names["_build_topp_keep_mask"](5, 6, torch.device("cpu"), [[]], [[0, 0, 0]], [5], [2], False)
    logits = torch.randn(5, 6, requires_grad=True)
    found, _ = calculate_log_probs_and_entropy(logits, torch.arange(5), None, log_prob_keep_mask=keep)
    found.sum().backward()
    assert logits.grad is not None
    is_flat = [not any(row) for row in logits.grad.tolist()]
    assert (is_flat, found[2:4, 0].tolist()) == ([False, False, True, True, False], [0.0, 0.0])


def the_loss_reads_logprobs_by_these_options() -> None:
    """Its module imports Megatron, so the page is held to its source; versions are read nowhere."""
    root = Path(inspect.getfile(rollout_data_utils)).parents[1]
    loss = (root / "backends" / "megatron_utils" / "loss.py").read_text(encoding="utf-8")
    assert 'batch["rollout_log_probs"] if args.use_rollout_logprobs else batch.get("log_probs")' in loss
    assert "if args.get_mismatch_metrics or args.use_tis:" in loss
    read = [path.name for path in root.rglob("*.py") if "weight_versions" in path.read_text(encoding="utf-8")]
    assert read == ["types.py"]


def a_rollout_without_a_turn_is_aborted() -> None:
    ledger = Ledger()
    sample = fill(Sample(index=0), ledger, **OPTIONS)
    assert (sample.status, sample.tokens) == (Sample.Status.ABORTED, [])
    assert [each.status for each in fan_out(Sample(index=0), ledger, **OPTIONS)] == [Sample.Status.ABORTED]


def what_ended_from_outside_is_not_trained() -> None:
    from support.rollout_forests import chain
    from tito_core.termination import Termination

    for word in (Termination.TEMPLATE, Termination.ENGINE_ERROR, Termination.ABORTED, Termination.CANCELLED):
        ledger = chain((3, 2))
        record_termination(ledger, word)
        sample = fill(Sample(index=0), ledger, **OPTIONS)
        assert sample.remove_sample
        assert sample.status is (Sample.Status.FAILED if word == "engine_error" else Sample.Status.ABORTED)


if __name__ == "__main__":
    import sys

    sys.modules["slime_check"] = sys.modules["__main__"]
    samples_are_slimes()
    kept_sets_are_slimes()
    an_empty_kept_set_is_the_token_alone()
    the_loss_reads_logprobs_by_these_options()
    a_rollout_without_a_turn_is_aborted()
    what_ended_from_outside_is_not_trained()
    a_group_is_compared_with_itself()
    a_file_is_converted()
    with tempfile.TemporaryDirectory() as place:
        tokenizer().save_pretrained(place)
        slimes_loop_runs_ours(place)
        for mask in (False, True):
            an_aborted_rollout_goes_on(place, mask)
    print(f"slime: ok, {seen} samples")
