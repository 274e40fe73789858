"""What each exporter makes of a whole group, since trainers compare a reward with those of its group.

The group has a bad row, a branched one and one without a reward. The advantages that trainers' own code computes of it
are in `real/`, under `make trainers`; slime's are computed by a function of ours, and so tested here too.
"""

from __future__ import annotations

import json
import statistics
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strands_tito.export.files import ExportOptions, write
from strands_tito.export.parquet import read_parquet
from strands_tito.export.slime import complete_aborted, fan_out, rewards_by_group
from strands_tito.export.trl import columns_of
from strands_tito.integrations.slime_generate import generate_with
from support.multiplying import QUESTION, make_agent, says
from support.rollout_forests import REWARDS, chain, group_of_one_prompt, grow
from support.scripted import backend_of, engine_of, policy_of
from support.slime_facts import PARAMETERS, Recorded, arguments
from support.typed import tito
from tito_core import store
from tito_core.ledger import Ledger

TEXT: dict[str, Any] = {"decode": lambda ids: "", "temperature": 1.0}


class Sample(Recorded):  # type: ignore[misc]
    """slime's sample, with its way of reading a reward."""

    def get_reward_value(self, args: Any) -> Any:
        return self.reward if args.reward_key is None else self.reward[args.reward_key]


def slime_args(**more: Any) -> Namespace:
    given = {"advantage_estimator": "grpo", "rewards_normalization": True, "grpo_std_normalization": True}
    return Namespace(**{**given, "reward_key": None, **more})


def slime_samples(group: list[Ledger], number: int = 0) -> list[Any]:
    base = [Sample(index=10 * number + place, group_index=number) for place in range(len(group))]
    found = [fan_out(sample, ledger, **TEXT) for sample, ledger in zip(base, group, strict=True)]
    return [complete_aborted(one) for several in found for one in several]


def normalized(reward: float, rewards: tuple[float, ...] = REWARDS) -> float:
    return (reward - statistics.mean(rewards)) / (statistics.stdev(rewards) + 1e-6)


def test_slimes_rewards_are_compared_within_the_group_and_each_rollout_counts_once() -> None:
    samples = slime_samples(group_of_one_prompt(), 0) + slime_samples([chain((2, 2))], 1)
    samples[-1].reward = 9.0  # alone in its group
    raw, rewards = rewards_by_group(slime_args(), samples)
    assert raw == [1.0, 0.0, 0.5, 0.5, 0.0, 0.0, 0.0, 9.0]
    # The branch's two samples have one advantage; the bad one, the unrewarded one and the empty one have none.
    assert rewards == pytest.approx([normalized(r) for r in (1.0, 0.0, 0.5, 0.5)] + [0.0] * 4)
    without_std = rewards_by_group(slime_args(grpo_std_normalization=False), samples)[1]
    assert without_std == pytest.approx([0.5, -0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    baseline = slime_args(advantage_estimator="reinforce_plus_plus_baseline")
    assert rewards_by_group(baseline, samples)[1] == pytest.approx(without_std)
    assert rewards_by_group(slime_args(advantage_estimator="ppo"), samples) == (raw, raw)
    for sample in samples:
        sample.reward = None if sample.reward is None else {"score": sample.reward}
    assert rewards_by_group(slime_args(reward_key="score"), samples) == (raw, rewards)


@settings(max_examples=30)
@given(st.lists(st.lists(st.tuples(st.integers(-3, 3), st.integers(1, 3)), min_size=1, max_size=4), max_size=3))
def test_slimes_rewards_do_not_depend_on_how_many_samples_a_rollout_has(groups: list[list[tuple[int, int]]]) -> None:
    samples: list[Any] = []
    for number, group in enumerate(groups):
        for place, (reward, copies) in enumerate(group):
            one = {"group_index": number, "index": 10 * number + place, "reward": reward}
            samples += [Sample(**one, rollout_id=one["index"]) for _ in range(copies)]
    found = iter(rewards_by_group(slime_args(grpo_std_normalization=False), samples)[1])
    for group in groups:
        for reward, copies in group:
            expected = reward - statistics.mean(each for each, _ in group)
            assert [next(found) for _ in range(copies)] == pytest.approx([expected] * copies)


async def test_a_list_without_that_function_is_refused() -> None:
    args = arguments("http://nowhere:1", "unused", custom_reward_post_process_path=None)
    policy = policy_of("sglang")
    with pytest.raises(ValueError, match=r"different prompts\. Add --custom-reward-post-process-path strands_tito"):
        await generate_with(make_agent, policy=policy)(args, Recorded(index=3, prompt=QUESTION), {**PARAMETERS})
    with pytest.raises(ValueError, match="has no group_index"):
        rewards_by_group(slime_args(), [Sample(index=3, reward=1.0)])


@pytest.mark.parametrize("more", [{"tito": "last"}, {"advantage_estimator": "ppo"}, {"rewards_normalization": False}])
async def test_what_slime_does_not_compare_needs_no_function(more: dict[str, Any]) -> None:
    from dataclasses import replace

    policy = replace(policy_of("sglang"), backend=backend_of(engine_of("sglang", says), "sglang"))
    args = arguments("http://nowhere:1", "unused", custom_reward_post_process_path=None, **more)
    run = generate_with(make_agent, policy=policy, branches=more.get("tito"))
    assert await run(args, Recorded(index=3, prompt=QUESTION, group_index=0), {**PARAMETERS})


def test_trls_rewards_are_none_where_a_rollout_does_not_count() -> None:
    found = columns_of(group_of_one_prompt(), temperature=1.0, end_id=2, branches="last")
    assert found["rollout_reward"] == [*REWARDS, None, None, None]
    assert [any(mask) for mask in found["env_mask"]] == [True, True, True, False, True, False]
    assert found["rollout_group"] == ["g"] * 6
    assert found["rollout_sample"] == [0, 1, 2, 3, 4, 5]


def options(**more: Any) -> ExportOptions:
    return ExportOptions(lambda _: lambda ids: "", **more)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_file_names_groups_and_counts_what_it_leaves_out(tmp_path: Path) -> None:
    group, path = group_of_one_prompt("a") + group_of_one_prompt("b"), tmp_path / "out"
    sampled = 2 * (5 * 4 + 1)

    written = write(group, "slime", path, options())
    rows = lines(path)
    assert [row["group_index"] for row in rows] == [0] * 6 + [1] * 6
    assert [row["metadata"]["tito"]["group_id"] for row in rows] == ["a"] * 6 + ["b"] * 6
    assert [row["metadata"]["tito"]["sample"] for row in rows] == [0, 1, 2, 2, 3, 4] * 2
    assert [row["remove_sample"] for row in rows] == [False] * 4 + [True] * 2 + [False] * 4 + [True] * 2
    samples = [Sample(**row) for row in rows]
    assert rewards_by_group(slime_args(), samples)[1] == pytest.approx(
        ([normalized(r) for r in (1.0, 0.0, 0.5, 0.5)] + [0.0] * 2) * 2
    )
    assert (written.rows, written.rollouts, written.without_turns) == (12, 12, 2)
    assert (written.without_reward, written.ended_outside) == (2, 2)
    assert (written.sampled, written.trained, written.masked, written.unrewarded) == (sampled, sampled - 16, 16, 8)

    written = write(group, "verl", path, options(branches="last"))
    rows = lines(path)
    assert [row["reward_score"] for row in rows] == [1.0, 0.0, 0.5, 0.0, 0.0] * 2, "null fails in verl's own code"
    assert [any(row["response_mask"]) for row in rows] == [True, True, True, False, False] * 2
    assert [row["extra_fields"]["group_id"] for row in rows] == ["a"] * 5 + ["b"] * 5
    assert (written.rows, written.elsewhere.total()) == (10, 4), "2 tokens of each branched rollout's first path"
    assert sampled == written.trained + written.masked + written.elsewhere.total()

    write(group, "trl", path, options(branches="last"))
    assert [row["rollout_reward"] for row in lines(path)] == [1.0, 0.0, 0.5, None, None] * 2
    assert [row["rollout_group"] for row in lines(path)] == ["a"] * 5 + ["b"] * 5
    assert write(group, "parquet", path, options()).masked == 0
    assert [sample.identity.sample for sample in read_parquet(path)] == [0, 1, 2, 2, 3, 4] * 2


@pytest.mark.parametrize(
    ("given", "rewards"), [(-1.0, [-1.0] * 3), (None, [None] * 3), ("untrained", [0.0, 0.0, None])]
)
def test_a_missing_reward_is_given_or_null_or_not_trained(given: Any, rewards: list[Any], tmp_path: Path) -> None:
    names = {"slime": "reward", "verl": "reward_score", "trl": "rollout_reward"}
    found = []
    for to, name in names.items():
        write([group_of_one_prompt()[4]], to, tmp_path / "out", options(missing_reward=given))
        (row,) = lines(tmp_path / "out")
        found.append(row[name])
        mask = next(row[key] for key in ("loss_mask", "response_mask", "env_mask") if key in row)
        removed = row.get("remove_sample", not any(mask))
        assert removed == (given == "untrained" and to != "trl")
    assert found == rewards


def agents_in_one_ledger() -> Ledger:
    from dataclasses import replace

    from tito_core.ledger import Branch
    from tito_core.ledger.turn import Reason

    made, ledger = chain((3, 4), (3, 5), (1, 6)), Ledger(group_id="g")
    for turn, (agent, parent) in enumerate([("solver", None), ("judge", None), ("solver", 0)]):
        grown = Ledger()
        for earlier in ledger:
            grown.commit(earlier.draft)
        grow(grown, parent, *((3, 4), (3, 5), (1, 6))[turn], constrained=agent == "judge")
        branch = Branch(Reason.SEPARATE, None) if turn == 1 else None
        ledger.commit(replace(grown[turn].draft, agent=agent, branch=branch))
    assert len(made) == len(ledger)
    return ledger


def test_the_command_says_what_it_left_out_and_why(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.tito"
    store.append(path, [agents_in_one_ledger(), Ledger(), chain((3, 2))])

    def shown(*words: object) -> list[str]:
        result = tito("export", path, "--out", tmp_path / "out", *words)
        assert result.exit_code == 0, result.output
        return result.output.splitlines()

    assert shown("--to", "verl", "--branches", "last", "--missing-reward", "0") == [
        f"Wrote 2 rows of 3 rollouts to {tmp_path / 'out'}. 12 of 17 sampled tokens are trained.",
        "Tokens left out: 5 of other paths and agents (judge 5).",
        "Rollouts: 1 without turns (no row), 2 without a reward.",
    ]
    assert shown("--to", "trl", "--branches", "last", "--agent", "judge") == [
        f"Wrote 1 row of 3 rollouts to {tmp_path / 'out'}. 0 of 17 sampled tokens are trained.",
        "Tokens left out: 12 of other paths and agents (solver 10, no agent 2), 5 sampled under a grammar.",
        "Rollouts: 1 without turns (no row), 1 without a turn of this agent (no row), 1 without a reward.",
    ]
    assert shown("--to", "verl")[1:3] == [
        "Tokens left out: 12 of rows without a reward, 5 sampled under a grammar.",
        "No reward, so nothing is trained: annotate rollouts with one, or add --missing-reward NUMBER, or null if the "
        "trainer computes rewards.",
    ]
    assert "5 sampled under a grammar" in shown("--to", "parquet")[1]
    assert [sample.identity.agent for sample in read_parquet(tmp_path / "out")] == ["judge", "solver", None]


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    path, out = tmp_path / "rollouts.tito", tmp_path / "gone" / "out"
    store.append(path, [chain((3, 2))])
    result = tito("export", path, "--to", "trl", "--out", out)
    told = "".join(result.output.replace("│", "").split())  # the box breaks lines within words
    assert (result.exit_code, "gonedoesnotexist.Createitfirst." in told) == (2, True), result.output
    with pytest.raises(FileNotFoundError, match=r"The folder .*gone does not exist\. Create it"):
        write([chain((3, 2))], "trl", out, options())
    refused = tito("export", path, "--to", "trl", "--out", "x", "--missing-reward", "nan")
    told = "".join(refused.output.replace("│", "").split())
    assert (refused.exit_code, "anumber,nulloruntrained" in told) == (2, True), refused.output
