"""The prompts of live ledgers as text, so that a turn writes only its own ids (law 14)."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from tito_core.backend.id_text import IdText
from tito_core.ledger.columns import TokenIds
from tito_core.ledger.errors import LawViolationError
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.turn import Draft

KEPT = 64
"""Paths of one ledger whose text is kept, those of the latest turns; another one's is written anew."""


class PromptCache:
    """Texts of paths, by ledger and last turn. Ledgers are referred to weakly; threads may share it.

    A text takes up to seven bytes a token, as long as its ledger is live and no later turn takes it over.
    """

    def __init__(self) -> None:
        self._kept: WeakKeyDictionary[Ledger, dict[int, IdText]] = WeakKeyDictionary()

    def text(self, ledger: Ledger, parent: int | None, delta: TokenIds) -> IdText:
        """Return the text of a path and the delta after it."""
        kept = self._of(ledger, parent)
        return (IdText.of(ledger.path_ids(parent)) if kept is None else kept).then(delta)

    def answered(self, ledger: Ledger, draft: Draft, prompt: IdText, output: TokenIds) -> IdText:
        """Return the text of a draft's path, its prompt's and its output's, before it is committed.

        Raises:
            LawViolationError: The draft holds other tokens than were sent and came back (law 4).
        """
        text, before = prompt.then(output), self._of(ledger, draft.parent)
        ids = draft.columns.ids
        same = text.is_of(ledger.path_ids(draft.parent, ids)) if before is None else text.goes_on(before, ids)
        if not same:
            raise LawViolationError(
                4,
                f"the answer to turn {len(ledger)} does not hold the tokens that were sent and came back, so the turn "
                "was not committed. Report the template or backend that changed them.",
            )
        return text

    def keep(self, ledger: Ledger, turn: int, parent: int | None, text: IdText) -> None:
        """Keep the text of a committed turn's path, in place of its parent's. Raise nothing: the turn is there."""
        kept = self._kept.setdefault(ledger, {})
        if parent is not None:
            kept.pop(parent, None)
        kept[turn] = text
        if len(kept) > KEPT:
            kept.pop(list(kept)[0], None)  # noqa: RUF015  # at once: other threads change it under an iterator

    def _of(self, ledger: Ledger, turn: int | None) -> IdText | None:
        return None if turn is None else self._kept.get(ledger, {}).get(turn)
