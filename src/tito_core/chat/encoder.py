"""Text with content spans -> token ids with provenance, so that content cannot become a control token (law 6).

The added tokens that the scaffold wrote are found in the scaffold's own characters only. Each stretch between them
is encoded whole, by a copy of the tokenizer that knows no added tokens: encoding content and scaffold apart would
move the merges at their seams (`user\\n` + `\\nhi`), and the tokenizer itself would turn `<|im_end|>` in a user's
text into the real thing.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from tito_core.chat.plain import PlainTokenizer
from tito_core.chat.traced import Span, Traced
from tito_core.ledger.columns import TokenIds
from tito_core.ledger.provenance import Provenance, Provenances

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Control = tuple[int, int, int]
"""(start, stop, id) of a control token in rendered text, in characters."""

_SPACES = re.compile(r"\s*")
_HALF_PAIRS = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair is no character: no tokenizer takes one."""


@dataclass(frozen=True, slots=True, eq=False)
class EncodedText:
    """Token ids (int32, shape (n,)) and the provenance of each (uint8, shape (n,))."""

    ids: TokenIds
    provenance: Provenances


class ContentSafeEncoder:
    """Encodes rendered templates.

    Args:
        tokenizer: A fast Hugging Face tokenizer.
        markup: Texts of added tokens that a parser reads as control tokens, beyond those that look like it.
        inert: Whether content cannot become a control token; without it, content is matched as scaffold is.

    Attributes:
        added: Ids of the tokenizer's added tokens by their text.
        control_ids: Ids of those that content must not make; the others are ordinary text.
        digest: sha256 of the tokenizer's definition, hex.

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
        plain = PlainTokenizer.of(backend, str(tokenizer.chat_template or ""), markup)
        self.digest = plain.digest
        tokens = {i: token for i, token in backend.get_added_tokens_decoder().items() if token.content in plain.control}
        self.added = {token.content: index for index, token in tokens.items()}
        self.control_ids = frozenset(tokens)
        self._inert = inert
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
        tokens = _Tokens([], [], [])
        controls: list[int] = []
        at = begin
        for start, stop, token in self._controls(text, begin) if written is None else written:
            self._encode_stretch(text, at, start, tokens)
            controls.append(len(tokens.ids))
            tokens.ids.append(token)
            tokens.starts.append(start)
            tokens.stops.append(stop)
            at = stop
        self._encode_stretch(text, at, len(text), tokens)
        touches = _touches(tokens, text.spans, len(text))
        if self._inert:
            touches[controls] = False  # the scaffold wrote it, even where it swallows blanks of content
        provenance = np.where(touches, np.uint8(Provenance.PROMPT), np.uint8(Provenance.SCAFFOLD))
        return EncodedText(np.array(tokens.ids, np.int32), provenance)

    def controls(self, text: Traced) -> list[Control]:
        """List the added tokens the scaffold wrote: (start, stop, id) in characters, with the blanks they swallow."""
        return list(self._controls(text, 0))

    def _controls(self, text: Traced, at: int) -> Iterator[Control]:
        plain = str.__str__(text)
        for gap_start, gap_stop in _gaps(text.spans, at, len(text)) if self._inert else ((at, len(text)),):
            for match in self._pattern.finditer(plain, gap_start, gap_stop):
                token, start, stop = self.added[match.group()], match.start(), match.end()
                if start < at:
                    continue
                if token in self._eats_left:
                    start = at + len(plain[at:start].rstrip())
                if token in self._eats_right and (blanks := _SPACES.match(plain, stop)):
                    stop = blanks.end()
                yield start, stop, token
                at = stop

    def _encode_stretch(self, text: Traced, start: int, stop: int, tokens: _Tokens) -> None:
        if start >= stop:
            return
        stretch = str.__getitem__(text, slice(start, stop))
        found = self._words.encode(stretch) if self._words is not None else None
        if found is not None:
            ids, lengths = found
            tokens.ids.extend(ids)
            ends = list(accumulate(lengths, initial=start))
            tokens.starts.extend(ends[:-1])
            tokens.stops.extend(ends[1:])
            return
        if not stretch.isascii():
            stretch = _HALF_PAIRS.sub("\ufffd", stretch)
        encoding = self._plain.encode(stretch, add_special_tokens=False)
        tokens.ids.extend(encoding.ids)
        for a, b in encoding.offsets:
            tokens.starts.append(a + start)
            tokens.stops.append(b + start)


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Tokens as they are found: ids, first characters, and the characters after the last."""

    ids: list[int]
    starts: list[int]
    stops: list[int]


def _touches(tokens: _Tokens, spans: tuple[Span, ...], length: int) -> npt.NDArray[np.bool_]:
    """Tell which tokens hold any character of content.

    A normaliser that composes characters reports only the first of them, so that a token reaches up to the next one.
    """
    starts, stops = np.array(tokens.starts, np.int64), np.array(tokens.stops, np.int64)
    if len(starts) and not (starts[1:] == stops[:-1]).all():
        following = np.append(starts, length)[np.searchsorted(starts, starts, side="right")]
        stops = np.maximum(stops, following)
    # A span is touched by the tokens that end after its start and start before its end.
    begins = np.array([span[0] for span in spans], np.int64)
    ends = np.array([span[1] for span in spans], np.int64)
    touches: npt.NDArray[np.bool_] = np.searchsorted(begins, stops, side="left") > np.searchsorted(
        ends, starts, side="right"
    )
    return touches


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
