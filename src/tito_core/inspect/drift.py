"""What re-tokenizing text would have changed: the reason for token-in, token-out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tito_core.ledger.ledger import Ledger

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def drifted_turns(ledger: Ledger, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """List the turns whose sampled ids do not survive decoding and encoding."""
    return [
        turn.index
        for turn in ledger
        if _round_trip(tokenizer, turn.draft.output_ids.tolist()) != turn.draft.output_ids.tolist()
    ]


def _round_trip(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    text = str(tokenizer.decode(ids, skip_special_tokens=False))
    return list(tokenizer.encode(text, add_special_tokens=False))
