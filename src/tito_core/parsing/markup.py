"""Decode a completion's token ids, and find the tags in it.

A tag is found by its token id if the vocabulary has it as a token, else by its exact text. Decoding tells the first
character of each token, so that text and tokens lead to one another.
"""

from __future__ import annotations

import codecs
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, compress
from typing import TYPE_CHECKING, NamedTuple

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


class Mark(NamedTuple):
    """One tag in a completion, from character `start` to before `stop`."""

    start: int
    stop: int
    tag: str


class Markup:
    """The tags of a format, such as `<tool_call>`, in one vocabulary.

    Attributes:
        tokens: The tags that are one added token, by id. Text that spells one is text (law 9).
        texts: The text of every tag and special token.
        anchors: Ids of the anchors that are tokens; see `__init__`.
        spelled: The tags that are not a token, longest first.
        special: Ids of the tokenizer's special tokens that are not tags, such as stop tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tags: Iterable[str], anchors: Iterable[str] = ()) -> None:
        """Look the tags up.

        Args:
            tokenizer: A tag that is one of its added tokens is matched by id.
            tags: All tags of the format.
            anchors: Control tokens that are part of tags, such as DeepSeek's `｜DSML｜`. If an anchor is a token, a tag
                whose anchor is spelled with other tokens is text.
        """
        self.decode = decoding(tokenizer)
        added = {token.content: index for index, token in tokenizer.added_tokens_decoder.items()}
        known = dict.fromkeys(tags)
        self.texts = (*known, *(token.content for token in tokenizer.added_tokens_decoder.values() if token.special))
        self.tokens = {added[tag]: tag for tag in known if tag in added}
        self._ids = {tag: index for index, tag in self.tokens.items()}
        self.spelled = sorted((tag for tag in known if tag not in added), key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, self.spelled))) if self.spelled else None
        self.anchors = {anchor: added[anchor] for anchor in anchors if anchor in added}
        self._lone = bool(self.tokens.keys() & self.anchors.values())
        flagged = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.special = frozenset(flagged.union(tokenizer.all_special_ids) - set(self.tokens))

    @property
    def controls(self) -> frozenset[int]:
        """Ids that no content may contain: tags, anchors and special tokens."""
        return self.special.union(self.tokens, self.anchors.values())

    @property
    def strings(self) -> frozenset[str]:
        """Texts of the tags and anchors that are tokens of the vocabulary."""
        return frozenset(self.tokens.values()).union(self.anchors)

    def token_of(self, tag: str) -> int | None:
        """Return the id of a tag, or None if it is not a token."""
        return self._ids.get(tag)

    def certain(self, tag: str) -> bool:
        """Return whether a tag is a token or contains one, so that text cannot spell it."""
        return tag in self._ids or any(anchor in tag for anchor in self.anchors)

    def marks(self, decoded: DecodedIds) -> list[Mark]:
        """Return all tags in a completion, in order."""
        tokens, starts, ids = self.tokens, decoded.starts, decoded.ids
        # compress and map run in C, much faster than a loop, since few ids are tags.
        tags = compress(enumerate(ids), map(tokens.__contains__, ids)) if tokens else ()
        found = [Mark(starts[i], starts[i] + len(tokens[token]), tokens[token]) for i, token in tags]
        if self._spelled is not None:
            spelled = self._spelled.finditer(decoded.text)
            marks = [Mark(m.start(), m.end(), m.group()) for m in spelled if self._anchored(decoded, m)]
            found = [*(self._alone(found, marks) if self._lone else found), *marks]
            found.sort()
        return found

    def _alone(self, tokens: list[Mark], tags: list[Mark]) -> list[Mark]:
        """Drop the marks of anchors inside a longer tag, in a format where an anchor alone is a tag too."""
        held = {tag.start + tag.tag.find(anchor) for tag in tags for anchor in self.anchors if anchor in tag.tag}
        return [token for token in tokens if token.start not in held]

    def _anchored(self, decoded: DecodedIds, match: re.Match[str]) -> bool:
        for anchor, token in self.anchors.items():
            at = match.group().find(anchor)
            if at < 0:
                continue
            holds = decoded.token_of(match.start() + at)
            if decoded.ids[holds] != token or decoded.starts[holds] != match.start() + at:
                return False
        return True


class DecodedIds:
    """A completion's ids and text, with the token of each character.

    A token that is not whole UTF-8 by itself shares its character with the tokens that complete it.
    """

    def __init__(self, decode: Decode, ids: Sequence[int]) -> None:
        self.ids = list(ids)
        self.text, self.starts = decode(self.ids)

    def token_of(self, char: int) -> int:
        """Return the index of the token that contains a character."""
        return bisect_right(self.starts, char) - 1

    def span_of(self, start: int, stop: int) -> tuple[int, int]:
        """Return the token offsets (first, one past last) that contain characters `start` to `stop`."""
        first = max(0, self.token_of(start))
        return first, max(bisect_left(self.starts, stop), first + 1)


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
