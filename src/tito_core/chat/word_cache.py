"""Words of ASCII text and their ids, remembered.

Most byte-level tokenizers cut text into words by one regular expression and encode each word by itself, so that a
word's ids can be looked up. The `tokenizers` library spends most of its time on the cutting; for ASCII text Python's
`re` does the same in a tenth of it.
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

REMEMBERED = 1 << 16
"""Words that are remembered at once."""
LONGEST = 32
"""Characters of the longest word that is remembered."""
FEW_BYTES = 1 << 10
"""Up to so many, numbers are read in less time than NumPy takes to begin."""
LONG_TEXT = 1 << 15
"""Characters from which on a text takes milliseconds to encode, so that other threads get their turn in between."""
_AT_ONCE = 1 << 14
"""Words of a long text that are looked up before others get their turn."""
_CLASSES = {"L": "A-Za-z", "N": "0-9", "Lu": "A-Z", "Ll": "a-z", "Lt": "", "Lm": "", "Lo": "", "M": ""}
"""What of a Unicode class is ASCII."""
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
_GPT2 = {**_BYTE_LEVEL, "use_regex": True}


class Encoded(NamedTuple):
    """A text's tokens: their ids, int32 in the machine's byte order, and the character after each, (n,)."""

    ids: bytes
    stops: Sequence[int] | npt.NDArray[np.int64]


class _Memo(dict[str, bytes]):
    """Remembers what a function gives for short texts, which makes looking them up a matter of C."""

    def __init__(self, function: Callable[[str], bytes]) -> None:
        self._function = function

    def __missing__(self, text: str) -> bytes:
        found = self._function(text)
        if len(text) <= LONGEST:
            if len(self) >= REMEMBERED:
                self.clear()
            self[text] = found
        return found


class WordCache:
    """Encodes ASCII text word by word. Safe to share between threads. Make one with `Words.of`."""

    def __init__(self, tokenizer: Tokenizer, pattern: re.Pattern[str]) -> None:
        self._model = tokenizer.model
        self._pattern = pattern
        self._words = _Memo(self._look_up)
        self._texts: dict[str, Encoded] = {}  # short ones, such as a template's own between control tokens

    @classmethod
    def of(cls, tokenizer: Tokenizer, definition: dict[str, Any] | None = None) -> WordCache | None:
        """Return the words of a tokenizer, or None where it is not known to work word by word.

        Args:
            tokenizer: It.
            definition: Its definition without the model, where that is known: to ask it for one takes half a second.
        """
        if definition is None:
            text = tokenizer.to_str()
            definition = json.loads(text[: text.index('"model":{')] + '"model":null}')
        pattern = _pattern(definition)
        return None if pattern is None else cls(tokenizer, pattern)

    def encode(self, text: str) -> Encoded | None:
        """Return the tokens of a text; None where it is not all ASCII words."""
        if not text.isascii():
            return None
        short = self._texts.get(text)
        if short is not None:
            return short
        words = [self._pattern.findall(text)] if len(text) < LONG_TEXT else self._batches(text)
        packed = b"".join([b"".join(map(self._words.__getitem__, batch)) for batch in words])
        found = _few(packed) if len(packed) <= FEW_BYTES else _many(packed)
        if len(found.stops) == 0 or found.stops[-1] != len(text):
            return None
        if len(text) <= LONGEST:
            if len(self._texts) >= REMEMBERED:
                self._texts.clear()
            self._texts[text] = found
        return found

    def _batches(self, text: str) -> Iterator[list[str]]:
        """Yield the words of a text, some at a time: `findall` would keep other threads out until its end."""
        found = map(re.Match.group, self._pattern.finditer(text))
        while batch := list(islice(found, _AT_ONCE)):
            yield batch

    def _look_up(self, word: str) -> bytes:
        """Return each token of a word as its id and its length in characters, int32."""
        ((mapped, _),) = _BYTES.pre_tokenize_str(word)
        tokens = self._model.tokenize(mapped)
        return np.array([(token.id, len(token.value)) for token in tokens], np.int32).tobytes()


def _few(packed: bytes) -> Encoded:
    """Take ids and lengths apart, and add the lengths up."""
    numbers = memoryview(packed).cast("i")
    return Encoded(numbers[::2].tobytes(), list(accumulate(numbers[1::2])))


def _many(packed: bytes) -> Encoded:
    """Do what `_few` does where NumPy is faster."""
    tokens = np.frombuffer(packed, np.int32).reshape(-1, 2)
    return Encoded(tokens[:, 0].tobytes(), tokens[:, 1].cumsum(dtype=np.int64))


_BYTES = ByteLevel(add_prefix_space=False, use_regex=False)


def _pattern(definition: dict[str, Any]) -> re.Pattern[str] | None:
    """Translate the one expression by which a tokenizer cuts ASCII text, or give None."""
    normalizer = definition["normalizer"] or {"type": "NFC"}
    if definition["added_tokens"] or normalizer not in ({"type": "NFC"}, {"type": "Sequence", "normalizers": []}):
        return None
    expression = _expression(definition["pre_tokenizer"] or {})
    translated = None if expression is None else _ascii(expression)
    return None if translated is None else re.compile(translated, re.ASCII)


def _expression(cutting: dict[str, Any]) -> str | None:
    """Return the Oniguruma expression whose matches are the words, or None where the cutting is of another kind."""
    match cutting.get("pretokenizers", [cutting]):
        case [{"type": "Split", "behavior": "Isolated", "invert": False, "pattern": {"Regex": str(expression)}}, last]:
            return expression if last.items() >= _BYTE_LEVEL.items() else None
        case [last] if last.items() >= _GPT2.items():
            return _gpt2(r" ?\p{N}+")
        case [{"type": "Digits", "individual_digits": bool(alone)}, last] if last.items() >= _GPT2.items():
            # Digits are cut out before, so that no blank comes with them, and blanks before them are at an end.
            return _gpt2(r"\p{N}" if alone else r"\p{N}+", r"[^\s\p{N}]")
    return None


def _gpt2(numbers: str, after_blanks: str = r"\S") -> str:
    """Write the expression that `ByteLevel` has of its own, GPT-2's (tokenizers, `byte_level.rs`)."""
    return rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+|{numbers}| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!{after_blanks})|\s+"


def _ascii(expression: str) -> str | None:
    """Rewrite an Oniguruma expression so that Python's `re` finds the same in ASCII text; None where it may not."""
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
    # Capturing groups would change what findall gives, and a class without members is another thing in `re`.
    if "[]" in rewritten or "[^]" in rewritten or re.search(r"(?<!\\)\((?!\?)", rewritten):
        return None
    return rewritten
