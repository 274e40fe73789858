"""A cache of the token ids of ASCII words.

Most byte-level tokenizers split text into words by one regular expression and encode each word alone, so a word's ids
can be cached. The `tokenizers` library spends most of its time on the split; for ASCII text, Python's `re` does it in a
tenth of the time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

CACHE_SIZE = 1 << 16
"""Capacity of the caches of words and of short texts."""
MAX_CACHED_CHARS = 32
"""Longest cached word or text, in characters."""
SMALL_BYTES = 1 << 10
"""Largest packed result that plain Python unpacks faster than NumPy."""
LONG_TEXT = 1 << 15
"""Characters from which encoding takes milliseconds, so other threads must be able to run meanwhile."""
_BATCH = 1 << 14
"""Words per batch of a long text, so that other threads can run in between."""
_CLASSES = {"L": "A-Za-z", "N": "0-9", "Lu": "A-Z", "Ll": "a-z", "Lt": "", "Lm": "", "Lo": "", "M": ""}
"""The ASCII members of Unicode classes."""
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
_GPT2 = {**_BYTE_LEVEL, "use_regex": True}


class Encoded(NamedTuple):
    """The tokens of a text: packed int32 ids in native byte order, and the end of each in characters, shape (n,)."""

    ids: bytes
    stops: Sequence[int] | npt.NDArray[np.int64]


class _Cache(dict[str, bytes]):
    """Caches a function's results for short texts; a `dict`, so that hits run in C."""

    def __init__(self, function: Callable[[str], bytes]) -> None:
        self._function = function

    def __missing__(self, text: str) -> bytes:
        found = self._function(text)
        if len(text) <= MAX_CACHED_CHARS:
            if len(self) >= CACHE_SIZE:
                self.clear()
            self[text] = found
        return found


class WordCache:
    """Encodes ASCII text word by word. Thread-safe. Build it with `WordCache.of`."""

    def __init__(self, tokenizer: Tokenizer, pattern: re.Pattern[str]) -> None:
        self._model = tokenizer.model
        self._pattern = pattern
        self._words = _Cache(self._look_up)
        self._texts: dict[str, Encoded] = {}  # short texts, such as scaffold between control tokens

    @classmethod
    def of(cls, tokenizer: Tokenizer, definition: dict[str, Any] | None = None) -> WordCache | None:
        """Return the cache of a tokenizer, or None if it is not known to encode word by word.

        Args:
            tokenizer: The tokenizer.
            definition: Its definition without the model, if known; serialising it takes half a second.
        """
        if definition is None:
            text = tokenizer.to_str()
            definition = json.loads(text[: text.index('"model":{')] + '"model":null}')
        pattern = _pattern(definition)
        return None if pattern is None else cls(tokenizer, pattern)

    def encode(self, text: str) -> Encoded | None:
        """Return the tokens of a text; None if it is not ASCII or the words do not cover it."""
        if not text.isascii():
            return None
        short = self._texts.get(text)
        if short is not None:
            return short
        words = [self._pattern.findall(text)] if len(text) < LONG_TEXT else self._batches(text)
        packed = b"".join([b"".join(map(self._words.__getitem__, batch)) for batch in words])
        found = _unpack_small(packed) if len(packed) <= SMALL_BYTES else _unpack_large(packed)
        if len(found.stops) == 0 or found.stops[-1] != len(text):
            return None
        if len(text) <= MAX_CACHED_CHARS:
            if len(self._texts) >= CACHE_SIZE:
                self._texts.clear()
            self._texts[text] = found
        return found

    def _batches(self, text: str) -> Iterator[list[str]]:
        """Yield the words of a text in batches; `findall` would hold the GIL until its end."""
        found = map(re.Match.group, self._pattern.finditer(text))
        while batch := list(islice(found, _BATCH)):
            yield batch

    def _look_up(self, word: str) -> bytes:
        """Return each token of a word as its id and its length in characters, int32."""
        ((mapped, _),) = _BYTES.pre_tokenize_str(word)
        tokens = self._model.tokenize(mapped)
        return np.array([(token.id, len(token.value)) for token in tokens], np.int32).tobytes()


def _unpack_small(packed: bytes) -> Encoded:
    """Unpack pairs of id and length, and sum the lengths."""
    numbers = memoryview(packed).cast("i")
    return Encoded(numbers[::2].tobytes(), list(accumulate(numbers[1::2])))


def _unpack_large(packed: bytes) -> Encoded:
    """Do the same with NumPy, which is faster for large results."""
    tokens = np.frombuffer(packed, np.int32).reshape(-1, 2)
    return Encoded(tokens[:, 0].tobytes(), tokens[:, 1].cumsum(dtype=np.int64))


_BYTES = ByteLevel(add_prefix_space=False, use_regex=False)


def _pattern(definition: dict[str, Any]) -> re.Pattern[str] | None:
    """Return the expression by which a tokenizer splits ASCII text into words, or None if there is no single one."""
    normalizer = definition["normalizer"] or {"type": "NFC"}
    if definition["added_tokens"] or normalizer not in ({"type": "NFC"}, {"type": "Sequence", "normalizers": []}):
        return None
    expression = _expression(definition["pre_tokenizer"] or {})
    translated = None if expression is None else _ascii(expression)
    return None if translated is None else re.compile(translated, re.ASCII)


def _expression(pre_tokenizer: dict[str, Any]) -> str | None:
    """Return the Oniguruma expression whose matches are the words, or None for other pre-tokenizers."""
    match pre_tokenizer.get("pretokenizers", [pre_tokenizer]):
        case [{"type": "Split", "behavior": "Isolated", "invert": False, "pattern": {"Regex": str(expression)}}, last]:
            return expression if last.items() >= _BYTE_LEVEL.items() else None
        case [last] if last.items() >= _GPT2.items():
            return _gpt2(r" ?\p{N}+")
        case [{"type": "Digits", "individual_digits": bool(alone)}, last] if last.items() >= _GPT2.items():
            # Digits are split off first, so they take no blank, and blanks before them end a text.
            return _gpt2(r"\p{N}" if alone else r"\p{N}+", r"[^\s\p{N}]")
    return None


def _gpt2(numbers: str, after_blanks: str = r"\S") -> str:
    """Return the expression of `ByteLevel`, GPT-2's (tokenizers, `byte_level.rs`)."""
    return rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+|{numbers}| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!{after_blanks})|\s+"


def _ascii(expression: str) -> str | None:
    """Convert an Oniguruma expression to Python's `re` for ASCII text; None if the two may differ."""
    pieces: list[str] = []
    inside = False
    for part in re.findall(r"\\p\{\w+\}|\\.|\[|\]|[^\\\[\]]+", expression, re.DOTALL):
        if part in "[]":
            inside = part == "["
        if part.startswith("\\p"):
            if (letters := _CLASSES.get(part[3:-1])) is None:
                return None
            pieces.append(letters if inside else f"[{letters}]" if letters else r"(?!)")
        else:
            pieces.append(part)
    rewritten = "".join(pieces)
    # Capturing groups change what findall returns, and `re` reads an empty class differently.
    if "[]" in rewritten or "[^]" in rewritten or re.search(r"(?<!\\)\((?!\?)", rewritten):
        return None
    return rewritten
