"""Markup in a completion: by control-token id where the vocabulary has one, by exact text where it has none."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tito_core.parsing.decoding import Decode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class DecodedIds:
    """A completion as text in which every character knows its token.

    A token that is not whole UTF-8 by itself shares its character with the tokens that complete it.
    """

    def __init__(self, decode: Decode, ids: Sequence[int]) -> None:
        self.ids = list(ids)
        self.text, self.starts = decode(self.ids)

    def token_of(self, char: int) -> int:
        """Give the token that holds a character."""
        return bisect_right(self.starts, char) - 1

    def span_of(self, start: int, stop: int) -> tuple[int, int]:
        """Give the tokens (first, one past last) that hold characters `start` to `stop`."""
        first = max(0, self.token_of(start))
        return first, max(bisect_left(self.starts, stop), first + 1)


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
        """Find the tag that begins at or after character `start` and before `stop`; None when there is none.

        With a control token, text that merely spells the tag does not count (law 9).
        """
        end = len(decoded.text) if stop is None else stop
        if self.token is None:
            found = decoded.text.find(self.text, start, end + len(self.text) - 1)
            return found if found >= 0 else None
        first, last = bisect_left(decoded.starts, start), bisect_left(decoded.starts, end)
        try:
            return decoded.starts[decoded.ids.index(self.token, first, last)]
        except ValueError:
            return None
