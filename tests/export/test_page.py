"""The page on trainers says what the code does: each status, and each version that is tested."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from tools.matrix import CPU_TORCH, TRAINERS, pins

from strands_tito.export import samples_of
from strands_tito.export.agent_lightning import STATE
from strands_tito.export.slime import STATUS
from support.rollout_forests import chain
from tito_core.termination import Termination, record_termination

PAGE = (Path(__file__).parents[2] / "docs/trainers.md").read_text(encoding="utf-8")


def test_each_termination_has_its_row() -> None:
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \| (trained|masked) \| (\w+) \|$", PAGE, re.MULTILINE)
    assert [row[0] for row in rows] == [word.value for word in Termination]
    for name, slime, others, lightning in rows:
        word = Termination(name)
        assert slime.split(",")[0].strip() == STATUS[word]
        assert lightning == STATE[word]
        ledger = chain((3, 2))
        record_termination(ledger, word)
        assert (others == "masked") is samples_of(ledger)[0].ended_outside


BACKED = {
    "a branched rollout, by default": (
        "test_samples:test_each_sampled_token_is_trained_once_over_all_samples_and_no_other",
        "real/slime_check:samples_are_slimes",
        "real/verl_check:the_v1_trainer_takes_every_path_with_its_own_rewards, what_verl_cannot_take_is_refused",
        "real/trl_check:what_trl_cannot_take_is_refused; test_credit:test_what_one_row_cannot_hold_is_counted",
        "test_generators:test_what_skyrl_cannot_be_told_is_refused",
        "real/agent_lightning_check:events_become_triplets_and_a_batch",
        "real/tinker_check:data_are_tinkers",
        "real/verifiers_check:traces_are_verifiers",
    ),
    "rewards of turns, calls, branches": (
        "test_credit:test_each_agent_has_its_own_reward_and_its_own_group; test_parquet:test_samples_come_back_equal",
        "real/slime_check:samples_are_slimes",
        "real/verl_check:the_v1_trainer_takes_every_path_with_its_own_rewards, outputs_are_verls",
        "real/trl_check:a_group_without_those_that_do_not_count",
        "real/skyrl_check:rows_are_trained_as_sampled; test_generators:test_every_trajectory_is_a_step",
        "real/agent_lightning_check:events_become_triplets_and_a_batch",
        "real/tinker_check:data_are_tinkers",
        "real/verifiers_check:traces_are_verifiers, what_a_trainer_weighs_is_on_the_nodes",
    ),
    "groups": (
        "test_credit:test_each_agent_has_its_own_reward_and_its_own_group",
        "test_credit:test_slime_compares_rewards_of_one_agent_or_turn_where_it_is_told_to",
        "real/verl_check:a_whole_group_keeps_its_rewards",
        "real/trl_check:a_group_without_those_that_do_not_count",
        "real/skyrl_check:a_whole_group_is_trained_without_its_bad_rows",
        "",
        "",
        "",
    ),
    "no reward": (
        "test_batches:test_a_batch_numbers_rollouts_and_groups; test_parquet:test_samples_come_back_equal",
        "test_slime:test_slimes_own_sample_is_filled_with_the_fields_and_says_whose_it_is",
        "real/verl_check:a_whole_group_keeps_its_rewards",
        "real/trl_check:a_group_without_those_that_do_not_count",
        "real/skyrl_check:a_whole_group_is_trained_without_its_bad_rows",
        "real/agent_lightning_check:events_become_triplets_and_a_batch",
        "",
        "real/verifiers_check:traces_are_verifiers",
    ),
    "ended from outside": (
        "test_page:test_each_termination_has_its_row",
        "real/slime_check:what_ended_from_outside_is_not_trained, a_group_is_compared_with_itself",
        "real/verl_check:a_whole_group_keeps_its_rewards",
        "real/trl_check:a_group_without_those_that_do_not_count",
        "real/skyrl_check:a_whole_group_is_trained_without_its_bad_rows",
        "real/agent_lightning_check:events_become_triplets_and_a_batch",
        "real/tinker_check:data_are_tinkers",
        "test_generators:test_a_traces_nodes_are_the_turns",
    ),
    "[kept sets](#kept-sets)": (
        "test_kept:test_a_trainer_that_replays_gets_the_sets_and_the_logprobs_that_were_sampled",
        "real/slime_check:kept_sets_are_slimes",
        *("test_kept:test_a_trainer_without_a_place_for_kept_sets_is_refused_although_they_are_recorded",) * 2,
        "real/skyrl_check:kept_sets_are_skyrls",
        *("test_kept:test_a_trainer_without_a_place_for_kept_sets_is_refused_although_they_are_recorded",) * 2,
        "real/verifiers_check:kept_sets_are_verifiers",
    ),
    "[teachers](#teachers)": (
        *("../inspect/test_teacher:test_exports_hold_the_column",) * 2,
        *("",) * 5,
        "real/verifiers_check:what_a_trainer_weighs_is_on_the_nodes",
    ),
    "[images](images.md)": (
        "test_images:test_parquet_holds_the_files",
        "test_images:test_slime_gets_pictures_and_the_processors_tensors",
        "real/verl_check:verls_worker_makes_the_tensors_of_images",
        *("test_images:test_trainers_that_would_drop_images_refuse_them",) * 4,
        "real/verifiers_check:images_are_in_the_messages_and_their_tokens_are_marked",
    ),
    "routed experts": (
        "test_parquet:test_samples_come_back_equal",
        "real/slime_check:samples_are_slimes",
        "real/verl_check:outputs_are_verls",
        "",
        "real/skyrl_check:rows_are_trained_as_sampled",
        "real/agent_lightning_check:experts_are_the_proxys_bytes",
        "",
        "real/verifiers_check:experts_are_of_every_token",
    ),
}
"""The tests behind each cell of the page's table of trainers, as "file:function, function; file:function"."""


_CREDIT, _V1 = "test_credit:test_", "real/verl_check:the_v1_trainer_takes_every_path_with_its_own_rewards"
_REFUSED = "real/verl_check:rewards_of_another_agent_are_refused_where_grpo_would_ignore_them"
_LAST_PATHS = f"{_CREDIT}what_one_row_cannot_hold_is_counted"
_PRIME = "real/prime_rl_check:samples_are_trained_as_sampled"
_STEPS = "real/skyrl_check:the_last_row_is_all_that_step_wise_training_reads"
READ = {
    "a reward's place in its row": (
        "real/slime_check:samples_are_slimes",
        _V1,
        "real/verl_check:a_whole_group_keeps_its_rewards",
        f"{_CREDIT}trl_gets_the_sum_of_a_row_and_its_tokens",
        f"{_STEPS}, each_place_is_read_by_an_estimator_of_tokens",
        f"{_PRIME}; real/verifiers_check:traces_are_verifiers",
    ),
    "several rows of a rollout": (
        "real/slime_check:a_group_is_compared_with_itself",
        _V1,
        "",
        "",
        _STEPS,
        "real/verifiers_check:traces_are_verifiers",
    ),
    "rewards of several agents": (
        f"{_CREDIT}slime_compares_rewards_of_one_agent_or_turn_where_it_is_told_to",
        _REFUSED,
        f"{_CREDIT}each_agent_has_its_own_reward_and_its_own_group",
        f"{_CREDIT}each_agent_has_its_own_reward_and_its_own_group",
        "test_generators:test_rewards_that_step_wise_training_ignores_are_refused_of_another_agent_and_counted_of_the_same",
        "real/verifiers_check:what_a_trainer_weighs_is_on_the_nodes",
    ),
    "rewards on paths without a row (`last`, `max_paths`)": (*(_LAST_PATHS,) * 5, ""),
    "logprobs": (
        "real/slime_check:the_loss_reads_logprobs_by_these_options",
        *("real/verl_check:logprobs_are_read_where_a_rollout_correction_is_set",) * 2,
        "real/trl_check:recorded_logprobs_are_read_in_server_mode",
        "real/skyrl_check:logprobs_are_read_where_an_off_policy_correction_is_set",
        _PRIME,
    ),
    "weight versions": (
        "real/slime_check:the_loss_reads_logprobs_by_these_options",
        "real/verl_check:every_row_of_the_v1_trainer_has_the_bounds_of_its_weights",
        "real/verl_check:a_whole_group_keeps_its_rewards",
        "",
        "",
        "test_generators:test_a_traces_nodes_are_the_turns",
    ),
}
"""The tests behind each cell of the page's table of what a trainer reads, in the same form."""


@pytest.mark.parametrize(
    ("heading", "backed", "unbacked"),
    [("What each trainer takes", BACKED, ("-", "yours", "its own")), ("What of a batch is read", READ, ("-",))],
)
def test_each_cell_of_the_tables_of_trainers_has_a_test_and_none_is_gone(
    heading: str, backed: dict[str, tuple[str, ...]], unbacked: tuple[str, ...]
) -> None:
    table = next(part for part in PAGE.split(f"## {heading}")[1].split("\n\n") if part.startswith("| |")).splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert {re.sub(r"^\[rewards\]\(#rewards\)", "rewards", row[0]) for row in rows[2:]} == backed.keys()
    for row, tests in zip(rows[2:], backed.values(), strict=True):
        assert len(rows[0]) == len(row) == 1 + len(tests)
        for trainer, cell, named in zip(rows[0][1:], row[1:], tests, strict=True):
            assert (cell in unbacked) is (named == ""), (row[0], trainer)
            for file, names in (part.split(":") for part in named.split("; ") if part):
                source = (Path(__file__).parent / f"{file}.py").read_text(encoding="utf-8")
                missing = [name for name in names.split(", ") if f"def {name}(" not in source]
                assert not missing, (row[0], trainer, file)


def test_each_version_on_the_page_is_locked_and_each_lock_is_on_the_page() -> None:
    table = PAGE.split("## The rules")[0]
    for name, versions in TRAINERS.items():
        for version in versions:
            assert name == "ray" or version in table, (name, version)
            assert pins(f"{name}-{version}")[name] == version
    for row, package in product(("lowest", "newest"), ("pyarrow", "datasets")):
        assert pins(row)[package] in table
    assert CPU_TORCH in table


def test_no_trainer_is_imported_before_a_function_that_needs_it_is_called() -> None:
    """Except by `verl_loop`, which verl itself imports."""
    code = (
        "import importlib, pkgutil, sys, strands_tito.export, strands_tito.integrations\n"
        "packages = (strands_tito.export, strands_tito.integrations)\n"
        "names = [f'{each.__name__}.{one.name}' for each in packages for one in pkgutil.iter_modules(each.__path__)]\n"
        "names.remove('strands_tito.integrations.verl_loop')\n"
        "for name in names: importlib.import_module(name)\n"
        "print(len(names), {name.partition('.')[0] for name in sys.modules} & set(sys.argv[1:]))"
    )
    heavy = ["torch", "pyarrow", "datasets", "slime", "verl", "trl", "agentlightning", "tinker", "skyrl", "verifiers"]
    ran = subprocess.run([sys.executable, "-c", code, *heavy], capture_output=True, text=True, check=True)
    count, loaded = ran.stdout.strip().split(" ", 1)
    assert int(count) > 12
    assert loaded == "set()"
