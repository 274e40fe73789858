"""Columns of scores: logprobs of another model for the recorded ids, which `Teacher` adds.

A column is one annotation for each turn, `scores/NAME`, with the logprobs of the turn's own tokens. They depend on the
path from the root to the turn only, so branches share them.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from strands_tito.inspect.mismatch import Mismatches, mismatch_of
from tito_core.backend.values import InvalidValueError
from tito_core.ledger.columns import ROUNDING, Logprobs, TokenIds
from tito_core.ledger.errors import LawViolationError
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.turn import Semantics, Turn, VocabularyCheck

PREFIX = "scores/"
"""Start of the names of annotations that hold a column."""
TEACHER = "teacher"
"""The column's name where the user gives none."""
FACTS = ("model", "weight_version", "vocabulary", "semantics")
"""Fields of `Scores` that are equal on all turns of a column."""


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """The logprobs of another model for the tokens of one path.

    Attributes:
        logprobs: float32, shape (n,): log p(token i | tokens before i) of every token, prompts too; NaN for the first
            token of the path and for placeholders of images.
        model: The model, as its server names it.
        weight_version: The version of its weights when the scoring began; None if not reported.
        vocabulary: How its vocabulary was compared with the rollout's (law 15).
        semantics: What the logprobs mean (law 11): raw, at temperature 1; its source names the engine and its version.
        token_ids: The ids that were given to `Teacher.score`, int32, shape (k,); columns of files have none.
        matrix: float32, shape (n, k): log p(token_ids[j] | tokens before i), with the same semantics; NaN in row 0.
    """

    logprobs: Logprobs
    model: str
    weight_version: str | None
    vocabulary: VocabularyCheck
    semantics: Semantics
    token_ids: TokenIds | None = None
    matrix: Logprobs | None = None


def recorded(ledger: Ledger) -> dict[str, dict[int, Any]]:
    """Return the stored values of each column by turn."""
    found: dict[str, dict[int, Any]] = {}
    for note in ledger.annotations:
        if note.name.startswith(PREFIX) and note.turn is not None:
            found.setdefault(note.name.removeprefix(PREFIX), {})[note.turn] = note.value
    return found


def scores_of(ledger: Ledger, path: Sequence[Turn]) -> dict[str, Scores]:
    """Return the columns that every turn of a path has.

    Raises:
        LawViolationError: A stored column does not fit its turn (law 2), or mixes models or semantics (law 11).
    """
    found = {}
    for column, values in recorded(ledger).items():
        if not path or any(turn.index not in values for turn in path):
            continue
        first = values[path[0].index]
        pieces = [decoded(column, ledger, turn, values[turn.index]) for turn in path]
        for turn in path:
            expect_same(column, ledger, turn.index, values[turn.index], first)
        found[column] = Scores(np.concatenate(pieces), **_facts(column, ledger, path[0].index, first))
    return found


@dataclass(frozen=True, slots=True)
class ColumnMismatch:
    """The mismatch of a column's model, in place of a trainer, and the recorded logprobs.

    Attributes:
        model: The column's model.
        mismatches: The figures of the compared tokens.
        left_out: Sampled tokens without a score, or whose logprobs have other semantics than the column (law 11).
    """

    model: str
    mismatches: Mismatches
    left_out: int


def mismatch_with(ledger: Ledger, column: str) -> ColumnMismatch:
    """Compare a column's scores with the recorded logprobs, each sampled token once.

    Raises:
        LawViolationError, InvalidValueError: As `scores_of`.
    """
    values = recorded(ledger)[column]
    kept, facts = [np.zeros((4, 0))], dict[str, Any]()
    for turn in ledger:
        draft, value = turn.draft, values.get(turn.index)
        if value is None:
            continue
        scores = decoded(column, ledger, turn, value)[draft.columns.prompt :]
        facts = facts or _facts(column, ledger, turn.index, value)
        expect_same(column, ledger, turn.index, value, next(iter(values.values())))
        if _mean_the_same(draft.engine.semantics, facts["semantics"]):
            at = np.flatnonzero(np.isfinite(scores))
            kept.append(np.stack([np.full(len(at), turn.index), at, draft.logprobs[at], scores[at]]))
    turns, positions, sampler, other = np.concatenate(kept, axis=1)
    found = mismatch_of(sampler, other, turns=turns, positions=positions)
    return ColumnMismatch(facts["model"], found, sum(turn.draft.columns.output for turn in ledger) - len(turns))


def _mean_the_same(one: Semantics, other: Semantics) -> bool:
    known = one.temperature is not None and one.temperature == other.temperature
    return known and not one.adjusted and not other.adjusted


def expect_same(column: str, ledger: Ledger, turn: int, value: Any, facts: Mapping[str, Any]) -> None:
    """Check that a turn's column has the same model and semantics as others.

    Raises:
        InvalidValueError: It has others.
    """
    theirs, ours = ({name: each.get(name) for name in FACTS} for each in (value, facts))
    if theirs != ours:
        raise InvalidValueError(
            f"Law 11: column {column!r} of turn {turn} of rollout {ledger.uuid} holds scores of {theirs}, and not of "
            f"{ours}. Give the scores of another model, engine or version another name (--column)."
        )


def encoded(logprobs: Logprobs, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stored value of a turn, of its own tokens' logprobs and of `as_json` facts."""
    return {"logprobs": base64.b64encode(logprobs.astype("<f4").tobytes()).decode(), **facts}


def as_json(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `Scores` other than the logprobs as they are stored."""
    names = ("processed", "temperature", "adjusted", "source")
    semantics = {name: getattr(facts["semantics"], name) for name in names}
    return {**facts, "vocabulary": facts["vocabulary"].value, "semantics": semantics}


def _facts(column: str, ledger: Ledger, turn: int, value: Any) -> dict[str, Any]:
    try:
        facts = {**{name: value[name] for name in FACTS}, "semantics": Semantics(**value["semantics"])}
        return {**facts, "vocabulary": VocabularyCheck(facts["vocabulary"])}
    except (KeyError, TypeError, ValueError) as error:
        _refuse(column, ledger, turn, error)


def decoded(column: str, ledger: Ledger, turn: Turn, value: Any) -> Logprobs:
    """Return the logprobs of a turn's stored value, float32, shape (own tokens,).

    Raises:
        LawViolationError: It is damaged (law 2).
    """
    try:
        logprobs = np.frombuffer(base64.b64decode(value["logprobs"], validate=True), "<f4").astype(np.float32)
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        _refuse(column, ledger, turn.index, error)
    if len(logprobs) != turn.own_length or np.any(logprobs > ROUNDING) or np.isinf(logprobs).any():
        _refuse(column, ledger, turn.index, f"{len(logprobs)} logprobs for {turn.own_length} tokens, or one above 0")
    return logprobs


def _refuse(column: str, ledger: Ledger, turn: int, why: object) -> NoReturn:
    raise LawViolationError(
        2,
        f"the scores {column!r} of turn {turn} of rollout {ledger.uuid} cannot be used: {why!r:.200}. "
        "Score again under another name (--column).",
    )
