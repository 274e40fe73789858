"""The data of a page: a ledger or a trajectory as JSON, with its columns in base64."""

from __future__ import annotations

import base64
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from strands_tito.viewer.token_text import TokenText
from tito_core.ledger.columns import Column, Logprobs
from tito_core.ledger.errors import LawViolationError
from tito_core.ledger.forest_invariants import check_ledger
from tito_core.ledger.header import Header
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.trajectory import Trajectory
from tito_core.ledger.turn import Turn

Data = dict[str, Any]
"""Data of a page; it encodes to JSON."""
Facts = list[tuple[str, str]]
"""Rows of (name, value)."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Data that a page shows in addition to the ledger.

    Attributes:
        text: Text of the tokens; None shows ids.
        differences: |recorded - re-scored| of each output token in nats, by turn.
        pictures: Images as `data:` URLs, by the SHA-256 of their bytes.
    """

    text: TokenText | None = None
    differences: Mapping[int, Logprobs] = field(default_factory=dict)
    pictures: Mapping[bytes, str] = field(default_factory=dict)


def ledger_data(ledger: Ledger, evidence: Evidence) -> Data:
    """Return a ledger as the data of a page."""
    notes = [{"name": note.name, "value": as_text(note.value), "turn": note.turn} for note in latest(ledger)]
    try:
        check_ledger(ledger)
        laws = ""
    except LawViolationError as error:
        laws = str(error)
    data = _turns_data(list(ledger), evidence)
    return data | {"uuid": ledger.uuid, "facts": _header_facts(ledger.header), "notes": notes, "broken": laws}


def trajectory_data(trajectory: Trajectory, evidence: Evidence) -> Data:
    """Return a trajectory as the data of a page; `context` lists the turns that an earlier trajectory trains."""
    data = _turns_data(trajectory.path, evidence)
    context = sorted(trajectory.context_turns)
    return data | {"uuid": "", "facts": [], "notes": [], "broken": "", "context": context}


def latest(ledger: Ledger) -> Iterable[Any]:
    """Return the last annotation of each (name, turn), in order of first use."""
    return {(note.name, note.turn): note for note in ledger.annotations}.values()


def as_text(value: Any) -> str:
    """Return a JSON value as text, and a string unchanged."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _header_facts(header: Header) -> Facts:
    facts = {
        "task": header.task_id,
        "group": header.group_id,
        "ledger": header.uuid,
        "tokenizer": header.tokenizer,
        "vocabulary check": header.vocabulary,
        "user": as_text(header.user) if header.user else None,
        "template certificate": as_text(header.certificate) if header.certificate else None,
    }
    return [(name, str(value)) for name, value in facts.items() if value is not None]


def _turns_data(turns: Sequence[Turn], evidence: Evidence) -> Data:
    text = evidence.text
    every = [_turn_data(turn, evidence) for turn in turns]
    drifted = [token for data in every for drift in data["drift"] for token in drift.ids]
    return {
        "turns": every,
        "text": text is not None,
        "pieces": {} if text is None else _pieces(text, {*_ids_of(turns), *drifted}),
        "pictures": _pictures(turns, evidence.pictures),
    }


def _ids_of(turns: Sequence[Turn]) -> Collection[int]:
    """Return every distinct id of the turns, including the top alternatives."""
    parts: list[npt.NDArray[np.generic]] = [turn.draft.columns.ids for turn in turns]
    parts += [turn.draft.extras["top_ids"].values.ravel() for turn in turns if "top_ids" in turn.draft.extras]
    whole = np.unique(np.concatenate([part.astype(np.int64) for part in parts])) if parts else np.zeros(0, np.int64)
    found: list[int] = whole[whole >= 0].tolist()
    return found


def _pieces(text: TokenText, ids: Collection[int]) -> Data:
    """Return each id's text; bytes that are not UTF-8 as a list with one hexadecimal string."""
    pieces: Data = {}
    for token in ids:
        piece = text.piece(token)
        try:
            pieces[str(token)] = piece.decode()
        except UnicodeDecodeError:
            pieces[str(token)] = [piece.hex()]
    return pieces


def _pictures(turns: Sequence[Turn], pictures: Mapping[bytes, str]) -> Data:
    digests = {span.sha256 for turn in turns for span in turn.draft.media}
    return {digest.hex(): pictures[digest] for digest in digests if digest in pictures}


def _turn_data(turn: Turn, evidence: Evidence) -> Data:
    draft, columns = turn.draft, turn.draft.columns
    start = turn.path_length - turn.own_length
    differences = evidence.differences.get(turn.index)
    return {
        "index": turn.index,
        "parent": turn.parent,
        "agent": draft.agent,
        "prompt": columns.prompt,
        "output": columns.output,
        "ids": _packed(columns.ids),
        "logprobs": _packed(columns.logprobs),
        "provenance": _packed(columns.prompt_provenance),
        "constrained": draft.constrained,
        "finish": str(draft.finish),
        "stop": draft.stop if isinstance(draft.stop, int) else None,
        "calls": [dict(zip(call._fields, call, strict=True)) for call in draft.calls],
        "open": not draft.reasoning_closed,
        "branch": None if draft.branch is None else {"why": str(draft.branch), "turn": draft.branch.turn},
        "versions": [tuple(span) for span in draft.engine.versions],
        "media": [(span.offset - start, span.length, span.sha256.hex()) for span in draft.media],
        "top": _top(draft.extras, start),
        "promptLogprobs": _column(draft.extras.get("prompt_logprobs"), start),
        "differences": None if differences is None else _packed(differences),
        "drift": [] if evidence.text is None else evidence.text.drift(draft.output_ids.tolist()),
        "record": _record(turn),
        "sampling": [(name, as_text(value)) for name, value in draft.sampling.items()],
    }


def _top(extras: Mapping[str, Column], start: int) -> Data | None:
    """Return the top tokens of each position with a lower bound of the entropy there; see `entropy`."""
    ids, logprobs = extras.get("top_ids"), extras.get("top_logprobs")
    if ids is None or logprobs is None or len(ids.shape) != 2 or ids.shape != logprobs.shape:
        return None
    return {
        "start": ids.start - start,
        "k": ids.shape[1],
        "ids": _packed(ids.values.astype("<i4")),
        "logprobs": _packed(logprobs.values.astype("<f4")),
        "entropy": _packed(entropy(logprobs.values.astype(np.float64)).astype("<f4")),
    }


def entropy(logprobs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return a lower bound of the entropy in nats, shape (n,).

    Args:
        logprobs: Log-probabilities of the top tokens, shape (n, k); NaN and -inf mean no token. The probability that
            is left over counts as one token.
    """
    probabilities = np.exp(np.where(np.isfinite(logprobs), logprobs, -np.inf))
    rest = np.clip(1 - probabilities.sum(axis=1, keepdims=True), 0, 1)
    every = np.concatenate([probabilities, rest], axis=1)
    return np.asarray(-np.sum(np.where(every > 0, every * np.log(np.where(every > 0, every, 1)), 0), axis=1) + 0.0)


def _column(column: Column | None, start: int) -> Data | None:
    if column is None or len(column.shape) != 1:
        return None
    return {"start": column.start - start, "values": _packed(column.values.astype("<f4"))}


def _record(turn: Turn) -> Facts:
    """Return the facts about a turn's request, response and engine."""
    draft, engine = turn.draft, turn.draft.engine
    server, semantics = engine.server, engine.semantics
    kind = {True: "processed", False: "raw", None: "of unknown processing"}[semantics.processed]
    temperature = "" if semantics.temperature is None else f", temperature {semantics.temperature:g}"
    responses = [f"{start} to {stop}: {request}" for start, stop, request in engine.responses]
    facts = {
        "agent": draft.agent or "",
        "backend": server.backend,
        "model": server.model,
        "request": engine.request_id,
        "latency": f"{engine.latency_s:.3f} s",
        "prompt": f"{draft.prompt_length:,} tokens, {_cached(engine.cached_tokens)}",
        "logprobs": f"{kind}{temperature}{', adjusted' if semantics.adjusted else ''} ({semantics.source})",
        "finish": f"{draft.finish}{'' if draft.stop is None else f', stop {draft.stop!r}'}",
        "at most": f"{draft.max_new_tokens:,} new tokens",
        "responses": "; ".join(responses),
        "columns": ", ".join(f"{name} {list(column.shape)}" for name, column in draft.extras.items()),
        "history": draft.fingerprint.hex(),
    }
    return [(name, value) for name, value in facts.items() if value]


def _cached(tokens: int | None) -> str:
    return "cached: not reported" if tokens is None else f"{tokens:,} cached"


def _packed(values: npt.NDArray[Any]) -> str:
    return base64.b64encode(np.ascontiguousarray(values).data).decode()
