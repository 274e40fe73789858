"""Text with content spans -> token ids with provenance, so that content cannot become a control token (law 6).

The added tokens that the scaffold wrote are found in the scaffold's own characters only. Each stretch between them
is encoded whole, by a copy of the tokenizer that knows no added tokens: encoding content and scaffold apart would
move the merges at their seams (`user\\n` + `\\nhi`), and the tokenizer itself would turn `<|im_end|>` in a user's
text into the real thing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer

from tito_core.chat.traced import Span, Traced
from tito_core.ledger.provenance import Provenance, Provenances
from tito_core.ledger.turn import TokenIds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, eq=False)
class EncodedText:
    """Token ids (int32, shape (n,)) and the provenance of each (uint8, shape (n,))."""

    ids: TokenIds
    provenance: Provenances


class ContentSafeEncoder:
    """Encodes rendered templates.

    Args:
        tokenizer: A fast Hugging Face tokenizer.

    Raises:
        TypeError: The tokenizer has no `tokenizers` backend to copy.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise TypeError(
                f"{type(tokenizer).__name__} is not a fast tokenizer, and token-exact prompts need one: "
                "load it with AutoTokenizer.from_pretrained(..., use_fast=True) from a folder with tokenizer.json."
            )
        self.added = {token.content: index for index, token in backend.get_added_tokens_decoder().items()}
        self._plain = _without_added_tokens(backend)
        longest_first = sorted(self.added, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def encode(self, text: Traced) -> EncodedText:
        """Encode rendered text: control ids where the scaffold wrote them, ordinary ids everywhere else."""
        ids: list[int] = []
        provenance: list[int] = []
        at = 0
        for start, stop, token in self._controls(text):
            self._encode_stretch(text, at, start, ids, provenance)
            ids.append(token)
            provenance.append(Provenance.SCAFFOLD)
            at = stop
        self._encode_stretch(text, at, len(text), ids, provenance)
        return EncodedText(np.array(ids, np.int32), np.array(provenance, np.uint8))

    def controls(self, text: Traced) -> list[tuple[int, int, int]]:
        """List the added tokens the scaffold wrote: (start, stop, id) in characters."""
        return list(self._controls(text))

    def _controls(self, text: Traced) -> Iterator[tuple[int, int, int]]:
        plain = str.__str__(text)
        for start, stop in _gaps(text.spans, len(text)):
            for match in self._pattern.finditer(plain, start, stop):
                yield match.start(), match.end(), self.added[match.group()]

    def _encode_stretch(self, text: Traced, start: int, stop: int, ids: list[int], provenance: list[int]) -> None:
        if start >= stop:
            return
        encoding = self._plain.encode(str.__getitem__(text, slice(start, stop)), add_special_tokens=False)
        ids += encoding.ids
        spans = [(a - start, b - start) for a, b, _ in text.spans if b > start and a < stop]
        provenance += _provenance(encoding.offsets, spans)


def _provenance(offsets: list[tuple[int, int]], spans: list[tuple[int, int]]) -> Iterator[int]:
    """Give `PROMPT` to each token that holds any character of content, else `SCAFFOLD` (both lists are sorted)."""
    at = 0
    for start, stop in offsets:
        while at < len(spans) and spans[at][1] <= start:
            at += 1
        touches = at < len(spans) and spans[at][0] < stop
        yield Provenance.PROMPT if touches else Provenance.SCAFFOLD


def _gaps(spans: tuple[Span, ...], length: int) -> Iterator[tuple[int, int]]:
    """Yield the stretches of characters that no content span covers."""
    at = 0
    for start, stop, _ in spans:
        if at < start:
            yield at, start
        at = stop
    if at < length:
        yield at, length


def _without_added_tokens(backend: Tokenizer) -> Tokenizer:
    """Copy the tokenizer without added tokens and without the specials its post-processor would put around."""
    definition = json.loads(backend.to_str())
    definition["added_tokens"] = []
    definition["post_processor"] = None
    definition["truncation"] = definition["padding"] = None
    return Tokenizer.from_str(json.dumps(definition))
