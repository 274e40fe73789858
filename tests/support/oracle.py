"""An oracle of what a ledger must hold, computed from plain lists and dicts in the obvious way, without our code."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

PROMPT_KINDS = {"prompt": 0, "scaffold": 1, "inserted": 2}
SAMPLED, CONSTRAINED = 3, 4


@dataclass
class PlainTurn:
    """One turn as plain values: what a test committed."""

    parent: int | None
    prompt: list[tuple[int, str]]  # token id, provenance
    output: list[tuple[int, float]]  # token id, logprob
    constrained: bool
    finish: str
    stop: int | str | None
    sampling: dict[str, Any]
    max_new_tokens: int
    server: tuple[str, str, bool | None, float | None, bool, str]
    request: str
    latency_s: float
    cached: int | None
    versions: list[tuple[int, int, str | None]]
    calls: list[tuple[str | None, str, int, int, str]]
    reasoning_closed: bool
    branch: tuple[str, int | None, int | None, str] | None
    extras: dict[str, tuple[int, list[Any], str]]  # first row's offset, rows, dtype
    media: list[tuple[int, int, bytes, str, int, int]]
    history: list[Any] | None  # opening, messages and answer; None if only the digest is known
    word: str | None = None  # the server's own finish reason
    unordered: bool = False
    fingerprint: bytes = b""
    call_ids: int = 0
    texts: dict[str, str] = field(default_factory=dict)  # as JSON: sampling, server, history


def text_of(value: Any) -> str:
    """Return a value's JSON text; 1, 1.0 and true have different texts."""
    return json.dumps(value, sort_keys=True)


@dataclass
class Path:
    """The expected trajectory of a leaf."""

    token_ids: list[int] = field(default_factory=list)
    provenance: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    mask_with_constrained: list[int] = field(default_factory=list)
    segments: list[tuple[int, int, int, bool]] = field(default_factory=list)
    versions: list[tuple[int, int, str | None]] = field(default_factory=list)
    semantics: list[tuple[Any, ...]] = field(default_factory=list)
    columns: dict[str, dict[int, Any]] = field(default_factory=dict)
    turns: list[int] = field(default_factory=list)
    context: set[int] = field(default_factory=set)
    branch: tuple[str, int | None, int | None, str] | None = None


class Oracle:
    """The record of one rollout."""

    def __init__(self, header: dict[str, Any]) -> None:
        self.header = header
        self.turns: list[PlainTurn] = []
        self.annotations: list[tuple[str, Any, int | None]] = []
        self.call_ids = 0

    def commit(self, turn: PlainTurn) -> None:
        """Append a turn. Without a branch record, a second turn of one parent is a separate agent's."""
        has_sibling = any(other.parent == turn.parent for other in self.turns)
        if has_sibling and turn.branch is None:
            turn.branch = ("separate agent", turn.parent, None, "")
        turn.call_ids = self.call_ids
        turn.texts = {name: text_of(getattr(turn, name)) for name in ("sampling", "server", "history")}
        self.turns.append(turn)

    def reload(self) -> None:
        """Follow a reload: a loaded ledger knows the call ids of its last turn."""
        self.call_ids = self.turns[-1].call_ids if self.turns else 0

    def path(self, turn: int | None) -> list[int]:
        if turn is None:
            return []
        return [*self.path(self.turns[turn].parent), turn]

    def length(self, turn: int | None) -> int:
        return sum(len(self.turns[i].prompt) + len(self.turns[i].output) for i in self.path(turn))

    def leaves(self) -> list[int]:
        return [i for i in range(len(self.turns)) if all(other.parent != i for other in self.turns)]

    def sampling_of(self, turn: int) -> int:
        return self._first(turn, "sampling")

    def server_of(self, turn: int) -> int:
        return self._first(turn, "server")

    def _first(self, turn: int, name: str) -> int:
        text = self.turns[turn].texts[name]
        return next(i for i, each in enumerate(self.turns) if each.texts[name] == text)

    def ending_in(self, history: list[Any]) -> list[int]:
        """Return the turns whose history and answer are these messages."""
        text = text_of(history)
        return [i for i, each in enumerate(self.turns) if each.texts["history"] == text]

    def latest(self, name: str, turn: int | None) -> Any:
        values = [value for *key, value, of_turn in self.annotations if (*key, of_turn) == (name, turn)]
        return values[-1] if values else None

    def trajectories(self) -> list[Path]:
        paths: list[Path] = []
        seen: set[int] = set()
        for leaf in self.leaves():
            path = Path(context=seen & set(self.path(leaf)))
            for turn in self.path(leaf):
                self._add(path, turn, turn in seen)
            seen |= set(self.path(leaf))
            paths.append(path)
        return paths

    def _add(self, path: Path, index: int, seen: bool) -> None:
        turn = self.turns[index]
        start = len(path.token_ids)
        for token, kind in turn.prompt:
            path.token_ids.append(token)
            path.provenance.append(PROMPT_KINDS[kind])
            path.logprobs.append(None)
            path.mask.append(0)
            path.mask_with_constrained.append(0)
        middle = len(path.token_ids)
        for token, logprob in turn.output:
            path.token_ids.append(token)
            path.provenance.append(CONSTRAINED if turn.constrained else SAMPLED)
            path.logprobs.append(logprob)
            path.mask.append(int(not seen and not turn.constrained))
            path.mask_with_constrained.append(int(not seen))
        path.segments += [(index, start, middle, False), (index, middle, len(path.token_ids), True)]
        path.versions += [(middle + first, middle + last, version) for first, last, version in turn.versions]
        if turn.server[2:] not in path.semantics:
            path.semantics.append(turn.server[2:])
        for name, (offset, rows, _) in turn.extras.items():
            for i, row in enumerate(rows):
                path.columns.setdefault(name, {})[offset + i] = row
        path.turns.append(index)
        if turn.branch is not None:
            path.branch = turn.branch


def same_numbers(found: Any, expected: Any) -> bool:
    """Compare nested lists of numbers, where NaN is NaN."""
    if isinstance(expected, list):
        return isinstance(found, list) and len(found) == len(expected) and all(map(same_numbers, found, expected))
    if isinstance(expected, float) and math.isnan(expected):
        return isinstance(found, float) and math.isnan(found)
    return bool(found == expected)
