"""The text of token ids: the bytes of each, and the runs that re-tokenizing would change."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

from tokenizers import Tokenizer, decoders

from tito_core.chat.tokenizer import TokenizerError, load_tokenizer
from tito_core.parsing.decoding import TokenBytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE = re.compile("<0x([0-9A-F]{2})>")
_METASPACE = "▁"


class Drift(NamedTuple):
    """A run of tokens that re-tokenizing their text would change.

    Attributes:
        start: First token, as an offset in the compared ids.
        stop: One past the last token.
        ids: The ids that re-tokenizing returns instead.
    """

    start: int
    stop: int
    ids: list[int]


class TokenText:
    """The text of a tokenizer's tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._pieces: dict[int, bytes] = {}
        self._piece: Callable[[int], bytes] = self._plain_piece
        if isinstance(backend, Tokenizer) and isinstance(backend.decoder, decoders.ByteLevel):
            self._piece = TokenBytes(backend).__getitem__

    def piece(self, token: int) -> bytes:
        """Return the bytes of a token; empty if the tokenizer does not know the id."""
        return self._piece(token)

    def drift(self, ids: Sequence[int]) -> list[Drift]:
        """Return the runs of `ids` that change when they are decoded and encoded again."""
        text = str(self._tokenizer.decode(ids, skip_special_tokens=False))
        again = list(self._tokenizer.encode(text, add_special_tokens=False))
        return [] if again == list(ids) else self._differing(list(ids), again)

    def _differing(self, ids: list[int], again: list[int]) -> list[Drift]:
        """Compare the runs between the byte offsets where both sequences have a token border."""
        ours, theirs = self._edges(ids), self._edges(again)
        edges = sorted({*ours} & {*theirs}) if ours[-1] == theirs[-1] else [0]
        bounds = [(bisect_left(ours, edge), bisect_left(theirs, edge)) for edge in edges[:-1]]
        bounds.append((len(ids), len(again)))
        runs = [(0, 0), *bounds] if bounds[0] != (0, 0) else bounds
        found: list[Drift] = []
        for (start, first), (stop, last) in pairwise(runs):
            if ids[start:stop] != again[first:last]:
                found.append(Drift(start, stop, again[first:last]))
        return found

    def _edges(self, ids: list[int]) -> list[int]:
        return list(accumulate((len(self.piece(token)) for token in ids), initial=0))

    def _plain_piece(self, token: int) -> bytes:
        """Return the bytes that a token's name spells, in a vocabulary that is not byte-level."""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._bytes_of_name(token)
        return piece

    def _bytes_of_name(self, token: int) -> bytes:
        added = self._tokenizer.added_tokens_decoder.get(token)
        if added is not None:
            return str(added.content).encode()
        try:
            name = self._tokenizer.convert_ids_to_tokens(token)
        except (IndexError, OverflowError):
            return b""
        if not isinstance(name, str):
            return b""
        byte = _BYTE.fullmatch(name)
        return bytes([int(byte[1], 16)]) if byte else name.replace(_METASPACE, " ").encode()


class TokenTexts:
    """The tokenizers of rollouts, each loaded once.

    The name in a file is not trusted, so it is looked up in local folders and the model hub's cache only. The tokenizer
    that the user gives may be downloaded.

    Args:
        tokenizer: The user's tokenizer for all rollouts; empty to use the one named in each rollout.

    Raises:
        TokenizerError: The user's tokenizer cannot be loaded.
    """

    def __init__(self, tokenizer: str = "") -> None:
        self._override = TokenText(load_tokenizer(tokenizer)) if tokenizer else None
        self._loaded: dict[str, TokenText | None] = {}

    def of(self, name: str | None) -> TokenText | None:
        """Return the tokenizer of the given name as `TokenText`; None if it is not on this machine."""
        if self._override is not None or not name:
            return self._override
        if name not in self._loaded:
            try:
                self._loaded[name] = TokenText(load_tokenizer(name, local_files_only=True))
            except TokenizerError:
                self._loaded[name] = None
        return self._loaded[name]
