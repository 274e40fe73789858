"""Decode token ids to text, with the first character of each token."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer, decoders

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Decode = Callable[[Sequence[int]], tuple[str, list[int]]]
"""Returns the text of ids, including control tokens, and for each id the index of its first character.

A token that begins inside a character, or that has no text, has the index of the character that contains its end. Ids
that the tokenizer does not know have no text.
"""

REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER = 4
"""Maximum number of bytes, and so of tokens, of one character in UTF-8."""


def decoding(tokenizer: PreTrainedTokenizerBase) -> Decode:
    """Return the decoder for a tokenizer. It is stateless and can be shared."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if isinstance(backend, Tokenizer) and isinstance(backend.decoder, decoders.ByteLevel):
        return _ByteLevel(backend)
    return _Windowed(tokenizer)


class _ByteLevel:
    """Decodes byte-level vocabularies, in which a token has the same bytes everywhere."""

    def __init__(self, backend: Tokenizer) -> None:
        self._bytes = TokenBytes(backend)

    def begins(self, token: int) -> bool:
        """Return whether a token begins with a whole character, so that decoding can start at it."""
        piece = self._bytes[token]
        return bool(piece) and (piece[0] & 0xC0) != 0x80

    def __call__(self, ids: Sequence[int]) -> tuple[str, list[int]]:
        pieces = list(map(self._bytes.__getitem__, ids))
        joined = b"".join(pieces)
        try:
            text = joined.decode()
        except UnicodeDecodeError:
            return _replacing(pieces)
        starts = list(accumulate(map(len, pieces), initial=0))[:-1]
        return text, starts if text.isascii() else _characters(joined, starts)


class TokenBytes(dict[int, bytes]):
    """The bytes of each token id, looked up on first use."""

    def __init__(self, backend: Tokenizer) -> None:
        super().__init__()
        self._backend = backend

    def __missing__(self, token: int) -> bytes:
        try:
            text = self._backend.id_to_token(token)
        except OverflowError:
            return b""
        if text is None:
            return b""
        try:
            found = bytes([_BYTE_OF[character] for character in text])
        except KeyError:
            found = text.encode()  # as the decoder does: the text of such an added token is its own
        self[token] = found
        return found


def _byte_characters() -> dict[str, int]:
    """Return the byte of each character of a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_characters()


def _characters(joined: bytes, byte_starts: list[int]) -> list[int]:
    """Convert byte offsets in valid UTF-8 to the indices of the characters that contain them."""
    begins = (np.frombuffer(joined, np.uint8) & 0xC0) != 0x80
    upto = np.cumsum(np.append(begins, True)) - 1  # the character that each byte is part of, and one past the last
    characters: list[int] = upto[byte_starts].tolist()
    return characters


def _replacing(pieces: list[bytes]) -> tuple[str, list[int]]:
    """Decode bytes that are not valid UTF-8 as a whole; broken ones become U+FFFD."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts: list[str] = []
    starts: list[int] = []
    at = 0
    for piece in pieces:
        held = decoder.getstate()[0]
        text = decoder.decode(piece)
        broken = held.decode(errors="replace") if held and piece and _breaks(held, piece) else ""
        starts.append(at + len(broken))  # an encoded surrogate is held back and becomes several U+FFFD
        texts.append(text)
        at += len(text)
    return "".join(texts) + decoder.decode(b"", final=True), starts


def _breaks(held: bytes, piece: bytes) -> bool:
    """Return whether the next bytes leave an incomplete character incomplete."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(held + piece[:1])
    except UnicodeDecodeError:
        return True
    return False


class _Windowed:
    """Decodes other vocabularies: the text of a token is what it adds to the text of the tokens before it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._added = {index: token.content for index, token in tokenizer.added_tokens_decoder.items()}

    def __call__(self, ids: Sequence[int]) -> tuple[str, list[int]]:
        texts: list[str] = []
        starts: list[int] = []
        anchor, shown, at, before = 0, 0, 0, ""
        for stop in range(1, len(ids) + 1):
            starts.append(at)
            after = self._decode(ids[anchor:stop])
            if after.endswith(REPLACEMENT) and self._may_go_on(ids, shown, stop):
                continue
            texts.append(after[len(before) :])
            starts[-1] += max(
                0, texts[-1].find(self._added.get(ids[stop - 1], ""))
            )  # the decoder may add a blank before a tag
            at += len(texts[-1])
            anchor, shown, before = shown, stop, self._decode(ids[shown:stop])
        return "".join(texts), starts

    def _may_go_on(self, ids: Sequence[int], shown: int, stop: int) -> bool:
        return stop < len(ids) and stop - shown < _LONGEST_CHARACTER and ids[stop] not in self._added

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
