"""Find tags in a completion: by token id if the vocabulary has the tag as a token, else by exact text."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import compress
from typing import TYPE_CHECKING, NamedTuple

from tito_core.parsing.decoding import Decode, decoding

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
            found = [*self._alone(found, marks), *marks]
            found.sort()
        return found

    def _alone(self, tokens: list[Mark], tags: list[Mark]) -> list[Mark]:
        """Drop the marks of anchors inside a longer tag, in a format where an anchor alone is a tag too."""
        if not self.tokens.keys() & self.anchors.values():
            return tokens
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
