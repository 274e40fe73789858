"""What a ledger should say, worked out from plain lists and dicts, the slow obvious way. Imports nothing of ours."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

PROMPT_KINDS = {"prompt": 0, "scaffold": 1, "inserted": 2}
SAMPLED, CONSTRAINED = 3, 4


@dataclass
class ParsedCallText:
    """One turn in plain words: what a test told the ledger."""

    parent: int | None
    prompt: list[tuple[int, str]]  # token id, where it came from
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
    media: list[tuple[int, int, bytes]]
    history: list[Any] | None  # opening, messages and the answer, or None where nobody can know them
    fingerprint: bytes = b""
    call_ids: int = 0
    texts: dict[str, str] = field(default_factory=dict)  # as JSON: sampling, server, history


def text_of(value: Any) -> str:
    """Give the one JSON text that a value has; 1, 1.0 and true have three."""
    return json.dumps(value, sort_keys=True)


@dataclass
class Path:
    """What the trajectory of a leaf should be."""

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
        self.turns: list[ParsedCallText] = []
        self.annotations: list[tuple[str, Any, int | None]] = []
        self.call_ids = 0

    def commit(self, said: ParsedCallText) -> None:
        """Take a turn; one that came after another was prepared for the same place is a separate agent's."""
        taken = any(other.parent == said.parent for other in self.turns)
        if taken and said.branch is None:
            said.branch = ("separate agent", said.parent, None, "")
        said.call_ids = self.call_ids
        said.texts = {name: text_of(getattr(said, name)) for name in ("sampling", "server", "history")}
        self.turns.append(said)

    def reload(self) -> None:
        """A ledger that comes back knows the call ids of its last turn."""
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
        wanted = self.turns[turn].texts[name]
        return next(i for i, said in enumerate(self.turns) if said.texts[name] == wanted)

    def ending_in(self, history: list[Any]) -> list[int]:
        """List the turns whose history and answer are these messages."""
        wanted = text_of(history)
        return [i for i, said in enumerate(self.turns) if said.texts["history"] == wanted]

    def latest(self, name: str, turn: int | None) -> Any:
        values = [value for said, value, about in self.annotations if (said, about) == (name, turn)]
        return values[-1] if values else None

    def trajectories(self) -> list[Path]:
        found, already = [], set()
        for leaf in self.leaves():
            path = Path(context=already & set(self.path(leaf)))
            for turn in self.path(leaf):
                self._add(path, turn, turn in already)
            already |= set(self.path(leaf))
            found.append(path)
        return found

    def _add(self, path: Path, turn: int, seen: bool) -> None:
        said = self.turns[turn]
        start = len(path.token_ids)
        for token, kind in said.prompt:
            path.token_ids.append(token)
            path.provenance.append(PROMPT_KINDS[kind])
            path.logprobs.append(None)
            path.mask.append(0)
            path.mask_with_constrained.append(0)
        middle = len(path.token_ids)
        for token, logprob in said.output:
            path.token_ids.append(token)
            path.provenance.append(CONSTRAINED if said.constrained else SAMPLED)
            path.logprobs.append(logprob)
            path.mask.append(int(not seen and not said.constrained))
            path.mask_with_constrained.append(int(not seen))
        path.segments += [(turn, start, middle, False), (turn, middle, len(path.token_ids), True)]
        path.versions += [(middle + first, middle + last, version) for first, last, version in said.versions]
        if said.server[2:] not in path.semantics:
            path.semantics.append(said.server[2:])
        for name, (offset, rows, _) in said.extras.items():
            for i, row in enumerate(rows):
                path.columns.setdefault(name, {})[offset + i] = row
        path.turns.append(turn)
        if said.branch is not None:
            path.branch = said.branch


def same_numbers(found: Any, expected: Any) -> bool:
    """Compare nested lists of numbers, where NaN is NaN."""
    if isinstance(expected, list):
        return isinstance(found, list) and len(found) == len(expected) and all(map(same_numbers, found, expected))
    if isinstance(expected, float) and math.isnan(expected):
        return isinstance(found, float) and math.isnan(found)
    return bool(found == expected)
