"""The histories that a ledger knows: a tree of messages, compared by content, with the turns that answered them.

A history is a list of plain JSON-like values: the opening (system prompt and tools), then the messages. The tree refers
to the caller's own strings, so matching a long history compares pointers. Of turns loaded from a file, only the digest
of the history is known.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tito_core.ledger.turn import Turn

DIGEST_BYTES = 16
PIECE = 1 << 15
"""Characters of a piece of a long string, whose encoding takes a fraction of a millisecond."""


class Node:
    """One message, a strict copy, and the messages before it: those of `parent`. Children and turns are only added.

    Attributes:
        parent: The node of the message before, or None for the tree's root.
        message: The message; None for the root.
        digest: Digest of the history up to and including the message.
        children: Nodes of the messages that followed, newest first.
        turns: Turns whose answer is the message.
    """

    __slots__ = ("children", "digest", "message", "parent", "turns")

    def __init__(self, parent: Node | None, message: Any, digest: bytes) -> None:
        self.parent = parent
        self.message = message
        self.digest = digest
        self.children: list[Node] = []
        self.turns: list[int] = []

    def child(self, message: Any) -> Node | None:
        """Return the child that holds a message, or None."""
        for node in self.children:
            if node.message == message:
                return node
        return None

    def add(self, message: Any, digest: bytes) -> Node:
        """Return the child that holds a message; create it if there is none."""
        node = self.child(message)
        if node is None:
            node = Node(self, message, digest)
            self.children.insert(0, node)
        return node

    def upward(self) -> Iterator[Node]:
        """Yield this node and its ancestors, except the tree's root, which has no message."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


@dataclass(slots=True, eq=False)
class Match:
    """The longest known beginning of a history.

    Attributes:
        node: The node where it ends.
        known: Its length in items, opening included.
        new: Strict copies of the items after it.
        root: Root of the tree in which it was found.
    """

    node: Node
    known: int
    new: tuple[Any, ...]
    root: Node
    _digests: list[bytes] | None = None

    @property
    def digests(self) -> list[bytes]:
        """Digest of the history up to and including each of `new`; computed when first asked for, in any thread."""
        if self._digests is None:
            self.hash_new()
        return self._digests or []

    def hash_new(self, *, in_pieces: bool = False) -> None:
        """Compute `digests`; in pieces other threads run meanwhile, as a long text takes tens of milliseconds."""
        self._digests = _digests(self.node.digest, self.new, extended_in_pieces if in_pieces else extended)

    @property
    def digest(self) -> bytes:
        """Digest of the whole history."""
        return self.digests[-1] if self.digests else self.node.digest


class HistoryIndex:
    """The tree. Not thread-safe: the ledger calls it under its lock."""

    def __init__(self) -> None:
        self._root = Node(None, None, b"")
        self._nodes: dict[int, Node] = {}
        self._loaded: dict[bytes, list[int]] = {}
        self._unindexed: list[Turn] = []

    def match(self, history: Sequence[Any], after: int | None = None) -> Match:
        """Find the longest known beginning of a history.

        Args:
            history: The opening and the messages.
            after: The turn that it probably continues. Its whole path is compared first, in one comparison.
        """
        node, known = self._start(history, after)
        for message in history[known:]:
            child = node.child(message)
            if child is None:
                break
            node, known = child, known + 1
        self._index_loaded()
        if self._loaded:
            digests = _digests(node.digest, history[known:])
            for known_node in node.upward():  # a loaded turn may have the same history as a turn of this process
                self._attach_loaded(known_node)
            node, known = self._graft(node, known, history, digests)
        new = tuple([strict(message) for message in history[known:]])
        return Match(node, known, new, self._root)

    def add(self, match: Match, answer: Any, turn: Turn) -> None:
        """Add the history that a turn answered, and its answer, a strict copy."""
        if match.root is not self._root:  # `forget` dropped that tree meanwhile
            self.load([turn])
            return
        node = match.node
        for message, digest in zip(match.new, match.digests, strict=True):
            node = node.add(message, digest)
        node = node.add(answer, turn.draft.fingerprint)
        node.turns.append(turn.index)
        self._nodes[turn.index] = node

    def load(self, turns: Iterable[Turn]) -> None:
        """Add turns whose digest alone is known. The next `match` indexes them."""
        self._unindexed += turns

    def node_of(self, turn: int) -> Node | None:
        """Return the node of a turn's answer, or None where only its digest is known."""
        return self._nodes.get(turn)

    def adopt(self, turn: int, answer: Any) -> None:
        """Replace a turn's answer by an equal one: the caller's own strings.

        Strands copies the strings of an answer once and passes those copies from then on.
        """
        node = self._nodes.get(turn)
        if node is not None and not node.children:
            node.message = strict(answer)

    def forget(self) -> None:
        """Drop every message. Turns are then found by their digests."""
        for index, node in sorted(self._nodes.items()):
            self._loaded.setdefault(node.digest, []).append(index)
        self._nodes.clear()
        self._root = Node(None, None, b"")

    def nodes(self) -> Iterator[Node]:
        """Yield every node."""
        stack = list(self._root.children)
        while stack:
            node = stack.pop()
            yield node
            stack += node.children

    def _start(self, history: Sequence[Any], after: int | None) -> tuple[Node, int]:
        """Return the node and depth of turn `after` if the history begins with its whole path, else the root and 0."""
        end = node = None if after is None else self._nodes.get(after)
        if end is not None:
            path: list[Any] = []
            while node is not None and node.parent is not None:  # no call for each message (law 14)
                path += (node.message,)
                node = node.parent
            path.reverse()
            if path == history[: len(path)]:
                return end, len(path)
        return self._root, 0

    def _index_loaded(self) -> None:
        for turn in self._unindexed:
            self._loaded.setdefault(turn.draft.fingerprint, []).append(turn.index)
        self._unindexed.clear()

    def _graft(self, node: Node, known: int, history: Sequence[Any], digests: Sequence[bytes]) -> tuple[Node, int]:
        """Add the messages of the longest beginning that loaded turns end in: the history now shows them."""
        first = known
        for end in range(len(digests), 0, -1):
            if digests[end - 1] not in self._loaded:
                continue
            for message, digest in zip(history[first : first + end], digests[:end], strict=True):
                node = node.add(strict(message), digest)
                self._attach_loaded(node)
            return node, first + end
        return node, known

    def _attach_loaded(self, node: Node) -> None:
        """Move the loaded turns with a node's digest to it."""
        for turn in self._loaded.pop(node.digest, ()):
            node.turns.append(turn)
            self._nodes[turn] = node


def extended(digest: bytes, message: Any) -> bytes:
    """Return the digest of a history with one more message: BLAKE2b of its JSON (sorted keys), keyed by `digest`."""
    try:
        encoded = _JSON.encode(message)
    except TypeError:  # keys of different types cannot be sorted; in JSON they are strings
        encoded = _JSON.encode(_with_string_keys(message))
    return hashlib.blake2b(encoded.encode(), key=digest, digest_size=DIGEST_BYTES).digest()


def extended_in_pieces(digest: bytes, message: Any) -> bytes:
    """Return `extended(digest, message)`, with long strings encoded in pieces."""
    hashed = hashlib.blake2b(key=digest, digest_size=DIGEST_BYTES)
    try:
        for piece in _pieces(message):
            hashed.update(piece.encode())
    except TypeError:  # see `extended`
        return extended(digest, message)
    return hashed.digest()


def _pieces(value: Any) -> Iterator[str]:
    """Yield the JSON of a value, as `_JSON` writes it."""
    if isinstance(value, str) and len(value) > PIECE:
        yield '"'
        for at in range(0, len(value), PIECE):
            yield _JSON.encode(value[at : at + PIECE])[1:-1]
        yield '"'
    elif isinstance(value, dict) and value and all(type(key) is str for key in value):
        for number, key in enumerate(sorted(value)):
            yield f"{', ' if number else '{'}{_JSON.encode(key)}: "
            yield from _pieces(value[key])
        yield "}"
    elif isinstance(value, list | tuple) and value:
        for number, item in enumerate(value):
            yield ", " if number else "["
            yield from _pieces(item)
        yield "]"
    else:
        yield _JSON.encode(value)


def _digests(start: bytes, messages: Sequence[Any], extend: Callable[[bytes, Any], bytes] = extended) -> list[bytes]:
    digests = []
    for message in messages:
        start = extend(start, message)
        digests.append(start)
    return digests


def _with_string_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _with_string_keys(item) for key, item in value.items()}
    return [_with_string_keys(item) for item in value] if isinstance(value, list | tuple) else value


def _encoded(value: Any) -> Any:
    if isinstance(value, _Number):
        return value.value
    return f"sha256:{hashlib.sha256(value).hexdigest()}" if isinstance(value, bytes) else repr(value)


_JSON = json.JSONEncoder(sort_keys=True, ensure_ascii=True, default=_encoded)


def strict(value: Any) -> Any:
    """Copy a value's containers so that `strict(a) == b`, with b strict or not, holds only for the same JSON.

    Strings are kept by reference, so comparing a string with itself is a pointer comparison at any length. Dicts, lists
    and strings are compared by the interpreter itself, which makes long histories cheap.
    """
    match value:
        case dict():  # most items are strings; a call for each would dominate the cost
            return {key: item if type(item) is str else strict(item) for key, item in value.items()}
        case list():
            return [item if type(item) is str else strict(item) for item in value]
        case tuple():  # a tuple stays a tuple: it equals no list
            return tuple([strict(item) for item in value])
        case float() | int():
            return _Number(value)
    return value  # a string, bytes, None, or already strict


def plain_copy(value: Any) -> Any:
    """Copy a strict value's containers, with its numbers as they were given: the inverse of `strict`."""
    match value:
        case dict():
            return {key: plain_copy(item) for key, item in value.items()}
        case list() | tuple():
            return type(value)([plain_copy(item) for item in value])
    return value.value if isinstance(value, _Number) else value


class _Number:
    """A number that equals only numbers of its own type. It must be the left operand: `strict(a) == b`."""

    __slots__ = ("kind", "value")

    def __init__(self, value: float) -> None:
        self.value = value
        self.kind = type(value)

    def __eq__(self, other: object) -> bool:
        if self.value is other or type(other) is self.kind:
            return self.value is other or self.value == other
        return type(other) is _Number and self.kind is other.kind and self.value == other.value
