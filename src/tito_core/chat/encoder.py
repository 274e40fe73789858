"""Text with content spans -> token ids with provenance, so that content cannot become a control token (law 6).

Control tokens are matched in the scaffold's characters only. Each stretch between them is encoded whole, by a copy of
the tokenizer without control tokens. Encoding content and scaffold apart would change the merges at their seams
(`user\\n` + `\\nhi`), and the tokenizer itself would encode `<|im_end|>` in a user's text as a control token.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer

from tito_core.chat.inert_tokenizer import InertTokenizer
from tito_core.chat.tokenizer import TokenizerError
from tito_core.chat.traced import Span, Traced
from tito_core.chat.word_cache import LONG_TEXT
from tito_core.ledger.columns import TokenIds
from tito_core.ledger.provenance import Provenance, Provenances

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Control = tuple[int, int, int]
"""(start, stop, id) of a control token in rendered text, in characters."""

CACHE_SIZE = 1 << 12
"""Capacity of the caches of scaffold stretches."""
MAX_CACHED_SCAFFOLD = 256
"""Longest cached stretch of scaffold, in characters."""
_PROMPT, _SCAFFOLD = bytes([Provenance.PROMPT]), bytes([Provenance.SCAFFOLD])
_SPACES = re.compile(r"\s*")
_SURROGATES = re.compile("[\ud800-\udfff]")
"""Lone surrogates, which tokenizers reject."""


@dataclass(frozen=True, slots=True, eq=False)
class EncodedText:
    """Token ids (int32, shape (n,)) and the provenance of each (uint8, shape (n,))."""

    ids: TokenIds
    provenance: Provenances

    @classmethod
    def joined(cls, ids: Iterable[bytes], provenance: Iterable[bytes]) -> EncodedText:
        """Join packed pieces: ids as int32, provenance as one byte per id."""
        packed_ids, packed_provenance = bytearray().join(ids), bytearray().join(provenance)
        return cls(np.frombuffer(packed_ids, np.int32), np.frombuffer(packed_provenance, np.uint8))


class ContentSafeEncoder:
    """Encodes rendered templates so that content gives no control token (law 6).

    Args:
        tokenizer: A fast Hugging Face tokenizer.
        markup: Texts of added tokens that a parser reads as control tokens, besides those of a known form.
        inert: Whether content gives no control token. If False, content is matched like scaffold.

    Attributes:
        inert: The argument.
        tokenizer: A private copy of the tokenizer, which matches control tokens in any text.
        added: Ids of the control tokens by text.
        control_ids: Ids of the control tokens.
        digest: sha256 of the tokenizer's definition, hex.
        eos_id: Id of the tokenizer's eos_token if it is a control token, else None.
        vocab_size: Number of the tokenizer's ids, added tokens included.

    Raises:
        TokenizerError: The tokenizer is not a fast tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, inert: bool = True, markup: Collection[str] = ()) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise TokenizerError(
                f"{type(tokenizer).__name__} is not a fast tokenizer, which token-exact prompts need. "
                "Load it with AutoTokenizer.from_pretrained(..., use_fast=True) from a folder with tokenizer.json."
            )
        self._plain = plain = InertTokenizer.of(backend, str(tokenizer.chat_template or ""), markup)
        self.tokenizer = plain.original
        self.digest = plain.digest
        self.vocab_size = len(tokenizer)  # cached: a fast tokenizer counts on each call
        tokens = {
            i: token for i, token in plain.original.get_added_tokens_decoder().items() if token.content in plain.control
        }
        self.added = {token.content: index for index, token in tokens.items()}
        self.control_ids = frozenset(tokens)
        self.eos_id = self.added.get(str(tokenizer.eos_token))
        self._packed = {index: np.int32(index).tobytes() for index in tokens}
        self._scaffolds: dict[str, Sequence[Control]] = {}
        self._stretches: dict[str, tuple[bytes, bytes]] = {}
        self.inert = inert
        self._strips_left = frozenset(index for index, token in tokens.items() if token.lstrip)
        self._strips_right = frozenset(index for index, token in tokens.items() if token.rstrip)
        self._inert_tokenizer = plain.tokenizer
        self._words = plain.words
        longest_first = sorted(self.added, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def encode(self, text: Traced, begin: int = 0, written: Sequence[Control] | None = None) -> EncodedText:
        """Encode rendered text: control ids where the scaffold has them, ordinary ids elsewhere.

        Args:
            text: The rendering.
            begin: First character to encode; must be a boundary of a control token.
            written: The control tokens from `begin` on, if known from `controls`.
        """
        content = _Content.of(text.spans)
        ids: list[bytes] = []
        provenance: list[bytes] = []
        at = begin
        for start, stop, token in self._controls(text, begin) if written is None else written:
            self._encode_stretch(text, at, start, content, ids, provenance)
            ids.append(self._packed[token])
            # It is scaffold, even if it strips blanks of content.
            provenance.append(_SCAFFOLD if self.inert or not content.between(start, stop) else _PROMPT)
            at = stop
        self._encode_stretch(text, at, len(text), content, ids, provenance)
        return EncodedText.joined(ids, provenance)

    def count(self, content: str) -> int:
        """Return the number of tokens of content alone."""
        return self._encoded(str.__str__(content))[1]

    def controls(self, text: Traced) -> list[Control]:
        """List the scaffold's control tokens as (start, stop, id) in characters, with the blanks that they strip."""
        return list(self._controls(text, 0))

    def _controls(self, text: Traced, at: int) -> Iterator[Control]:
        plain = str.__str__(text)
        for gap_start, gap_stop in _gaps(text.spans, at, len(text)) if self.inert else ((at, len(text)),):
            for first, last, token in self._match_controls(plain[gap_start:gap_stop]):
                start, stop = gap_start + first, gap_start + last
                if start < at:
                    continue
                if token in self._strips_left:
                    start = at + len(plain[at:start].rstrip())
                if token in self._strips_right and (blanks := _SPACES.match(plain, stop)):
                    stop = blanks.end()
                yield start, stop, token
                at = stop

    def _match_controls(self, scaffold: str) -> Sequence[Control]:
        """List the control tokens in a stretch of scaffold; cached, since a template has few different ones."""
        known = self._scaffolds.get(scaffold)
        if known is None:
            found = self._pattern.finditer(scaffold)
            known = tuple((match.start(), match.end(), self.added[match.group()]) for match in found)
            if len(scaffold) <= MAX_CACHED_SCAFFOLD:
                if len(self._scaffolds) >= CACHE_SIZE:
                    self._scaffolds.clear()
                self._scaffolds[scaffold] = known
        return known

    def _encode_stretch(
        self, text: Traced, start: int, stop: int, content: _Content, ids: list[bytes], provenance: list[bytes]
    ) -> None:
        """Append the packed ids and provenance of the characters from `start` to `stop`."""
        if start >= stop:
            return
        stretch = str.__getitem__(text, slice(start, stop))
        inside = content.between(start, stop)
        spans = [(a - start, b - start) for a, b, _ in inside]
        packed_ids, packed_provenance = self._stretch(stretch, spans) if spans else self._scaffold(stretch)
        ids.append(packed_ids)
        provenance.append(packed_provenance)

    def _stretch(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[bytes, bytes]:
        """Return the packed ids and provenance of text without control tokens, given its content spans."""
        packed, count, bounds = self._encoded(text)
        if len(spans) > 1:
            spans = _merged(spans)
        if spans[0][0] <= 0 and spans[0][1] >= len(text):
            return packed, _PROMPT * count
        starts, stops = bounds()
        return packed, _provenance(starts, stops, spans)

    def _scaffold(self, stretch: str) -> tuple[bytes, bytes]:
        """Return the packed ids and provenance of a stretch without content; cached."""
        known = self._stretches.get(stretch)
        if known is None:
            packed, count, _ = self._encoded(stretch)
            known = packed, _SCAFFOLD * count
            if len(stretch) <= MAX_CACHED_SCAFFOLD:
                if len(self._stretches) >= CACHE_SIZE:
                    self._stretches.clear()
                self._stretches[stretch] = known
        return known

    def _encoded(self, stretch: str) -> tuple[bytes, int, Callable[[], tuple[Places | None, Places]]]:
        """Return a stretch's packed ids, their number, and a function that returns the bounds of each token."""
        found = self._words.encode(stretch) if self._words is not None else None
        if found is not None:
            return found.ids, len(found.stops), lambda: (None, found.stops)
        if not stretch.isascii():
            stretch = replace_surrogates(stretch)
        if len(stretch) < LONG_TEXT:
            encoding = self._inert_tokenizer.encode(stretch, add_special_tokens=False)
        else:  # the same result, but the GIL is released
            encoding = self._inert_tokenizer.encode_batch([stretch], add_special_tokens=False)[0]
        ids = encoding.ids
        return np.array(ids, np.int32).tobytes(), len(ids), lambda: _bounds(_offsets(encoding), len(stretch))


def replace_surrogates(text: str) -> str:
    """Return the text with lone surrogates replaced by U+FFFD."""
    return _SURROGATES.sub("\ufffd", text)


class _Content(NamedTuple):
    """The content spans of a text, indexed by character."""

    spans: tuple[Span, ...]
    begins: list[int]
    ends: list[int]

    @classmethod
    def of(cls, spans: tuple[Span, ...]) -> _Content:
        return cls(spans, [span[0] for span in spans], [span[1] for span in spans])

    def between(self, start: int, stop: int) -> tuple[Span, ...]:
        """Return the spans that overlap the characters from `start` to `stop`."""
        return self.spans[bisect_right(self.ends, start) : bisect_left(self.begins, stop)]


Places = npt.NDArray[np.int64] | Sequence[int]


def _offsets(encoding: Encoding) -> Sequence[tuple[int, int]] | npt.NDArray[np.int64]:
    """Return the (start, stop) of each token. Long encodings are read in parts, because `offsets` holds the GIL."""
    count = len(encoding)
    if count < LONG_TEXT:
        return cast(Sequence[tuple[int, int]], encoding.offsets)
    parts = range(0, count, LONG_TEXT)
    return np.concatenate(
        [
            np.array([encoding.token_to_chars(i) for i in range(at, min(at + LONG_TEXT, count))], np.int64)
            for at in parts
        ]
    )


def _bounds(offsets: Sequence[tuple[int, int]] | npt.NDArray[np.int64], length: int) -> tuple[Places, Places]:
    """Return the starts and stops of tokens, in characters.

    A normaliser that composes characters reports only the first, so each token is extended up to the next one.
    """
    starts, stops = np.array(offsets, np.int64).reshape(-1, 2).T
    if not (starts[1:] == stops[:-1]).all():
        following = np.append(starts, length)[np.searchsorted(starts, starts, side="right")]
        stops = np.maximum(stops, following)
    return starts, stops


def _merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge adjacent spans, so that an empty token between them counts as content."""
    merged = [*spans[:1]]
    for start, stop in spans[1:]:
        if start == merged[-1][1]:
            merged[-1] = merged[-1][0], stop
        else:
            merged.append((start, stop))
    return merged


def _provenance(starts: Places | None, stops: Places, spans: Sequence[tuple[int, int]]) -> bytes:
    """Return the packed provenance: PROMPT for each token that overlaps a content span, else SCAFFOLD.

    If `starts` is None, each token starts where the one before it ends.
    """
    provenance = bytearray(_SCAFFOLD * len(stops))
    for begin, end in spans:
        first = bisect_right(stops, begin)
        last = min(bisect_left(stops, end) + 1, len(stops)) if starts is None else bisect_left(starts, end)
        provenance[first:last] = _PROMPT * (last - first)
    return bytes(provenance)


def _gaps(spans: tuple[Span, ...], at: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield the stretches of scaffold from character `at` on."""
    for start, stop, _ in spans:
        if stop <= at:
            continue
        if at < start:
            yield at, start
        at = stop
    if at < length:
        yield at, length
