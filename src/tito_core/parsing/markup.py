"""Markup in a completion: by control-token id where the vocabulary has one, by exact text where it has none."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class DecodedIds:
    """A completion as text in which every character knows its token.

    A token that is not whole UTF-8 by itself shares its characters with the tokens that complete it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> None:
        self.ids = list(ids)
        self._tokenizer = tokenizer
        pieces, self._starts = _pieces(tokenizer, self.ids)
        self.text = "".join(pieces)

    def char_of(self, token: int) -> int:
        """Give the first character of a token (or the end of the text, one past the last token)."""
        return self._starts[token] if token < len(self.ids) else len(self.text)

    def token_of(self, char: int) -> int:
        """Give the token that holds a character."""
        return bisect_right(self._starts, char) - 1

    def span_of(self, start: int, stop: int) -> tuple[int, int]:
        """Give the tokens (first, one past last) that hold characters `start` to `stop`."""
        return max(0, self.token_of(start)), max(bisect_left(self._starts, stop), self.token_of(start) + 1)


def _pieces(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> tuple[list[str], list[int]]:
    """Decode ids token by token, holding back bytes that are not yet whole UTF-8."""
    pieces: list[str] = []
    starts: list[int] = []
    at, held = 0, 0
    for position in range(1, len(ids) + 1):
        piece = str(tokenizer.decode(ids[held:position], skip_special_tokens=False))
        starts.append(at)
        # Four bytes make the longest UTF-8 character, so past four tokens the bytes are simply invalid.
        if piece.endswith("\ufffd") and position < len(ids) and position - held < 4:
            continue
        pieces.append(piece)
        at += len(piece)
        held = position
    return pieces, starts


class Tag:
    """A markup string such as `<tool_call>`: one control token in some vocabularies, plain text in others.

    Attributes:
        text: The markup.
        token: Its id when the vocabulary has it as one added token, else None.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text: str) -> None:
        self.text = text
        self.token = next((i for i, added in tokenizer.added_tokens_decoder.items() if added.content == text), None)

    def find(self, decoded: DecodedIds, start: int, stop: int | None = None) -> int | None:
        """Find the tag at or after character `start` and before `stop`; None when it is not there.

        With a control token, text that merely spells the tag does not count (law 9).
        """
        end = len(decoded.text) if stop is None else stop
        if self.token is None:
            found = decoded.text.find(self.text, start, end)
            return found if found >= 0 else None
        first = decoded.token_of(start) if start else 0
        for position in range(max(first, 0), len(decoded.ids)):
            if decoded.ids[position] == self.token and decoded.char_of(position) >= start:
                char = decoded.char_of(position)
                return char if char < end else None
        return None
