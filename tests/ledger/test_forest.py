"""Random forests against an independent oracle: one Python list a path, built the slow obvious way."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from support.drafts import drafts, make_draft
from tito_core import store
from tito_core.ledger import Ledger, Provenance, check_ledger
from tito_core.store import from_record, to_record


class ForestMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger("00000000-0000-4000-8000-000000000000")
        # The oracle: for each turn, every token from the root as (id, provenance, logprob or None, turn).
        self.paths: list[list[tuple[int, int, float | None, int]]] = []
        self.parents: list[int | None] = []

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from([None, *range(len(self.paths))]))
        before = [] if parent is None else self.paths[parent]
        draft = data.draw(drafts(parent, len(before)))
        turn = self.ledger.commit(draft)
        assert turn.index == len(self.paths)
        kind = Provenance.CONSTRAINED if draft.constrained else Provenance.SAMPLED
        added = [
            (int(i), int(p), None, turn.index) for i, p in zip(draft.prompt_ids, draft.prompt_provenance, strict=True)
        ]
        added += [
            (int(i), int(kind), float(lp), turn.index) for i, lp in zip(draft.output_ids, draft.logprobs, strict=True)
        ]
        self.paths.append(before + added)
        self.parents.append(parent)

    @invariant()
    def laws_hold(self) -> None:
        check_ledger(self.ledger)

    @invariant()
    def trajectories_equal_the_oracle(self) -> None:
        leaves = [i for i in range(len(self.paths)) if i not in self.parents]
        assert self.ledger.leaves() == leaves
        already: set[int] = set()
        for leaf, trajectory in zip(leaves, self.ledger.trajectories(), strict=True):
            path = self.paths[leaf]
            assert trajectory.token_ids.tolist() == [token for token, _, _, _ in path]
            assert trajectory.provenance.tolist() == [provenance for _, provenance, _, _ in path]
            for found, (_, _, expected, _) in zip(trajectory.logprobs.tolist(), path, strict=True):
                assert math.isnan(found) if expected is None else found == expected
            mask = [int(p == Provenance.SAMPLED and turn not in already) for _, p, _, turn in path]
            assert trajectory.loss_mask.tolist() == mask
            already |= {turn for _, _, _, turn in path}

    @invariant()
    def every_path_is_readable(self) -> None:
        for index, path in enumerate(self.paths):
            assert self.ledger.path_ids(index).tolist() == [token for token, _, _, _ in path]
            assert self.ledger.path_length(index) == len(path)

    @invariant()
    def round_trip_is_identity(self) -> None:
        again = from_record(to_record(self.ledger))
        assert store.encode(again) == store.encode(self.ledger)


ForestMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=12, deadline=None)
TestForest = ForestMachine.TestCase


def test_a_draft_copies_its_arrays_and_nobody_can_write_to_them() -> None:
    output = np.array([200, 201], np.int32)
    draft = make_draft(None, 0, [100, 101], [0, 0], output_ids=output)
    output[0] = 299
    ledger = Ledger()
    turn = ledger.commit(draft)
    assert turn.draft.output_ids.tolist() == [200, 201]
    columns = turn.draft.columns
    views = (columns.ids, columns.prompt_ids, columns.output_ids, columns.logprobs, columns.prompt_provenance)
    assert not any(view.flags.writeable for view in views)
    trajectory = ledger.trajectories()[0]
    assert not any(
        column.flags.writeable
        for column in (trajectory.token_ids, trajectory.loss_mask, trajectory.logprobs, trajectory.provenance)
    )


def test_constrained_tokens_are_trained_only_when_asked_for() -> None:
    ledger = Ledger()
    ledger.commit(make_draft(None, 0, [100], [200, 201], constrained=True))
    assert ledger.trajectories()[0].loss_mask.sum() == 0
    assert ledger.trajectories(train_constrained=True)[0].loss_mask.tolist() == [0, 1, 1]
    assert np.isfinite(ledger.trajectories()[0].logprobs[1:]).all()


def test_segments_say_which_tokens_belong_to_which_turn() -> None:
    ledger = Ledger()
    ledger.commit(make_draft(None, 0, [100, 101], [200]))
    ledger.commit(make_draft(0, 3, [102], [201, 202]))
    runs = [(s.turn, s.start, s.stop, s.is_output) for s in ledger.trajectories()[0].segments]
    assert runs == [(0, 0, 2, False), (0, 2, 3, True), (1, 3, 4, False), (1, 4, 6, True)]
