"""Compare a ledger with the oracle, field by field."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from support.oracle import PROMPT_KINDS, Oracle, Path, PlainTurn, same_numbers, text_of
from tito_core.ledger import Branch, Ledger, Semantics, Trajectory, Turn


def expect_equal(ledger: Ledger, oracle: Oracle) -> None:
    """Assert that a ledger equals the oracle's."""
    header = ledger.header
    names = {name: getattr(header, name) for name in ("uuid", "group_id", "task_id", "tokenizer")}
    assert {**names, "user": dict(header.user)} == oracle.header
    assert len(ledger) == len(oracle.turns)
    for turn, expected in zip(ledger, oracle.turns, strict=True):
        _expect_turn(turn, expected)
        assert turn.draft.sampling.first == oracle.sampling_of(turn.index)
        assert turn.draft.sampling is ledger[oracle.sampling_of(turn.index)].draft.sampling
        assert turn.draft.engine.server.first == oracle.server_of(turn.index)
        assert turn.draft.engine.server is ledger[oracle.server_of(turn.index)].draft.engine.server
        assert [above.index for above in ledger.path(turn.index)] == oracle.path(turn.index)
        assert turn.path_length == ledger.path_length(turn.index) == oracle.length(turn.index)
        assert ledger.is_extended(turn.index) == (turn.index not in oracle.leaves())
        _expect_history(ledger, turn.index, expected)
    shown = [span for turn in oracle.turns for span in turn.media if span[3]]
    assert list(ledger.images) == list(dict.fromkeys(span[2] for span in shown))
    for _, _, digest, *facts in shown:
        image = ledger.images[digest]
        assert (image.sha256, image.format, image.width, image.height) == (digest, *facts)
        assert hashlib.sha256(image.data).digest() == digest
    _expect_annotations(ledger, oracle)
    _expect_trajectories(ledger, oracle)
    _expect_tree(ledger, oracle)


def _expect_turn(turn: Turn, expected: PlainTurn) -> None:
    draft, engine = turn.draft, turn.draft.engine
    assert draft.prompt_ids.tolist() == [token for token, _ in expected.prompt]
    assert draft.prompt_provenance.tolist() == [PROMPT_KINDS[kind] for _, kind in expected.prompt]
    assert draft.output_ids.tolist() == [token for token, _ in expected.output]
    logprobs = draft.logprobs.tolist()
    assert logprobs == [logprob for _, logprob in expected.output]
    assert [math.copysign(1, x) for x in logprobs] == [math.copysign(1, x) for _, x in expected.output]
    assert draft.prompt_length == turn.path_length - len(expected.output)
    names = ("parent", "constrained", "stop", "max_new_tokens", "reasoning_closed", "fingerprint", "call_ids")
    assert [_typed(getattr(draft, name)) for name in names] == [_typed(getattr(expected, name)) for name in names]
    assert draft.finish.value == expected.finish
    assert [tuple(call) for call in draft.calls] == expected.calls
    assert [tuple(span) for span in draft.media] == expected.media
    assert text_of(dict(draft.sampling)) == expected.texts["sampling"]
    assert (engine.server.backend, engine.server.model, *_semantics(engine.semantics)) == expected.server
    observed = (engine.request_id, engine.latency_s, engine.cached_tokens, engine.finish_word, engine.unordered)
    known = (expected.request, expected.latency_s, expected.cached, expected.word, expected.unordered)
    assert observed == known
    assert [tuple(span) for span in engine.versions] == expected.versions
    assert _branch(draft.branch) == expected.branch
    assert set(draft.extras) == set(expected.extras)
    for name, (start, rows, dtype) in expected.extras.items():
        column = draft.extras[name]
        assert (column.start, column.dtype, column.values.dtype) == (start, dtype, np.dtype(dtype))
        assert same_numbers(column.values.tolist(), rows)


def _typed(value: Any) -> tuple[type, Any]:
    return type(value), value


def _semantics(semantics: Semantics) -> tuple[Any, ...]:
    return semantics.processed, semantics.temperature, semantics.adjusted, semantics.source


def _branch(branch: Branch | None) -> tuple[str, int | None, int | None, str] | None:
    return None if branch is None else (branch.reason.value, branch.turn, branch.message, branch.detail)


def _expect_history(ledger: Ledger, turn: int, expected: PlainTurn) -> None:
    """Assert that the messages that a ledger holds for a turn, if any, are those of the turn."""
    node = ledger.node_of(turn)
    if node is not None:
        remembered = [each.message for each in node.upward()][::-1]
        assert expected.history is not None
        assert remembered == expected.history  # as strict copies: 1 is not 1.0


def expect_match(ledger: Ledger, oracle: Oracle, history: Sequence[Any]) -> None:
    """Assert that matching a history finds each turn whose history is a beginning of it."""
    match = ledger.match(history)
    assert match.known + len(match.new) == len(history)
    assert list(match.new) == list(history[match.known :])
    found = {match.known - i: sorted(node.turns) for i, node in enumerate(match.node.upward()) if node.turns}
    expected = {length: oracle.ending_in(list(history[:length])) for length in range(1, len(history) + 1)}
    assert found == {length: turns for length, turns in expected.items() if turns}


def _expect_annotations(ledger: Ledger, oracle: Oracle) -> None:
    found = [(annotation.name, annotation.value, annotation.turn) for annotation in ledger.annotations]
    assert json.dumps(found) == json.dumps(oracle.annotations)  # tells 1 from 1.0, and NaN equals NaN
    for name, turn in {(name, turn) for name, _, turn in oracle.annotations}:
        assert json.dumps(ledger.annotation(name, turn=turn)) == json.dumps(oracle.latest(name, turn))


def _expect_trajectories(ledger: Ledger, oracle: Oracle) -> None:
    expected = oracle.trajectories()
    assert ledger.leaves() == oracle.leaves()
    plain, constrained = ledger.trajectories(), ledger.trajectories(train_constrained=True)
    for trajectory, with_constrained, path in zip(plain, constrained, expected, strict=True):
        _expect_trajectory(trajectory, path)
        assert with_constrained.loss_mask.tolist() == path.mask_with_constrained
        assert with_constrained.token_ids.tolist() == path.token_ids
    trained = [0] * len(oracle.turns)
    for trajectory in constrained:
        for segment in trajectory.segments:
            trained[segment.turn] += int(trajectory.loss_mask[segment.start : segment.stop].sum())
    assert trained == [len(each.output) for each in oracle.turns]


def _expect_trajectory(trajectory: Trajectory, path: Path) -> None:
    assert trajectory.token_ids.tolist() == path.token_ids
    assert trajectory.provenance.tolist() == path.provenance
    assert trajectory.loss_mask.tolist() == path.mask
    assert same_numbers(
        trajectory.logprobs.tolist(), [float("nan") if value is None else value for value in path.logprobs]
    )
    dtypes = [column.dtype.str for column in (trajectory.token_ids, trajectory.logprobs, trajectory.loss_mask)]
    assert dtypes == ["<i4", "<f4", "<i8"]
    assert sum(trajectory.loss_mask) == sum(path.mask), "a narrow dtype would overflow"
    assert [tuple(segment) for segment in trajectory.segments] == path.segments
    assert [tuple(span) for span in trajectory.versions] == path.versions
    assert [_semantics(semantics) for semantics in trajectory.semantics] == path.semantics
    assert list(trajectory.turns) == path.turns
    assert set(trajectory.context_turns) == path.context
    assert _branch(trajectory.branch) == path.branch
    assert len(trajectory) == len(path.token_ids)
    assert set(trajectory.column_names) == {name for turn in trajectory.path for name in turn.draft.extras}
    for name, rows in path.columns.items():
        _expect_column(trajectory, name, rows)


def _expect_column(trajectory: Trajectory, name: str, rows: dict[int, Any]) -> None:
    shape = next((np.shape(row) for row in rows.values()), None)
    if shape is None:
        return
    blank = np.full(shape, 0.0 if name.endswith("logprobs") else 0).tolist()
    found = trajectory.column(name, 0)
    assert found.dtype.kind == ("f" if name.endswith("logprobs") else found.dtype.kind)
    assert same_numbers(found.tolist(), [rows.get(i, blank) for i in range(len(trajectory))])


def _expect_tree(ledger: Ledger, oracle: Oracle) -> None:
    title, *lines = ledger.tree().split("\n")
    assert title.startswith(f"ledger {oracle.header['uuid']}: ")
    drawn = [re.match(r"[ │├└─]*turn (\d+)  (\d+)\+(\d+) tokens  ", line) for line in lines]
    numbers = {tuple(map(int, match.groups())) for match in drawn if match is not None}
    assert numbers == {(i, len(each.prompt), len(each.output)) for i, each in enumerate(oracle.turns)}
    assert len(lines) == len(oracle.turns)
    for line in lines:
        turn = oracle.turns[int(re.search(r"turn (\d+)", line)[1])]  # type: ignore[index]
        assert ("← " in line) == (turn.branch is not None)
        assert ("  constrained" in line) == turn.constrained
        assert ("reasoning left open" in line) == (not turn.reasoning_closed)
