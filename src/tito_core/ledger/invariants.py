"""The laws, as functions. Tests, the conformance suite and `tito verify` call these and nothing else.

Each raises `LawViolationError` with one sentence that names the law, turn, offset, expected and found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tito_core.ledger.provenance import Provenance, is_output
from tito_core.ledger.trajectory import Trajectory
from tito_core.ledger.turn import Draft, VersionSpan

if TYPE_CHECKING:
    from tito_core.ledger.ledger import Ledger

SENTINEL_LOGPROB = -9999.0
"""What vLLM reports for a masked token (`--logprobs-mode processed_logprobs`); never a measurement."""


class LawViolationError(ValueError):
    """A law of the ledger does not hold.

    Attributes:
        law: Its number.
    """

    def __init__(self, law: int, sentence: str) -> None:
        super().__init__(f"Law {law}: {sentence}")
        self.law = law


def check_ledger(ledger: Ledger) -> None:
    """Check every law that a ledger alone can answer (1 to 4 and 10)."""
    for turn in ledger:
        check_draft(turn.draft, path_length=ledger.path_length(turn.parent), turn=turn.index)
    for leaf, trajectory in zip(ledger.leaves(), ledger.trajectories(train_constrained=True), strict=True):
        check_prefix(ledger, leaf)
        check_alignment(trajectory)
    check_trained_once(ledger, ledger.trajectories())


def check_draft(draft: Draft, *, path_length: int, turn: int) -> None:
    """Check laws 1, 2, 4 and 10 on one turn, before it is committed or after.

    Args:
        draft: The turn's content.
        path_length: Tokens before its delta.
        turn: Its index, for the message.
    """
    _check_lengths(draft, turn)
    _check_delta_provenance(draft, turn)
    check_logprobs(draft.logprobs, turn=turn)
    expected = path_length + len(draft.prompt_ids)
    if draft.prompt_length != expected:
        raise LawViolationError(
            4,
            f"turn {turn}: the engine reported a prompt of {draft.prompt_length} tokens, "
            f"the ledger holds {expected} ({path_length} of the path and {len(draft.prompt_ids)} of the delta).",
        )
    check_versions(draft.engine.versions, len(draft.output_ids), turn=turn)


def _check_lengths(draft: Draft, turn: int) -> None:
    if len(draft.prompt_ids) != len(draft.prompt_provenance):
        raise LawViolationError(
            2, f"turn {turn}: {len(draft.prompt_ids)} delta ids but {len(draft.prompt_provenance)} provenances."
        )
    if len(draft.output_ids) != len(draft.logprobs):
        raise LawViolationError(
            2, f"turn {turn}: {len(draft.output_ids)} output ids but {len(draft.logprobs)} logprobs."
        )
    for name, ids in (("delta", draft.prompt_ids), ("output", draft.output_ids)):
        if len(ids) and int(ids.min()) < 0:
            offset = int(np.argmin(ids))
            raise LawViolationError(2, f"turn {turn}: {name} id {int(ids[offset])} at offset {offset} is negative.")


def _check_delta_provenance(draft: Draft, turn: int) -> None:
    wrong = np.flatnonzero(draft.prompt_provenance > Provenance.INSERTED)
    if len(wrong):
        found = int(draft.prompt_provenance[wrong[0]])
        raise LawViolationError(
            3, f"turn {turn}: delta token {int(wrong[0])} has provenance {found}; only the engine's output may."
        )


def check_logprobs(logprobs: Sequence[float] | np.ndarray, *, turn: int | None = None) -> None:
    """Check law 4 on logprobs: finite, at most 0 (within float32 rounding), no sentinel."""
    values = np.asarray(logprobs, np.float32)
    wrong = np.flatnonzero(~np.isfinite(values) | (values > 1e-4) | (values <= SENTINEL_LOGPROB))
    if len(wrong):
        offset = int(wrong[0])
        where = "the answer" if turn is None else f"turn {turn}"
        raise LawViolationError(
            4, f"{where}: logprob {float(values[offset])} at output offset {offset} is no log-probability."
        )


def check_versions(versions: Sequence[VersionSpan], output_length: int, *, turn: int | None = None) -> None:
    """Check law 10: the spans tile the output exactly."""
    where = "the answer" if turn is None else f"turn {turn}"
    at = 0
    for span in versions:
        if span.start != at or span.stop < span.start:
            raise LawViolationError(
                10, f"{where}: weight-version span {span.start}:{span.stop} should start at output offset {at}."
            )
        at = span.stop
    if at != output_length:
        raise LawViolationError(
            10, f"{where}: weight-version spans end at {at}, the output has {output_length} tokens."
        )


def check_prefix(ledger: Ledger, leaf: int) -> None:
    """Check law 1 along one path: each turn's prompt starts with its parent's prompt and completion."""
    at = 0
    for turn in ledger.path(leaf):
        if turn.path_length != at + turn.own_length or turn.draft.prompt_length != at + len(turn.draft.prompt_ids):
            raise LawViolationError(
                1,
                f"turn {turn.index}: its prompt of {turn.draft.prompt_length} tokens does not extend "
                f"the {at} tokens of its parent by its delta of {len(turn.draft.prompt_ids)}.",
            )
        at = turn.path_length


def check_alignment(trajectory: Trajectory) -> None:
    """Check law 2: one length, and a finite logprob exactly on output tokens."""
    n = len(trajectory.token_ids)
    for name in ("loss_mask", "logprobs", "provenance"):
        found = len(getattr(trajectory, name))
        if found != n:
            raise LawViolationError(2, f"column {name} has {found} entries for {n} token ids.")
    wrong = np.flatnonzero(np.isfinite(trajectory.logprobs) != is_output(trajectory.provenance))
    if len(wrong):
        i = int(wrong[0])
        raise LawViolationError(
            2, f"token {i} has provenance {int(trajectory.provenance[i])} and logprob {trajectory.logprobs[i]}."
        )
    at = 0
    for segment in trajectory.segments:
        if segment.start != at:
            raise LawViolationError(2, f"segment of turn {segment.turn} starts at {segment.start}, expected {at}.")
        at = segment.stop
    if at != n:
        raise LawViolationError(2, f"segments end at {at}, the columns at {n}.")


def check_trained_once(ledger: Ledger, trajectories: Sequence[Trajectory]) -> None:
    """Check law 3: each sampled token has mask 1 in exactly one trajectory, and nothing else has."""
    trained: Counter[int] = Counter()
    for trajectory in trajectories:
        if np.any(trajectory.loss_mask[~is_output(trajectory.provenance)]):
            raise LawViolationError(3, "a token that the engine did not report as output has loss mask 1.")
        for segment in trajectory.segments:
            if segment.is_output:
                trained[segment.turn] += int(trajectory.loss_mask[segment.start : segment.stop].sum())
    for turn in ledger:
        expected = 0 if turn.draft.constrained else len(turn.draft.output_ids)
        if trained[turn.index] != expected:
            raise LawViolationError(
                3, f"turn {turn.index}: {trained[turn.index]} of its tokens are trained, expected {expected}."
            )
