"""Which ledger a model writes to: a new one, one that a restored session names, and after a reset the next."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from strands.types.content import Message

from tito_core.ledger.history_index import Match
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.turn import Draft, Turn
from tito_core.turn.parent import ledger_of
from tito_core.turn.policy_parts import PolicyParts


class TurnNotStoredError(OSError):
    """The store could not take a turn, so that neither the file nor the ledger has it (law 5)."""


class Recording:
    """The ledger of one rollout after the other. Threads may share it.

    Args:
        policy: Makes new ledgers, and has the store that they stream to.
        ledger: The first one; a new one when None, which a restored session may replace by its own.
    """

    def __init__(self, policy: PolicyParts, ledger: Ledger | None) -> None:
        self._policy = policy
        self._lock = threading.Lock()
        self._untouched = ledger is None
        self._sealed: set[str] = set()
        self._ledger = policy.ledger() if ledger is None else self._streamed(ledger)  # an empty ledger is falsy

    @property
    def ledger(self) -> Ledger:
        """The one that turns now go to."""
        return self._ledger

    def begin(self, state: Mapping[str, Any] | None) -> Ledger:
        """Return the ledger that a turn belongs to, whatever is reset before it ends.

        The first turn decides: when it is a restored agent's, the ledger that its key names comes back from the store.
        Later it could not, since others may be at work on the one there is.
        """
        with self._lock:
            if self._untouched:
                self._ledger = self._restored(ledger_of(state)) or self._ledger
            self._untouched = False
            return self._ledger

    def commit(self, ledger: Ledger, draft: Draft, walk: Match, answer: Message) -> Turn:
        """Append a turn to its ledger and to the store, or to neither.

        Raises:
            TurnNotStoredError: The store cannot write.
            LawViolationError: The draft breaks a law.
        """
        try:
            return ledger.commit(draft, walk, answer)
        except OSError as error:
            where = "the store" if self._policy.store is None else self._policy.store.path
            raise TurnNotStoredError(
                error.errno,
                f"Law 5: {where} could not take turn {len(ledger)} of ledger {ledger.uuid} ({error}), so the ledger "
                "does not have it either, and nothing before it is lost. Make room, or mend the file's place, and ask "
                "again.",
            ) from error

    def next(self) -> Ledger:
        """Begin the next ledger and give the one before it, sealed."""
        if self._policy.store is not None:
            self._policy.store.sync()  # first: when the disk fails, the ledger is still to be had
        with self._lock:
            sealed, self._ledger, self._untouched = self._ledger, self._policy.ledger(), True
            self._sealed.add(sealed.uuid)  # an agent that goes on must not bring it back
        return sealed.seal()

    def _restored(self, uuid: str | None) -> Ledger | None:
        store = self._policy.store
        if store is None or uuid is None or uuid in self._sealed:
            return None
        return store.resume(uuid) if uuid in store else None

    def _streamed(self, ledger: Ledger) -> Ledger:
        return ledger if self._policy.store is None or ledger.sink is not None else self._policy.store.attach(ledger)
