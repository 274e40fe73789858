"""Law 15: the client's tokenizer must be the server's."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from tito_core.ledger.errors import LawViolationError

SHOWN_IDS = 8
"""Number of ids of each side that an error shows, from the first difference on."""
SHOWN_TEXT = 60
"""Number of characters of a text that an error shows."""


class VocabularyCheck(StrEnum):
    """How a tokenizer was compared with the server's."""

    TOKENIZE = "tokenize"
    """The server encoded the same texts to the same ids."""
    VOCAB_SIZE = "vocab size"
    """The server does not encode texts, but its model's vocabulary covers every id of the tokenizer."""
    NOT_CHECKED = "not checked"
    """The server does not encode texts and does not report its vocabulary size."""


def check_same_ids(text: str, ids: Sequence[int], server_ids: Sequence[int], *, tokenizer: str, server: str) -> None:
    """Check law 15 on one text: both tokenizers encode it to the same ids.

    Args:
        text: The text.
        ids: The ids that the client's tokenizer gives.
        server_ids: The ids that the server's tokenizer gives.
        tokenizer: Name of the client's tokenizer, for the error.
        server: Name of the server and its model, for the error.

    Raises:
        LawViolationError: The ids differ.
    """
    ours, theirs = list(ids), list(server_ids)
    if ours == theirs:
        return
    pairs = zip(ours, theirs, strict=False)
    first = next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(ours), len(theirs)))
    shown = repr(text if len(text) <= SHOWN_TEXT else f"{text[:SHOWN_TEXT]}...")
    raise LawViolationError(
        15,
        f"the tokenizer {tokenizer!r} is not the one that {server} uses: they encode {shown} differently. From token "
        f"{first} on, the tokenizer gives {_shown(ours[first:])} and the server {_shown(theirs[first:])}. "
        f"Use the tokenizer of the served model.",
    )


def check_vocab_size(largest_id: int, vocab_size: int, *, tokenizer: str, server: str) -> None:
    """Check law 15 on vocabulary sizes alone. A model may have more rows than its tokenizer has ids: they are padded.

    Args:
        largest_id: The largest id of the client's tokenizer.
        vocab_size: Number of embedding rows of the server's model.
        tokenizer: Name of the client's tokenizer, for the error.
        server: Name of the server and its model, for the error.

    Raises:
        LawViolationError: The model has no row for that id.
    """
    if largest_id >= vocab_size:
        raise LawViolationError(
            15,
            f"the tokenizer {tokenizer!r} is not the one that {server} uses: its ids go up to {largest_id}, but the "
            f"server's model has {vocab_size} rows, for ids up to {vocab_size - 1}. "
            "Use the tokenizer of the served model.",
        )


def _shown(ids: Sequence[int]) -> str:
    return f"[{', '.join(map(str, ids[:SHOWN_IDS]))}{', ...' if len(ids) > SHOWN_IDS else ''}]"
