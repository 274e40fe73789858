"""The fewest tokens that a text can become, counted in milliseconds: what cannot fit is refused without encoding it.

A token of n symbols covers at most n symbols of a text, each of which it holds. So if every symbol of the text weighs
1/n, with n the length of the longest token that holds this symbol, then the symbols of one token weigh at most 1, and
the text has at least as many tokens as its symbols weigh. A symbol is a byte for byte-level tokenizers, else a
character.

This holds where nothing is dropped or merged before the tokens are cut. So there is no bound for tokenizers whose
normaliser, pre-tokenizer or added tokens may shrink a text, and symbols that may be unknown weigh nothing, because a
run of them may become one token or none.
"""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer
from tokenizers.models import BPE, Unigram

from tito_core.chat.encoder import without_half_pairs

_BLANK = "\u2581"
"""How SentencePiece's vocabularies write a space."""
_AT_ONCE = 1 << 20
"""Symbols that are weighed before other threads get their turn."""
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
"""Bytes that a byte-level vocabulary writes as the character of the same number; the others follow from U+0100 on."""
_SLACK = 1e-6
"""Share of a sum that rounding may add."""


@dataclass(frozen=True, slots=True, eq=False)
class LeastTokens:
    """The bound for one tokenizer. Build it with `LeastTokens.of`.

    Attributes:
        weights: Weight of each symbol, float64: 256 of them for bytes, else one a code point.
        composes: Whether the tokenizer normalises text by NFC, which may shrink what is not normalised yet.
    """

    weights: npt.NDArray[np.float64]
    composes: bool

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> LeastTokens | None:
        """Return the bound for a tokenizer, worked out once; None where none is known to hold."""
        if tokenizer not in _known:
            _known[tokenizer] = _bound(tokenizer)
        return _known[tokenizer]

    def of_text(self, text: str) -> int:
        """Return a number of tokens that no encoding of the text is below."""
        if not text.isascii():
            text = without_half_pairs(text)
            if self.composes and not unicodedata.is_normalized("NFC", text):
                return 0
        by_byte = len(self.weights) == len(_BYTES)
        total = 0.0
        for at in range(0, len(text), _AT_ONCE):
            part = text[at : at + _AT_ONCE]
            encoded = np.frombuffer(part.encode("utf-8" if by_byte else "utf-32-le"), np.uint8 if by_byte else "<u4")
            total += float(self.weights[encoded].sum())
        return int(total * (1 - _SLACK))


_known: WeakKeyDictionary[Tokenizer, LeastTokens | None] = WeakKeyDictionary()


def _bound(tokenizer: Tokenizer) -> LeastTokens | None:
    normalizers = _steps(tokenizer.normalizer, "normalizers")
    pre_tokenizers = _steps(tokenizer.pre_tokenizer, "pretokenizers")
    added = tokenizer.get_added_tokens_decoder().values()
    by_byte = any(step["type"] == "ByteLevel" for step in pre_tokenizers)
    renames_spaces = any(step["type"] in ("Replace", "Metaspace") for step in (*normalizers, *pre_tokenizers))
    if (
        not all(map(_keeps_text, normalizers))
        or not all(map(_keeps_all, pre_tokenizers))
        or not _is_known(tokenizer.model)
        or (by_byte and renames_spaces)
        or any(token.lstrip or token.rstrip for token in added)  # which swallow any number of blanks
    ):
        return None
    pieces = tokenizer.get_vocab(with_added_tokens=False).keys()
    spelled = [token.content for token in added]
    known = frozenset(piece for piece in pieces if len(piece) == 1).difference(spelled)  # a control token is renamed
    if by_byte:
        longest = _longest([*pieces, *("".join(_BYTES[byte] for byte in text.encode()) for text in spelled)])
        weights = np.array([1 / longest[symbol] if symbol in known else 0.0 for symbol in _BYTES])
    else:
        unknown = 0.0
        if isinstance(tokenizer.model, BPE) and tokenizer.model.byte_fallback and pieces >= _ALL_BYTES:
            unknown = 1 / max(map(len, (*pieces, *spelled)))  # it becomes its bytes, each at least a token
        space = _BLANK if renames_spaces else " "
        weights = _of_characters(_longest([*pieces, *spelled]), known, unknown, space)
    return LeastTokens(weights, any(step["type"] == "NFC" for step in normalizers))


def _steps(component: Any, several: str) -> list[Mapping[str, Any]]:
    """Return the steps of a normaliser or pre-tokenizer, as its definition lists them."""
    if component is None:
        return []
    step: Mapping[str, Any] = json.loads(component.__getstate__())
    return list(_flat(step, several))


def _flat(step: Mapping[str, Any], several: str) -> Iterable[Mapping[str, Any]]:
    if step["type"] != "Sequence":
        yield step
    for inner in step.get(several, ()):
        yield from _flat(inner, several)


def _keeps_text(normalizer: Mapping[str, Any]) -> bool:
    """Return whether a normaliser never shrinks text that is in NFC, and writes nothing but spaces anew."""
    match normalizer:
        case {"type": "NFC" | "Prepend"}:
            return True
        case {"type": "Replace", "pattern": {"String": " "}, "content": str(content)}:
            return content == _BLANK
    return False


def _keeps_all(pre_tokenizer: Mapping[str, Any]) -> bool:
    """Return whether a pre-tokenizer drops no character, and writes nothing but bytes and spaces anew."""
    match pre_tokenizer:
        case {"type": "ByteLevel" | "Digits"}:
            return True
        case {"type": "Split", "behavior": str(behavior)}:
            return behavior != "Removed"
        case {"type": "Metaspace", "replacement": str(replacement)}:
            return replacement == _BLANK
    return False


def _is_known(model: Any) -> bool:
    """Return whether a model's tokens are the pieces of text that their names say."""
    if isinstance(model, BPE):
        return not (model.continuing_subword_prefix or model.end_of_word_suffix)
    return isinstance(model, Unigram)


def _longest(pieces: Iterable[str]) -> dict[str, int]:
    """Return the length of the longest piece that holds each symbol."""
    longest: dict[str, int] = {}
    for piece in sorted(pieces, key=len, reverse=True):
        for symbol in piece.replace(" ", _BLANK):
            longest.setdefault(symbol, len(piece))
    return longest


def _of_characters(
    longest: Mapping[str, int], known: Collection[str], unknown: float, space: str
) -> npt.NDArray[np.float64]:
    weights = np.full(sys.maxunicode + 1, unknown)
    for symbol, length in longest.items():
        if symbol in known:
            weights[ord(symbol)] = 1 / length
    weights[ord(" ")] = 1 / longest[_BLANK] if space in known else unknown
    return weights


_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTES = [chr(byte if byte in _PRINTABLE else 0x100 + _OTHERS.index(byte)) for byte in range(256)]
"""Each byte as a byte-level vocabulary writes it (OpenAI's GPT-2 encoder)."""
_ALL_BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))
"""The pieces that an unknown character falls back to, in SentencePiece's vocabularies."""
