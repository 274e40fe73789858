"""The prompts of live ledgers as text, so that a turn writes only its own ids (law 14)."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from tito_core.backend.id_text import IdText
from tito_core.ledger.columns import TokenIds
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
        if parent is None:
            return IdText.of(delta)
        kept = self._kept.get(ledger, {}).get(parent)
        return (IdText.of(ledger.path_ids(parent)) if kept is None else kept).then(delta)

    def keep(self, ledger: Ledger, turn: int, prompt: IdText, output: TokenIds) -> None:
        """Keep the text of a committed turn's path: that of its prompt, and its output."""
        kept = self._kept.setdefault(ledger, {})
        kept[turn] = prompt.then(output)
        parent = ledger[turn].parent
        if parent is not None:
            kept.pop(parent, None)
        if len(kept) > KEPT:
            kept.pop(next(iter(kept)), None)
