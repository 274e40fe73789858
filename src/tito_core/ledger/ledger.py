"""The ledger: an append-only forest of turns, each holding only its own new tokens."""

from __future__ import annotations

import threading
import uuid as uuid_module
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from tito_core.ledger import invariants
from tito_core.ledger.trajectory import Trajectory, assemble
from tito_core.ledger.turn import Draft, TokenIds, Turn

G = TypeVar("G", bound=np.generic)


class Ledger:
    """The record of one rollout. Threads may share it: `commit` holds the only lock.

    Args:
        uuid: Identity of the rollout; a random one when not given.
    """

    def __init__(self, uuid: str | None = None) -> None:
        self.uuid = uuid or str(uuid_module.uuid4())
        self._turns: list[Turn] = []
        self._by_fingerprint: dict[bytes, list[int]] = {}
        self._lock = threading.Lock()
        self._call_ids = 0

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[Turn]:
        return iter(tuple(self._turns))

    def __getitem__(self, index: int) -> Turn:
        return self._turns[index]

    def commit(self, draft: Draft) -> Turn:
        """Append a turn, whole or not at all.

        The arrays are copied and frozen; the draft's laws are checked before anything changes.

        Raises:
            LawViolationError: The draft breaks law 1, 2 or 4.
            IndexError: `draft.parent` is not a turn of this ledger.
        """
        frozen = _frozen(draft)
        with self._lock:
            start = self.path_length(draft.parent)
            invariants.check_draft(frozen, path_length=start, turn=len(self._turns))
            length = start + len(frozen.prompt_ids) + len(frozen.output_ids)
            turn = Turn(index=len(self._turns), draft=frozen, path_length=length)
            self._turns.append(turn)
            self._by_fingerprint.setdefault(frozen.fingerprint, []).append(turn.index)
            return turn

    def matching(self, fingerprint: bytes) -> tuple[int, ...]:
        """List the turns whose history has this fingerprint, oldest first."""
        return tuple(self._by_fingerprint.get(fingerprint, ()))

    def next_call_id(self) -> str:
        """Give a tool-call id that is unique in this ledger and the same on every backend (law 13)."""
        with self._lock:
            self._call_ids += 1
            return f"call_{self.uuid[:8]}_{self._call_ids}"

    @property
    def call_ids(self) -> int:
        """How many tool-call ids were given out."""
        return self._call_ids

    def resume_call_ids(self, given: int) -> None:
        """Go on counting after a ledger was loaded, so that no id is given twice."""
        with self._lock:
            self._call_ids = max(self._call_ids, given)

    def path(self, index: int | None) -> list[Turn]:
        """List the turns from the root to `index`, both included; empty for None."""
        turns: list[Turn] = []
        while index is not None:
            turn = self._turns[index]
            turns.append(turn)
            index = turn.parent
        return turns[::-1]

    def path_length(self, index: int | None) -> int:
        """Count the tokens from the root to the end of turn `index`; 0 for None."""
        return 0 if index is None else self._turns[index].path_length

    def path_ids(self, index: int | None) -> TokenIds:
        """Give every token id from the root to the end of turn `index`, shape (path_length,)."""
        parts = [ids for turn in self.path(index) for ids in (turn.draft.prompt_ids, turn.draft.output_ids)]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    def leaves(self) -> list[int]:
        """List the turns that no turn extends, in commit order: one trajectory each."""
        parents = {turn.parent for turn in self._turns}
        return [turn.index for turn in self._turns if turn.index not in parents]

    def trajectories(self, *, train_constrained: bool = False) -> list[Trajectory]:
        """Flatten every root-to-leaf path; a shared turn is trained in the first one only (law 3)."""
        seen: set[int] = set()
        result = []
        for leaf in self.leaves():
            path = self.path(leaf)
            result.append(assemble(path, context=frozenset(seen), train_constrained=train_constrained))
            seen.update(turn.index for turn in path)
        return result


def _frozen(draft: Draft) -> Draft:
    """Copy the draft with arrays of the ledger's dtypes that nobody can write to."""
    return replace(
        draft,
        prompt_ids=_copied(draft.prompt_ids, np.int32),
        prompt_provenance=_copied(draft.prompt_provenance, np.uint8),
        output_ids=_copied(draft.output_ids, np.int32),
        logprobs=_copied(draft.logprobs, np.float32),
    )


def _copied(array: npt.ArrayLike, dtype: type[G]) -> npt.NDArray[G]:
    copy = np.array(array, dtype)
    copy.setflags(write=False)
    return copy
