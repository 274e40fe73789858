"""slime's fields, against the recorded facts of its `Sample`, and its source where SLIME_SRC points to it."""

from __future__ import annotations

import sys
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from strands_tito.export import LogprobMismatchError, samples_of
from strands_tito.export.slime import STATUS, fan_out, fields_of, fill
from strands_tito.integrations.slime_generate import sampling_of
from support.drafts import make_draft
from support.kept_sets import truncated
from support.rollout_forests import CUT, HOT, chain, grow, rollouts
from support.slime_facts import CONTRACT, SOURCE, Recorded, check_types
from support.trainer_packages import run
from tito_core.ledger import Ledger
from tito_core.termination import Termination, record_termination


def text_of(ids: Any) -> str:
    return " ".join(map(str, ids))


def fields(ledger: Ledger, **options: Any) -> list[dict[str, Any]]:
    given = {"decode": text_of, "temperature": 1.0, **options}
    return [fields_of(sample, **given) for sample in samples_of(ledger)]


@settings(max_examples=25)
@given(rollouts() | rollouts(experts=True))
def test_fields_are_slimes_and_the_response_is_what_follows_the_prompt(ledger: Ledger) -> None:
    trained = 0
    for sample, found in zip(samples_of(ledger), fields(ledger, logprobs="as-recorded"), strict=True):
        assert set(found) <= set(CONTRACT["fields"])
        check_types(SimpleNamespace(**found), list(found))
        assert found["tokens"] == sample.token_ids.tolist()
        start = len(found["tokens"]) - found["response_length"]
        assert start == sample.prompt_length
        assert len(found["loss_mask"]) == len(found["rollout_log_probs"]) == found["response_length"]
        assert found["response"] == text_of(sample.token_ids[start:])
        for place, (mask, logprob) in enumerate(zip(found["loss_mask"], found["rollout_log_probs"], strict=True)):
            assert mask == sample.loss_mask[start + place]
            assert logprob == (sample.logprobs[start + place] if mask else 0.0)
        experts = None if sample.routed_experts is None else sample.routed_experts[:-1]
        np.testing.assert_array_equal(found["rollout_routed_experts"], experts)  # type: ignore[arg-type]
        assert not isinstance(found["rollout_routed_experts"], list), "a second of the event loop for 16,000 tokens"
        trained += sum(found["loss_mask"])
    free = [turn for turn in ledger if not turn.draft.constrained]
    assert trained == sum(len(turn.draft.output_ids) for turn in free)
    assert {each["rollout_log_probs"] for each in fields(ledger, logprobs="omit")} == {None}


def test_every_termination_has_a_status_of_slimes_and_what_ended_from_outside_is_not_trained() -> None:
    assert set(STATUS) == set(Termination)
    assert set(STATUS.values()) <= set(CONTRACT["statuses"]) - {"PENDING"}
    for word in Termination:
        ledger = chain((3, 2))
        record_termination(ledger, word)
        (found,) = fields(ledger)
        outside = word in (Termination.TEMPLATE, Termination.ENGINE_ERROR, Termination.ABORTED, Termination.CANCELLED)
        assert found["remove_sample"] is outside


def test_logprobs_of_another_quantity_are_refused() -> None:
    with pytest.raises(LogprobMismatchError, match="Law 11: slime"):
        fields(chain((3, 2), semantics=HOT))
    assert fields(chain((3, 2), semantics=HOT), temperature=0.7)[0]["rollout_log_probs"] == [-0.125, -0.25]
    ledger = chain((3, 2))
    grow(ledger, 0, 1, 2, semantics=CUT, constrained=True)  # a forced call is not part of the loss
    assert fields(ledger)[0]["rollout_log_probs"] == [-0.125, -0.25, 0, 0, 0]
    assert fields(ledger)[0]["loss_mask"] == [1, 1, 0, 0, 0]


def test_a_path_without_kept_sets_is_refused_where_slime_replays_them_unless_nothing_of_it_is_trained() -> None:
    """slime reads an empty set as the sampled token alone, and fails on None for every sample of the batch."""
    plain, mixed = chain((3, 2)), truncated(1, 2, top=12, mask=True, top_k=4)
    grow(mixed, 1, 1, 2)  # sampled greedily, or from the whole distribution
    for ledger in (plain, mixed):
        with pytest.raises(LogprobMismatchError, match=r"2 trained tokens of rollout .* have no kept set"):
            fields(ledger, top_p_replay=True)
    names = ("rollout_top_p_token_ids", "rollout_top_p_token_offsets")
    (unchecked,) = fields(plain, top_p_replay=True, logprobs="as-recorded")
    assert [unchecked[name].tolist() for name in names] == [[], [0, 0, 0]]
    grammar, aborted = Ledger(), chain((3, 2))
    grow(grammar, None, 3, 2, constrained=True)
    record_termination(aborted, Termination.ABORTED)
    for ledger in (grammar, aborted):
        (found,) = fields(ledger, top_p_replay=True)
        assert [found[name].tolist() for name in names] == [[], [0, 0, 0]]
        assert [fields(ledger)[0][name] for name in names] == [None, None]


def test_slimes_sampling_parameters_are_read() -> None:
    theirs = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": -1,
        "max_new_tokens": 64,
        "stop": None,
        "stop_token_ids": [2],
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
        "sampling_seed": 7,
    }
    ours = sampling_of(theirs)
    assert (ours.temperature, ours.top_p, ours.max_new_tokens, ours.seed) == (0.7, 0.9, 64, 7)
    assert ours.stop_token_ids == (2,)
    assert ours.stop == ()
    assert sampling_of({**theirs, "stop": "END"}).stop == ("END",)
    assert sampling_of({**theirs, "custom_params": {"return_top_p_token_ids": True}}) == ours  # asked for with top_k
    with pytest.raises(ValueError, match="custom_params"):
        sampling_of({**theirs, "custom_params": {"thinking_budget": 3}})
    with pytest.raises(ValueError, match="temprature"):
        sampling_of({"temprature": 1})


@dataclass
class Filled:
    """As much of slime's own sample as is written to."""

    index: int = 3
    rollout_id: int | None = None
    reward: Any = "asked of a model"
    metadata: dict[str, Any] | None = None
    status: Any = None

    class Status(Enum):
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"


@settings(max_examples=25)
@given(rollouts())
def test_slimes_own_sample_is_filled_with_the_fields_and_says_whose_it_is(ledger: Ledger) -> None:
    options: dict[str, Any] = {"decode": text_of, "temperature": 1.0, "logprobs": "as-recorded"}
    own = Filled(metadata={"task": 1})
    copies = fan_out(own, ledger, **options)
    assert own == Filled(metadata={"task": 1}), "it is not changed"
    found = samples_of(ledger)
    assert [copy.rollout_id for copy in copies] == [3] * len(found), "slime's loss counts the rollout once"
    for copy, sample, expected in zip(copies, found, fields(ledger, logprobs="as-recorded"), strict=True):
        given = {name: value for name, value in expected.items() if value is not None or name != "reward"}
        np.testing.assert_equal({name: getattr(copy, name) for name in given}, given)
        assert copy.reward == (sample.total if sample.total is not None else "asked of a model")
        assert copy.status is Filled.Status[STATUS[sample.termination]]
        assert copy.metadata == {
            "task": 1,
            "tito": {
                "rollout": ledger.uuid,
                "group_id": ledger.header.group_id,
                "task_id": ledger.header.task_id,
                "sample": None,
                "agent": None,
                "trajectory": sample.identity.trajectory,
                "turn": sample.identity.turn,
                "termination": sample.termination.value,
                "logprobs": [str(semantics) for semantics in sample.semantics],
            },
        }
    kept = fill(Filled(rollout_id=9), chain((3, 2), (2, 3)), **options)
    assert (kept.rollout_id, kept.metadata and "tito" in kept.metadata) == (9, True)


def test_a_rollout_without_a_turn_of_the_agent_is_aborted(caplog: pytest.LogCaptureFixture) -> None:
    solved, empty = Ledger(group_id="g"), Ledger(group_id="g")
    solved.commit(make_draft(None, 0, [100] * 2, [200] * 3, agent="solver"))
    record_termination(solved, Termination.COMPLETED)
    options: dict[str, Any] = {"decode": text_of, "temperature": 1.0, "agent": "slover"}
    earlier = fill(Recorded(index=3), chain((3, 2)), decode=text_of, temperature=1.0)
    for ledger in (empty, solved):
        for sample in (fill(deepcopy(earlier), ledger, **options), *fan_out(earlier, ledger, **options)):
            assert sample.status.name == "ABORTED"
            assert (sample.tokens, sample.loss_mask, sample.response_length) == ([], [], 0), "none of its last run"
            assert sample.metadata["tito"] == {
                **dict.fromkeys(("task_id", "sample", "agent", "trajectory", "turn")),
                "rollout": ledger.uuid,
                "group_id": "g",
                "termination": "completed" if len(ledger) else None,
                "logprobs": [],
            }
        told = ["rollouts=<1>, agent=<slover>, agents=<solver> | not trained: slime"] * (2 * len(ledger))
        assert [message.partition(" gets ")[0] for message in caplog.messages] == told


if SOURCE is not None:  # slime is in no registry: its source has to be there

    @pytest.mark.trainers
    def test_the_recorded_facts_are_those_of_the_source() -> None:
        sys.path.insert(0, str(Path(__file__).parent / "real"))
        from slime_contract import contract_of

        found = contract_of(Path(SOURCE))
        assert found == {name: CONTRACT[name] for name in found}

    @pytest.mark.trainers
    def test_slimes_own_code_takes_the_samples_and_its_loop_runs_generate() -> None:
        output = run("slime_check.py", "slime", paths=[SOURCE])
        assert output.splitlines()[-1].startswith("slime: ok, ")

    @pytest.mark.trainers
    def test_slimes_own_data_path_gives_each_placeholder_its_feature() -> None:
        output = run("slime_images_check.py", "slime", paths=[SOURCE])
        assert output.splitlines()[-1].startswith("slime's images: ok, ")
