"""Text with content spans -> token ids with provenance, so that content cannot become a control token (law 6).

The added tokens that the scaffold wrote are found in the scaffold's own characters only. Each stretch between them
is encoded whole, by a copy of the tokenizer that knows no added tokens: encoding content and scaffold apart would
move the merges at their seams (`user\\n` + `\\nhi`), and the tokenizer itself would turn `<|im_end|>` in a user's
text into the real thing.
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
from tito_core.chat.traced import Span, Traced
from tito_core.chat.word_cache import LONG_TEXT
from tito_core.ledger.columns import TokenIds
from tito_core.ledger.provenance import Provenance, Provenances

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Control = tuple[int, int, int]
"""(start, stop, id) of a control token in rendered text, in characters."""

REMEMBERED = 1 << 12
"""Stretches of scaffold whose control tokens are remembered at once."""
LONGEST_SCAFFOLD = 256
"""Characters of the longest that is."""
_PROMPT, _SCAFFOLD = bytes([Provenance.PROMPT]), bytes([Provenance.SCAFFOLD])
_SPACES = re.compile(r"\s*")
_HALF_PAIRS = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair is no character: no tokenizer takes one."""


@dataclass(frozen=True, slots=True, eq=False)
class EncodedText:
    """Token ids (int32, shape (n,)) and the provenance of each (uint8, shape (n,))."""

    ids: TokenIds
    provenance: Provenances

    @classmethod
    def joined(cls, ids: Iterable[bytes], kinds: Iterable[bytes]) -> EncodedText:
        """Put pieces together, packed: ids as int32, and the provenance of each as a byte."""
        joined, of_each = bytearray().join(ids), bytearray().join(kinds)
        return cls(np.frombuffer(joined, np.int32), np.frombuffer(of_each, np.uint8))


class ContentSafeEncoder:
    """Encodes rendered templates.

    Args:
        tokenizer: A fast Hugging Face tokenizer.
        markup: Texts of added tokens that a parser reads as control tokens, beyond those that look like it.
        inert: Whether content cannot become a control token; without it, content is matched as scaffold is.

    Attributes:
        inert: As given.
        tokenizer: The tokenizer itself, in which text spells control tokens.
        added: Ids of the tokenizer's added tokens by their text.
        control_ids: Ids of those that content must not make; the others are ordinary text.
        digest: sha256 of the tokenizer's definition, hex.
        eos_id: The tokenizer's end of sequence, where it is one of the control tokens.
        vocab_size: Number of the tokenizer's ids, added tokens included.

    Raises:
        TypeError: The tokenizer has no `tokenizers` backend to copy.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, inert: bool = True, markup: Collection[str] = ()) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise TypeError(
                f"{type(tokenizer).__name__} is not a fast tokenizer, and token-exact prompts need one: "
                "load it with AutoTokenizer.from_pretrained(..., use_fast=True) from a folder with tokenizer.json."
            )
        self.tokenizer = backend
        plain = InertTokenizer.of(backend, str(tokenizer.chat_template or ""), markup)
        self.digest = plain.digest
        self.vocab_size = len(tokenizer)  # asked once: a fast tokenizer counts anew each time
        tokens = {i: token for i, token in backend.get_added_tokens_decoder().items() if token.content in plain.control}
        self.added = {token.content: index for index, token in tokens.items()}
        self.control_ids = frozenset(tokens)
        self.eos_id = self.added.get(str(tokenizer.eos_token))
        self._packed = {index: np.int32(index).tobytes() for index in tokens}
        self._scaffolds: dict[str, Sequence[Control]] = {}
        self._stretches: dict[str, tuple[bytes, bytes]] = {}
        self.inert = inert
        self._eats_left = frozenset(index for index, token in tokens.items() if token.lstrip)
        self._eats_right = frozenset(index for index, token in tokens.items() if token.rstrip)
        self._plain = plain.tokenizer
        self._words = plain.words
        longest_first = sorted(self.added, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def encode(self, text: Traced, begin: int = 0, written: Sequence[Control] | None = None) -> EncodedText:
        """Encode rendered text: control ids where the scaffold wrote them, ordinary ids everywhere else.

        Args:
            text: The rendering.
            begin: The first character to encode: where a control token starts or has stopped.
            written: The control tokens from there on, as `controls` lists them, where they are known already.
        """
        content = _Content.of(text.spans)
        ids: list[bytes] = []
        kinds: list[bytes] = []
        at = begin
        for start, stop, token in self._controls(text, begin) if written is None else written:
            self._encode_stretch(text, at, start, content, ids, kinds)
            ids.append(self._packed[token])
            # The scaffold wrote it, even where it swallows blanks of content.
            kinds.append(_SCAFFOLD if self.inert or not content.between(start, stop) else _PROMPT)
            at = stop
        self._encode_stretch(text, at, len(text), content, ids, kinds)
        return EncodedText.joined(ids, kinds)

    def count(self, content: str) -> int:
        """Count the tokens of content by itself."""
        return self._encoded(str.__str__(content))[1]

    def controls(self, text: Traced) -> list[Control]:
        """List the added tokens the scaffold wrote: (start, stop, id) in characters, with the blanks they swallow."""
        return list(self._controls(text, 0))

    def _controls(self, text: Traced, at: int) -> Iterator[Control]:
        plain = str.__str__(text)
        for gap_start, gap_stop in _gaps(text.spans, at, len(text)) if self.inert else ((at, len(text)),):
            for first, last, token in self._spelled(plain[gap_start:gap_stop]):
                start, stop = gap_start + first, gap_start + last
                if start < at:
                    continue
                if token in self._eats_left:
                    start = at + len(plain[at:start].rstrip())
                if token in self._eats_right and (blanks := _SPACES.match(plain, stop)):
                    stop = blanks.end()
                yield start, stop, token
                at = stop

    def _spelled(self, scaffold: str) -> Sequence[Control]:
        """List the added tokens that a stretch of scaffold spells; a template writes few different ones."""
        known = self._scaffolds.get(scaffold)
        if known is None:
            found = self._pattern.finditer(scaffold)
            known = tuple((match.start(), match.end(), self.added[match.group()]) for match in found)
            if len(scaffold) <= LONGEST_SCAFFOLD:
                if len(self._scaffolds) >= REMEMBERED:
                    self._scaffolds.clear()
                self._scaffolds[scaffold] = known
        return known

    def _encode_stretch(
        self, text: Traced, start: int, stop: int, content: _Content, ids: list[bytes], kinds: list[bytes]
    ) -> None:
        """Append the ids and the provenance of the tokens of characters `start` to `stop`, packed."""
        if start >= stop:
            return
        stretch = str.__getitem__(text, slice(start, stop))
        inside = content.between(start, stop)
        spans = [(a - start, b - start) for a, b, _ in inside]
        packed, of_each = self._stretch(stretch, spans) if spans else self._scaffold(stretch)
        ids.append(packed)
        kinds.append(of_each)

    def _stretch(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[bytes, bytes]:
        """Return the ids and the provenance of text without control tokens, packed, by where in it content stands."""
        packed, count, reaches = self._encoded(text)
        if len(spans) > 1:
            spans = _merged(spans)
        if spans[0][0] <= 0 and spans[0][1] >= len(text):
            return packed, _PROMPT * count
        starts, stops = reaches()
        return packed, _kinds(starts, stops, spans)

    def _scaffold(self, stretch: str) -> tuple[bytes, bytes]:
        """Return the ids and the provenance of a stretch without content; a template writes few different ones."""
        known = self._stretches.get(stretch)
        if known is None:
            packed, count, _ = self._encoded(stretch)
            known = packed, _SCAFFOLD * count
            if len(stretch) <= LONGEST_SCAFFOLD:
                if len(self._stretches) >= REMEMBERED:
                    self._stretches.clear()
                self._stretches[stretch] = known
        return known

    def _encoded(self, stretch: str) -> tuple[bytes, int, Callable[[], tuple[Places | None, Places]]]:
        """Return a stretch's ids, packed, their number, and what tells where each begins and ends."""
        found = self._words.encode(stretch) if self._words is not None else None
        if found is not None:
            return found.ids, len(found.stops), lambda: (None, found.stops)
        if not stretch.isascii():
            stretch = without_half_pairs(stretch)
        if len(stretch) < LONG_TEXT:
            encoding = self._plain.encode(stretch, add_special_tokens=False)
        else:  # the same, but other threads run meanwhile
            encoding = self._plain.encode_batch([stretch], add_special_tokens=False)[0]
        ids = encoding.ids
        return np.array(ids, np.int32).tobytes(), len(ids), lambda: _reaches(_offsets(encoding), len(stretch))


def without_half_pairs(text: str) -> str:
    """Return the text as tokenizers take it: half of a surrogate pair becomes U+FFFD."""
    return _HALF_PAIRS.sub("\ufffd", text)


class _Content(NamedTuple):
    """The content spans of a text, to be looked up by their characters."""

    spans: tuple[Span, ...]
    begins: list[int]
    ends: list[int]

    @classmethod
    def of(cls, spans: tuple[Span, ...]) -> _Content:
        return cls(spans, [span[0] for span in spans], [span[1] for span in spans])

    def between(self, start: int, stop: int) -> tuple[Span, ...]:
        """Return the spans that hold any of the characters `start` to `stop`."""
        return self.spans[bisect_right(self.ends, start) : bisect_left(self.begins, stop)]


Places = npt.NDArray[np.int64] | Sequence[int]


def _offsets(encoding: Encoding) -> Sequence[tuple[int, int]] | npt.NDArray[np.int64]:
    """Return where each token begins and ends, of many a part at a time: `offsets` would keep other threads out."""
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


def _reaches(offsets: Sequence[tuple[int, int]] | npt.NDArray[np.int64], length: int) -> tuple[Places, Places]:
    """Return where each token begins and ends.

    A normaliser that composes characters reports only the first of them, so that a token reaches up to the next one.
    """
    starts, stops = np.array(offsets, np.int64).reshape(-1, 2).T
    if not (starts[1:] == stops[:-1]).all():
        following = np.append(starts, length)[np.searchsorted(starts, starts, side="right")]
        stops = np.maximum(stops, following)
    return starts, stops


def _merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Make one of spans that touch: a token without characters between them is content's too."""
    merged = [*spans[:1]]
    for start, stop in spans[1:]:
        if start == merged[-1][1]:
            merged[-1] = merged[-1][0], stop
        else:
            merged.append((start, stop))
    return merged


def _kinds(starts: Places | None, stops: Places, spans: Sequence[tuple[int, int]]) -> bytes:
    """Return which tokens hold any character of content: those that end after a span's start and start before its end.

    Without `starts`, each token begins where the one before it ends.
    """
    kinds = bytearray(_SCAFFOLD * len(stops))
    for begin, end in spans:
        first = bisect_right(stops, begin)
        last = min(bisect_left(stops, end) + 1, len(stops)) if starts is None else bisect_left(starts, end)
        kinds[first:last] = _PROMPT * (last - first)
    return bytes(kinds)


def _gaps(spans: tuple[Span, ...], at: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield the stretches of characters from `at` on that no content span covers."""
    for start, stop, _ in spans:
        if stop <= at:
            continue
        if at < start:
            yield at, start
        at = stop
    if at < length:
        yield at, length
