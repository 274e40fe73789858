"""A lower bound on a text's token count in milliseconds, so that oversized text is refused without encoding it.

Give each symbol the weight 1/n, where n is the length of the longest token that contains it. The symbols of one token
then weigh at most 1 together, so a text has at least as many tokens as its symbols weigh. A symbol is a byte for
byte-level tokenizers, else a character.

The bound needs a tokenizer that drops and merges nothing before it splits text into tokens. There is none for
tokenizers whose normaliser, pre-tokenizer or added tokens may shrink a text. Symbols that may be unknown weigh 0,
because a run of them may become one token or none.
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

from tito_core.chat.encoder import ContentSafeEncoder, replace_surrogates

_BLANK = "\u2581"
"""A space in SentencePiece vocabularies."""
_BATCH = 1 << 20
"""Symbols weighed per batch, so that other threads can run in between."""
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
"""Bytes that a byte-level vocabulary maps to the same code point; the others map to U+0100 and up."""
_SLACK = 1e-6
"""Relative rounding error allowed in a sum."""


@dataclass(frozen=True, slots=True, eq=False)
class LeastTokens:
    """The bound for one tokenizer. Build it with `LeastTokens.of`, or `LeastTokens.for_encoder`, which caches it.

    Attributes:
        weights: Weight of each symbol, float64, shape (256,) for bytes, else one per code point.
        composes: Whether the tokenizer applies NFC, which may shrink text that is not in NFC.
    """

    weights: npt.NDArray[np.float64]
    composes: bool

    @classmethod
    def for_encoder(cls, encoder: ContentSafeEncoder) -> LeastTokens | None:
        """Return the bound for an encoder's tokenizer, cached; None if no bound is known."""
        if encoder not in _known:
            _known[encoder] = _bound(encoder.tokenizer)
        return _known[encoder]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> LeastTokens | None:
        """Return the bound for a tokenizer; None if no bound is known."""
        return _bound(tokenizer)

    def of_text(self, text: str) -> int:
        """Return a lower bound on the number of tokens of a text."""
        if not text.isascii():
            text = replace_surrogates(text)
            if self.composes and not unicodedata.is_normalized("NFC", text):
                return 0
        by_byte = len(self.weights) == len(_BYTES)
        total = 0.0
        for at in range(0, len(text), _BATCH):
            part = text[at : at + _BATCH]
            encoded = np.frombuffer(part.encode("utf-8" if by_byte else "utf-32-le"), np.uint8 if by_byte else "<u4")
            total += float(self.weights[encoded].sum())
        return int(total * (1 - _SLACK))


_known: WeakKeyDictionary[ContentSafeEncoder, LeastTokens | None] = WeakKeyDictionary()


def _bound(tokenizer: Tokenizer) -> LeastTokens | None:
    normalizers = _steps(tokenizer.normalizer, "normalizers")
    pre_tokenizers = _steps(tokenizer.pre_tokenizer, "pretokenizers")
    added = tokenizer.get_added_tokens_decoder().values()
    by_byte = any(step["type"] == "ByteLevel" for step in pre_tokenizers)
    renames_spaces = any(step["type"] in ("Replace", "Metaspace") for step in (*normalizers, *pre_tokenizers))
    if (
        not all(map(_keeps_text, normalizers))
        or not all(map(_keeps_characters, pre_tokenizers))
        or not _tokens_are_text(tokenizer.model)
        or (by_byte and renames_spaces)
        or any(token.lstrip or token.rstrip for token in added)  # these strip any number of blanks
    ):
        return None
    pieces = tokenizer.get_vocab(with_added_tokens=False).keys()
    added_texts = [token.content for token in added]
    known = frozenset(piece for piece in pieces if len(piece) == 1).difference(
        added_texts
    )  # control tokens are renamed
    if by_byte:
        longest = _longest([*pieces, *("".join(_BYTES[byte] for byte in text.encode()) for text in added_texts)])
        weights = np.array([1 / longest[symbol] if symbol in known else 0.0 for symbol in _BYTES])
    else:
        unknown = 0.0
        if isinstance(tokenizer.model, BPE) and tokenizer.model.byte_fallback and pieces >= _ALL_BYTES:
            unknown = 1 / max(map(len, (*pieces, *added_texts)))  # encoded as its bytes, each at least one token
        space = _BLANK if renames_spaces else " "
        weights = _of_characters(_longest([*pieces, *added_texts]), known, unknown, space)
    return LeastTokens(weights, any(step["type"] == "NFC" for step in normalizers))


def _steps(component: Any, several: str) -> list[Mapping[str, Any]]:
    """Return the steps of a normaliser or pre-tokenizer in order."""
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
    """Return whether a normaliser never shrinks NFC text and replaces only spaces."""
    match normalizer:
        case {"type": "NFC" | "Prepend"}:
            return True
        case {"type": "Replace", "pattern": {"String": " "}, "content": str(content)}:
            return content == _BLANK
    return False


def _keeps_characters(pre_tokenizer: Mapping[str, Any]) -> bool:
    """Return whether a pre-tokenizer drops no character and replaces only bytes and spaces."""
    match pre_tokenizer:
        case {"type": "ByteLevel" | "Digits"}:
            return True
        case {"type": "Split", "behavior": str(behavior)}:
            return behavior != "Removed"
        case {"type": "Metaspace", "replacement": str(replacement)}:
            return replacement == _BLANK
    return False


def _tokens_are_text(model: Any) -> bool:
    """Return whether the tokens of a model equal the text that they encode."""
    if isinstance(model, BPE):
        return not (model.continuing_subword_prefix or model.end_of_word_suffix)
    return isinstance(model, Unigram)


def _longest(pieces: Iterable[str]) -> dict[str, int]:
    """Return the length of the longest piece that contains each symbol."""
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
"""The character of each byte in byte-level vocabularies (OpenAI's GPT-2 encoder)."""
_ALL_BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))
"""The byte-fallback pieces of SentencePiece vocabularies."""
