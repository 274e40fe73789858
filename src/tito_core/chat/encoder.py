"""Text with content spans -> token ids with provenance, so that content cannot become a control token (law 6).

The added tokens that the scaffold wrote are found in the scaffold's own characters only. Each stretch between them
is encoded whole, by a copy of the tokenizer that knows no added tokens: encoding content and scaffold apart would
move the merges at their seams (`user\\n` + `\\nhi`), and the tokenizer itself would turn `<|im_end|>` in a user's
text into the real thing.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from tito_core.chat.plain import PlainTokenizer
from tito_core.chat.traced import Span, Traced
from tito_core.ledger.provenance import Provenance, Provenances
from tito_core.ledger.turn import TokenIds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, inert: bool = True, markup: Collection[str] = ()
    ) -> None:
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
        longest_first = sorted(self.added, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def encode(self, text: Traced, begin: int = 0) -> EncodedText:
        """Encode rendered text: control ids where the scaffold wrote them, ordinary ids everywhere else.

        Args:
            text: The rendering.
            begin: The first character to encode: where a control token starts or has stopped.
        """
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        controls: list[int] = []
        at = begin
        for start, stop, token in self._controls(text):
            if start < begin:
                continue
            self._encode_stretch(text, at, start, ids, offsets)
            controls.append(len(ids))
            ids.append(token)
            offsets.append((start, stop))
            at = stop
        self._encode_stretch(text, at, len(text), ids, offsets)
        touches = _touches(np.array(offsets, np.int64).reshape(-1, 2), text.spans, len(text))
        touches[controls] = False  # the scaffold wrote it, even where it swallows blanks of content
        provenance = np.where(touches, Provenance.PROMPT, Provenance.SCAFFOLD).astype(np.uint8)
        return EncodedText(np.array(ids, np.int32), provenance)

    def controls(self, text: Traced) -> list[tuple[int, int, int]]:
        """List the added tokens the scaffold wrote: (start, stop, id) in characters, with the blanks they swallow."""
        return list(self._controls(text))

    def _controls(self, text: Traced) -> Iterator[tuple[int, int, int]]:
        plain = str.__str__(text)
        at = 0
        for gap_start, gap_stop in _gaps(text.spans, len(text)) if self._inert else ((0, len(text)),):
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

    def _encode_stretch(
        self, text: Traced, start: int, stop: int, ids: list[int], offsets: list[tuple[int, int]]
    ) -> None:
        if start >= stop:
            return
        stretch = str.__getitem__(text, slice(start, stop))
        if not stretch.isascii():
            stretch = _HALF_PAIRS.sub("\ufffd", stretch)
        encoding = self._plain.encode(stretch, add_special_tokens=False)
        ids += encoding.ids
        offsets += [(a + start, b + start) for a, b in encoding.offsets]


def _touches(offsets: npt.NDArray[np.int64], spans: tuple[Span, ...], length: int) -> npt.NDArray[np.bool_]:
    """Tell which tokens hold any character of content.

    A normaliser that composes characters reports only the first of them, so that a token reaches up to the next one.
    """
    content = np.zeros(length + 1, np.int64)
    for start, stop, _ in spans:
        content[start + 1 : stop + 1] = 1
    before = np.cumsum(content)
    starts = offsets[:, 0]
    following = np.append(starts, length)[np.searchsorted(starts, starts, side="right")]
    touches: npt.NDArray[np.bool_] = before[np.maximum(offsets[:, 1], following)] > before[starts]
    return touches


def _gaps(spans: tuple[Span, ...], length: int) -> Iterator[tuple[int, int]]:
    """Yield the stretches of characters that no content span covers."""
    at = 0
    for start, stop, _ in spans:
        if at < start:
            yield at, start
        at = stop
    if at < length:
        yield at, length
