"""Samples: over all samples of a rollout, each sampled token is trained once, with the right metadata."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strands_tito.export import (
    BranchedRolloutError,
    LogprobMismatchError,
    MissingPackageError,
    TrainingSample,
    logprobs_for,
    sample_of,
    samples_of,
    trained_tokens,
)
from strands_tito.export.sample import NO_EXPERT, exported_turns, sampled_mask
from strands_tito.export.trainer import experts_of, import_optional, trained_turns
from support.drafts import make_draft
from support.rollout_forests import CUT, HOT, RAW, chain, grow, rollouts
from tito_core.ledger import Annotation, Column, Finish, Ledger, Provenance, Semantics
from tito_core.termination import recorded_termination

few = settings(max_examples=25)


def trained_places(ledger: Ledger, samples: list[TrainingSample]) -> Counter[tuple[int, int]]:
    """Count for each sampled token, by turn and index, the samples that train it; read from the turns."""
    count: Counter[tuple[int, int]] = Counter()
    for sample, leaf in zip(samples, ledger.leaves(), strict=True):
        at = 0
        for turn in ledger.path(leaf):
            at += len(turn.draft.prompt_ids)
            for place in range(len(turn.draft.output_ids)):
                assert sample.token_ids[at] == turn.draft.output_ids[place]
                assert sample.logprobs[at] == turn.draft.logprobs[place]
                count[turn.index, place] += int(sample.loss_mask[at])
                at += 1
        assert at == len(sample)
    return count


@few
@given(rollouts(most_turns=10), st.integers(1, 3))
def test_a_cap_keeps_the_last_path_and_those_with_most_of_their_own_and_trains_each_of_their_tokens_once(
    ledger: Ledger, most: int
) -> None:
    every, samples = (
        samples_of(ledger, train_constrained=True),
        samples_of(ledger, train_constrained=True, max_paths=most),
    )
    assert len(samples) == min(most, len(every))
    numbers = [sample.identity.trajectory for sample in samples]
    assert {sample.identity.trajectories for sample in samples} == {len(every)}
    assert sample_of(ledger, branches="last").identity.trajectory in numbers
    paths = [{turn.index for turn in ledger.path(leaf)} for leaf in ledger.leaves()]
    kept = set().union(*(paths[number] for number in numbers))
    assert kept == exported_turns(ledger, agent=None, last=False, max_paths=most)
    assert trained_tokens(samples) == sum(len(ledger[turn].draft.output_ids) for turn in kept)
    for sample in samples:
        assert sample.token_ids.tolist() == every[sample.identity.trajectory].token_ids.tolist()
    shared = Counter(turn for path in paths for turn in path)
    own = [sum(len(ledger[turn].draft.output_ids) for turn in path if shared[turn] == 1) for path in paths]
    left = [own[number] for number in range(len(paths)) if number not in numbers]
    last = len(ledger) - 1
    assert all(own[number] >= max(left, default=0) for number in numbers if last not in paths[number])
    with pytest.raises(ValueError, match="max_paths is 0, expected at least 1"):
        samples_of(ledger, max_paths=0)


def test_a_cap_counts_what_the_trained_agent_sampled() -> None:
    ledger = Ledger()
    for agent, parent, output in (("judge", None, 9), ("a", 0, 1), ("a", None, 2), ("a", None, 1)):
        before = ledger.path_length(parent)
        ledger.commit(make_draft(parent, before, [100], [200] * output, agent=agent))
    assert [sample.identity.trajectory for sample in samples_of(ledger, agent="a", max_paths=2)] == [1, 2]


@few
@given(rollouts(), st.booleans())
def test_each_sampled_token_is_trained_once_over_all_samples_and_no_other(ledger: Ledger, constrained: bool) -> None:
    samples = samples_of(ledger, train_constrained=constrained)
    expected = {
        (turn.index, place): int(constrained or not turn.draft.constrained)
        for turn in ledger
        for place in range(len(turn.draft.output_ids))
    }
    found = trained_places(ledger, samples)
    assert {place: found[place] for place in expected} == expected
    assert trained_tokens(samples) == sum(expected.values())
    for sample in samples:
        assert not sample.loss_mask[: sample.prompt_length].any()
        assert not sample.loss_mask[sample.provenance < Provenance.SAMPLED].any()
        assert np.isnan(sample.logprobs[~sampled_mask(sample)]).all()
        assert np.isfinite(sample.logprobs[sampled_mask(sample)]).all()


@few
@given(rollouts())
def test_columns_have_one_length_and_the_response_begins_with_the_paths_own_first_answer(ledger: Ledger) -> None:
    trained_before: set[int] = set()
    for number, (sample, leaf) in enumerate(zip(samples_of(ledger), ledger.leaves(), strict=True)):
        path = ledger.path(leaf)
        columns = (sample.loss_mask, sample.logprobs, sample.provenance)
        assert {len(column) for column in columns} == {len(sample)} == {ledger.path_length(leaf)}
        own = next(turn for turn in path if turn.index not in trained_before)
        assert sample.prompt_length == own.path_length - len(own.draft.output_ids) >= 1
        assert sample.prompt_length + sample.response_length == len(sample)
        assert [*sample.prompt_ids, *sample.response_ids] == sample.token_ids.tolist()
        assert sample.response_mask.sum() == sample.loss_mask.sum()
        assert sample.identity.rollout_id == ledger.uuid
        assert (sample.identity.trajectory, sample.identity.trajectories) == (number, len(ledger.leaves()))
        assert (sample.identity.group_id, sample.identity.task_id) == (ledger.header.group_id, ledger.header.task_id)
        assert sample.turns == len(path)
        assert sample.finish is path[-1].draft.finish
        trained_before |= {turn.index for turn in path}


@few
@given(rollouts())
def test_versions_tile_the_sampled_tokens_and_the_word_and_the_reward_are_the_ledgers(ledger: Ledger) -> None:
    for sample in samples_of(ledger):
        covered = np.zeros(len(sample), np.bool_)
        for span in sample.versions:
            assert not covered[span.start : span.stop].any()
            covered[span.start : span.stop] = True
        assert (covered == sampled_mask(sample)).all()
        versions = [span.version for span in sample.versions for place in range(*span[:2]) if sample.loss_mask[place]]
        runs = [version for number, version in enumerate(versions) if not number or versions[number - 1] != version]
        assert list(sample.trained_versions) == runs
        last = ledger[len(ledger) - 1].draft.finish
        default = {Finish.STOP: "completed", Finish.LENGTH: "truncated", Finish.ABORT: "aborted"}[last]
        assert sample.termination == (recorded_termination(ledger) or default)
        assert sample.reward == ledger.annotation("reward")


@few
@given(rollouts(experts=True))
def test_experts_keep_their_rows_and_the_last_token_has_none(ledger: Ledger) -> None:
    for sample in samples_of(ledger):
        rows = sample.routed_experts
        assert rows is not None
        assert rows.shape == (len(sample), 2, 2)
        places = np.arange(len(sample) - 1) % 250
        assert (rows[:-1, 0, 0] == places).all()
        assert (rows[:-1, 1, 1] == places + 3).all()
        assert (rows[-1] == NO_EXPERT).all()


def test_a_turn_without_experts_leaves_a_hole_that_is_seen_and_not_trained() -> None:
    ledger = Ledger()
    ledger.commit(make_draft(None, 0, [100] * 2, [200] * 2))
    column = Column.of(4, np.full((3, 1, 1), 65535))
    ledger.commit(make_draft(0, 4, [100] * 2, [200] * 2, extras={"routed_experts": column}))
    (sample,) = samples_of(ledger)
    assert sample.routed_experts is not None
    assert sample.routed_experts[:, 0, 0].tolist() == [-1, -1, -1, -1, 65535, 65535, 65535, -1]
    with pytest.raises(ValueError, match=r"4 of 7 tokens, first at index 0.*routed_experts"):
        experts_of(sample)
    assert samples_of(chain((2, 2)))[0].routed_experts is None


def test_experts_of_an_unknown_shape_are_refused_with_the_option_that_records_it() -> None:
    """Flat rows (layers * experts a token) would be read by a trainer as another model's."""
    ledger = Ledger()
    column = Column.of(0, np.zeros((3, 4), np.uint8))
    ledger.commit(make_draft(None, 0, [100] * 2, [200] * 2, extras={"routed_experts": column}))
    with pytest.raises(ValueError, match=r"\(\d+, 4\).*routed_experts=\(layers, experts"):
        samples_of(ledger)


@few
@given(rollouts())
def test_one_sample_of_a_rollout_is_its_last_path_and_trains_all_of_it(ledger: Ledger) -> None:
    leaves = ledger.leaves()
    if len(leaves) > 1:
        with pytest.raises(BranchedRolloutError, match=f"{len(leaves)} trajectories.*branches='last'"):
            sample_of(ledger)
    sample = sample_of(ledger, branches="last")
    last = ledger.path(len(ledger) - 1)
    assert sample.token_ids.tolist() == ledger.path_ids(len(ledger) - 1).tolist()
    assert sample.prompt_length == len(last[0].draft.prompt_ids)
    free = sum(len(turn.draft.output_ids) for turn in last if not turn.draft.constrained)
    assert sample.loss_mask.sum() == free
    everything = sum(len(turn.draft.output_ids) for turn in last)
    assert sample_of(ledger, branches="last", train_constrained=True).loss_mask.sum() == everything


def test_an_empty_ledger_gives_no_samples_and_no_sample() -> None:
    assert samples_of(Ledger()) == []
    empty = Ledger()
    with pytest.raises(BranchedRolloutError, match=f"{empty.uuid} has no turns"):
        sample_of(empty, branches="last")


def test_a_trajectory_without_a_prompt_is_refused() -> None:
    ledger = Ledger()
    ledger.commit(make_draft(None, 0, [], [200]))
    with pytest.raises(ValueError, match=f"Trajectory 0 of ledger {ledger.uuid}.*prompt"):
        samples_of(ledger)


@pytest.mark.parametrize("value", [True, 1, 0.5, np.float32(0.5), np.int64(2), np.bool_(True), Fraction(1, 4), None])
def test_a_reward_is_kept_as_a_float_and_the_last_one_counts(value: Any) -> None:
    ledger = chain((2, 2))
    ledger.annotate("reward", -1)
    ledger.annotate("reward", value)
    kept = ledger.annotation("reward")
    assert (type(kept), kept) == ((type(None), None) if value is None else (float, float(value)))
    assert samples_of(ledger)[0].reward == kept


@pytest.mark.parametrize(
    "value", ["1.0", [1], {"a": 1}, float("nan"), float("inf"), np.float32("nan"), 1j, np.ones(2), 10**400, 1e39]
)
def test_a_reward_that_is_not_a_finite_number_is_refused(value: Any) -> None:
    ledger = chain((2, 2))
    for turn in (None, 0):
        with pytest.raises(ValueError, match=r"reward .* is not a finite number in float32: pass a float"):
            ledger.annotate("reward", value, turn=turn)
    assert ledger.annotations == ()


def test_a_misspelt_option_is_not_taken_for_another() -> None:
    ledger, branches, logprobs = chain((2, 2)), "Error", "Checked"
    with pytest.raises(ValueError, match="branches is 'Error', expected one of 'error', 'last'"):
        sample_of(ledger, branches=branches)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="logprobs is 'Checked', expected one of 'checked'"):
        list(trained_turns(ledger, trainer="a", temperature=1.0, logprobs=logprobs))  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["good", {"a": 1}, [1], float("nan")])
def test_a_reward_of_an_older_file_that_is_not_a_number_is_none(value: Any) -> None:
    """Annotations were not checked: such a file must still be read."""
    old = chain((2, 2))
    old = Ledger.load(old.header, [turn.draft for turn in old], [Annotation("reward", value)])
    assert samples_of(old)[0].reward is None


def test_semantics_are_those_of_trained_tokens_only() -> None:
    ledger = Ledger()
    grow(ledger, None, 3, 2, semantics=RAW)
    grow(ledger, 0, 1, 2, semantics=CUT, constrained=True)
    grow(ledger, 1, 1, 2, semantics=HOT)
    assert samples_of(ledger)[0].semantics == (RAW, HOT)
    assert samples_of(ledger, train_constrained=True)[0].semantics == (RAW, CUT, HOT)
    grow(ledger, 0, 1, 2, semantics=HOT)
    assert [sample.semantics for sample in samples_of(ledger)] == [(RAW, HOT), (HOT,)]


UNKNOWN = Semantics(None, None, False, "test")
RAW_AT_HALF = Semantics(False, 1.0, False, "raw, whatever was sampled at")


@pytest.mark.parametrize(
    ("semantics", "temperature", "fits"),
    [
        (RAW, 1.0, True),
        (RAW, 0.7, False),
        (HOT, 0.7, True),
        (HOT, 1.0, False),
        (CUT, 1.0, False),
        (UNKNOWN, 1.0, False),
        (RAW_AT_HALF, 0.5, False),
    ],
)
def test_logprobs_are_what_the_trainer_computes_or_refused(
    semantics: Semantics, temperature: float, fits: bool
) -> None:
    (sample,) = samples_of(chain((3, 2), (1, 2), semantics=semantics))
    expected = [0, 0, 0, -0.125, -0.25, 0, -0.125, -0.25]
    if fits:
        found = logprobs_for(sample, temperature=temperature, trainer="X")
        assert found is not None
        assert found.tolist() == expected
    else:
        with pytest.raises(LogprobMismatchError, match="Law 11: X"):
            logprobs_for(sample, temperature=temperature, trainer="X")
    taken = logprobs_for(sample, temperature=temperature, trainer="X", policy="as-recorded")
    assert taken is not None
    assert taken.tolist() == expected
    assert logprobs_for(sample, temperature=temperature, trainer="X", policy="omit") is None


def test_the_refusal_says_what_they_are_and_what_to_do() -> None:
    sample = samples_of(chain((3, 2), semantics=CUT))[0]
    with pytest.raises(LogprobMismatchError) as caught:
        logprobs_for(sample, temperature=0.5, trainer="TRL")
    message = str(caught.value)
    values = ("Law 11", "TRL", "logits / 0.5", sample.identity.rollout_id, "processed", "temperature 1.0", "grammar")
    remedies = ("logprobs='omit'", "logprobs='as-recorded'")
    assert [word for word in (*values, "source: test", *remedies) if word not in message] == []
    with pytest.raises(ValueError, match="logprobs is 'maybe'"):
        logprobs_for(sample, temperature=1.0, trainer="X", policy="maybe")  # type: ignore[arg-type]


def test_a_missing_package_says_how_to_install_it_and_a_broken_one_is_not_caught() -> None:
    with pytest.raises(MissingPackageError, match=r"pip install '\.\[that\]' in a clone"):
        import_optional("tito_no_such_package.part", "that")
    with pytest.raises(MissingPackageError, match="install tito_no_such_package"):
        import_optional("tito_no_such_package")
    with pytest.raises(ModuleNotFoundError, match="no_such_part"):
        import_optional("tito_core.no_such_part")
