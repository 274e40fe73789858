"""Which histories a ledger knows: a tree of messages, compared by content, with the turns that answered them.

A history is the opening (what comes before all messages) and its messages, as plain JSON-like values. What is known is
kept by reference to the caller's own strings, so that finding a long history costs a comparison of pointers; digests
serve what was loaded from a file, of which only they are known.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tito_core.ledger.json_equality import strict
from tito_core.ledger.turn import Turn

DIGEST_BYTES = 16


class Node:
    """One more message, a strict copy, after those of `above`; children and turns are only added."""

    __slots__ = ("above", "children", "digest", "message", "turns")

    def __init__(self, above: Node | None, message: Any, digest: bytes) -> None:
        self.above = above
        self.message = message
        self.digest = digest
        self.children: list[Node] = []
        self.turns: list[int] = []

    def child(self, message: Any) -> Node | None:
        """Find the entry for one more message, newest first."""
        for entry in self.children:
            if entry.message == message:
                return entry
        return None

    def add(self, message: Any, digest: bytes) -> Node:
        """Return the entry for one more message, made if need be."""
        entry = self.child(message)
        if entry is None:
            entry = Node(self, message, digest)
            self.children.insert(0, entry)
        return entry

    def upward(self) -> Iterator[Node]:
        """Yield this entry and those above it, but not the tree's root, which has no message."""
        entry = self
        while entry.above is not None:
            yield entry
            entry = entry.above


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """How far a history is known.

    Attributes:
        entry: The deepest known entry.
        known: Number of items, opening included, that lead there.
        new: Strict copies of the items after it.
        digests: Digest of the history up to and including each of `new`.
        root: Root of the tree that it was walked in.
    """

    entry: Node
    known: int
    new: tuple[Any, ...]
    digests: tuple[bytes, ...]
    root: Node

    @property
    def digest(self) -> bytes:
        """Digest of the whole history."""
        return self.digests[-1] if self.digests else self.entry.digest


class HistoryIndex:
    """The tree. Its owner, the ledger, holds the lock while it calls."""

    def __init__(self) -> None:
        self._root = Node(None, None, b"")
        self._entries: dict[int, Node] = {}
        self._loaded: dict[bytes, list[int]] = {}
        self._unindexed: list[Turn] = []

    def walk(self, history: Sequence[Any], after: int | None = None) -> Match:
        """Follow a history, opening first, as far as it is known.

        Args:
            history: The opening and the messages.
            after: The turn that it probably continues, whose whole path is then compared at once.
        """
        entry, known = self._start(history, after)
        for message in history[known:]:
            child = entry.child(message)
            if child is None:
                break
            entry, known = child, known + 1
        digests = self._digests(entry.digest, history[known:])
        self._index_loaded()
        if self._loaded:
            for above in entry.upward():  # what came by its digest may say the same as what is known
                self._take_up(above)
            entry, known = self._graft(entry, known, history, digests)
        new = tuple([strict(message) for message in history[known:]])
        return Match(entry, known, new, tuple(digests[len(digests) - len(new) :]), self._root)

    def add(self, walk: Match, answer: Any, turn: Turn) -> None:
        """Keep what a turn answered, and a strict copy of its answer."""
        if walk.root is not self._root:  # every message was let go of since
            self.load([turn])
            return
        entry = walk.entry
        for message, digest in zip(walk.new, walk.digests, strict=True):
            entry = entry.add(message, digest)
        entry = entry.add(answer, turn.draft.fingerprint)
        entry.turns.append(turn.index)
        self._entries[turn.index] = entry

    def load(self, turns: Iterable[Turn]) -> None:
        """Keep turns of which only the digest is known; they are indexed when a history is first looked for."""
        self._unindexed += turns

    def entry_of(self, turn: int) -> Node | None:
        """Return the entry of a turn's answer, or None where only its digest is known."""
        return self._entries.get(turn)

    def adopt(self, turn: int, answer: Any) -> None:
        """Refer to the caller's own strings for a turn's answer, which is equal to what is known of it.

        Strands makes new strings of the answer that it was given; from then on it hands out those.
        """
        entry = self._entries.get(turn)
        if entry is not None and not entry.children:
            entry.message = strict(answer)

    def forget(self) -> None:
        """Let go of every message; what is known stays known by its digest."""
        for index, entry in sorted(self._entries.items()):
            self._loaded.setdefault(entry.digest, []).append(index)
        self._entries.clear()
        self._root = Node(None, None, b"")

    def entries(self) -> Iterator[Node]:
        """Yield every entry."""
        waiting = list(self._root.children)
        while waiting:
            entry = waiting.pop()
            yield entry
            waiting += entry.children

    def _start(self, history: Sequence[Any], after: int | None) -> tuple[Node, int]:
        """Return the entry of a turn, and its depth, when the history begins with the whole path to it."""
        entry = None if after is None else self._entries.get(after)
        if entry is not None:
            path = [above.message for above in entry.upward()][::-1]
            if path == history[: len(path)]:
                return entry, len(path)
        return self._root, 0

    def _index_loaded(self) -> None:
        for turn in self._unindexed:
            self._loaded.setdefault(turn.draft.fingerprint, []).append(turn.index)
        self._unindexed.clear()

    def _graft(self, entry: Node, known: int, history: Sequence[Any], digests: Sequence[bytes]) -> tuple[Node, int]:
        """Take up the messages that lead to loaded turns, now that somebody shows them."""
        first = known
        for end in range(len(digests), 0, -1):
            if digests[end - 1] not in self._loaded:
                continue
            for message, digest in zip(history[first : first + end], digests[:end], strict=True):
                entry = entry.add(strict(message), digest)
                self._take_up(entry)
            return entry, first + end
        return entry, known

    def _take_up(self, entry: Node) -> None:
        """Attach the loaded turns that end in an entry to it."""
        for turn in self._loaded.pop(entry.digest, ()):
            entry.turns.append(turn)
            self._entries[turn] = entry

    @staticmethod
    def _digests(start: bytes, messages: Sequence[Any]) -> list[bytes]:
        digests = []
        for message in messages:
            start = extended(start, message)
            digests.append(start)
        return digests


def extended(digest: bytes, message: Any) -> bytes:
    """Digest a history with one more message: BLAKE2b of its JSON with sorted keys, keyed by the digest so far."""
    try:
        encoded = _JSON.encode(message)
    except TypeError:  # keys of several kinds have no order; as JSON they are strings
        encoded = _JSON.encode(_with_string_keys(message))
    return hashlib.blake2b(encoded.encode(), key=digest, digest_size=DIGEST_BYTES).digest()


def _with_string_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _with_string_keys(item) for key, item in value.items()}
    return [_with_string_keys(item) for item in value] if isinstance(value, list | tuple) else value


def _encoded(value: Any) -> str:
    return f"sha256:{hashlib.sha256(value).hexdigest()}" if isinstance(value, bytes) else repr(value)


_JSON = json.JSONEncoder(sort_keys=True, ensure_ascii=True, default=_encoded)
