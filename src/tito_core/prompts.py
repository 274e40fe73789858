"""The prompts of live ledgers as text, so that a turn writes only its own ids (law 14)."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from tito_core.backend.id_text import IdText
from tito_core.ledger.columns import TokenIds
from tito_core.ledger.errors import LawViolationError
from tito_core.ledger.ledger import Ledger

KEPT = 64
"""Paths of one ledger whose text is kept, those of the latest turns; another one's is written anew."""


class Prompts:
    """Texts of paths, by ledger and last turn. Ledgers are referred to weakly; threads may share it.

    A text takes up to seven bytes a token, as long as its ledger is live and no later turn takes it over.
    """

    def __init__(self) -> None:
        self._kept: WeakKeyDictionary[Ledger, dict[int, IdText]] = WeakKeyDictionary()

    def text(self, ledger: Ledger, parent: int | None, delta: TokenIds) -> IdText:
        """Give the text of a path and the delta after it."""
        kept = None if parent is None else self._kept.get(ledger, {}).get(parent)
        return (IdText.of(ledger.path_ids(parent)) if kept is None else kept).then(delta)

    def keep(self, ledger: Ledger, turn: int, prompt: IdText, output: TokenIds) -> None:
        """Keep the text of a committed turn's path: that of its prompt, and its output.

        Raises:
            LawViolationError: The ledger holds other tokens than were sent and came back (law 4).
        """
        kept = self._kept.setdefault(ledger, {})
        made, text = ledger[turn], prompt.then(output)
        before = None if made.parent is None else kept.pop(made.parent, None)
        same = text.is_of(ledger.path_ids(turn)) if before is None else text.goes_on(before, made.draft.columns.ids)
        if not same:
            raise LawViolationError(
                4, f"turn {turn} does not hold the tokens that were sent and came back; nothing of it can be trusted."
            )
        kept[turn] = text
        if len(kept) > KEPT:
            kept.pop(list(kept)[0], None)  # noqa: RUF015  # at once: other threads change it under an iterator
