"""Rollouts through slime's own code: its `Sample`, what it checks and packs, and its loop around our `generate`."""

from __future__ import annotations

import asyncio
import copy
import tempfile
from argparse import Namespace
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from slime.observability.rollout_data_utils import (
    load_debug_rollout_data,
    save_debug_rollout_data,
    tensorize_rollout_data_for_training,
    validate_rollout_id_annotated,
    validate_rollout_routed_experts_for_replay,
)
from slime.rollout.sglang_rollout import generate_and_rm_group
from slime.utils.types import Sample
from strands import Agent

from strands_tito.export import samples_of
from strands_tito.export.slime import STATUS, fan_out, fill
from strands_tito.integrations.slime_generate import PARTIAL
from strands_tito.testing import Completion, ScriptedServer
from support.multiplying import ANSWER, CALL, SAMPLED, multiply, says
from support.rollout_forests import rollouts
from support.scripted import END, engine_of, ids_of, is_probe, tokenizer
from support.slime_facts import PARAMETERS, arguments
from tito_core.ledger import Ledger
from tito_core.termination import record_termination

OPTIONS: dict[str, Any] = {"decode": lambda ids: " ".join(map(str, ids)), "temperature": 1.0, "logprobs": "as-recorded"}
seen = 0


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
        assert Sample.from_dict(copy.deepcopy(sample.to_dict())) == sample
        assert sample.status is Sample.Status[STATUS[ours.termination]]
        assert sample.effective_response_length == ours.loss_mask.sum()
        assert (sample.rollout_id, sample.index, sample.metadata["own"]) == (3, 3, 1)
        assert sample.reward == ours.reward
        args = Namespace(num_layers=2, moe_router_topk=2)
        if len(sample.tokens) > 1:
            validate_rollout_routed_experts_for_replay([torch.as_tensor(sample.rollout_routed_experts)], args)
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
        assert load_debug_rollout_data(folder + "/{rollout_id}.pt", rollout_id=1) == found


def make_agent(model: Any, row: Sample) -> Agent:
    assert isinstance(row, Sample)
    return Agent(model=model, tools=[multiply], callback_handler=None)


def make_editing_agent(model: Any, row: Sample) -> Agent:
    """An agent whose history is edited before its second answer, so that the rollout has two trajectories."""
    agent = make_agent(model, row)
    from strands.hooks import AfterToolCallEvent

    def edit(event: AfterToolCallEvent) -> None:
        event.agent.messages[0]["content"][0]["text"] = "What is 25 * 17, exactly?"

    agent.hooks.add_callback(AfterToolCallEvent, edit)
    return agent


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


def an_aborted_rollout_goes_on(folder: str, masks: bool) -> None:
    def script(request: Any) -> Completion:
        answer = says(request)
        if "425" in tokenizer().decode(list(request.prompt_ids)) and not is_probe(request) and not resumed:
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


def a_rollout_without_a_turn_is_aborted() -> None:
    ledger = Ledger()
    sample = fill(Sample(index=0), ledger, **OPTIONS)
    assert (sample.status, sample.tokens) == (Sample.Status.ABORTED, [])
    assert [each.status for each in fan_out(Sample(index=0), ledger, **OPTIONS)] == [Sample.Status.ABORTED]


def what_ended_from_outside_is_not_trained() -> None:
    from support.rollout_forests import chain
    from tito_core.termination import Termination

    for word in (Termination.ENGINE_ERROR, Termination.ABORTED, Termination.CANCELLED):
        ledger = chain((3, 2))
        record_termination(ledger, word)
        sample = fill(Sample(index=0), ledger, **OPTIONS)
        assert sample.remove_sample
        assert sample.status is (Sample.Status.FAILED if word == "engine_error" else Sample.Status.ABORTED)


if __name__ == "__main__":
    import sys

    sys.modules["slime_check"] = sys.modules["__main__"]
    samples_are_slimes()
    a_rollout_without_a_turn_is_aborted()
    what_ended_from_outside_is_not_trained()
    with tempfile.TemporaryDirectory() as place:
        tokenizer().save_pretrained(place)
        slimes_loop_runs_ours(place)
        for mask in (False, True):
            an_aborted_rollout_goes_on(place, mask)
    print(f"slime: ok, {seen} samples")
