"""Markup in a completion: by control-token id where the vocabulary has one, by exact text where it has none."""

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
    """A completion as text in which every character knows its token.

    A token that is not whole UTF-8 by itself shares its character with the tokens that complete it.
    """

    def __init__(self, decode: Decode, ids: Sequence[int]) -> None:
        self.ids = list(ids)
        self.text, self.starts = decode(self.ids)

    def token_of(self, char: int) -> int:
        """Return the token that holds a character."""
        return bisect_right(self.starts, char) - 1

    def span_of(self, start: int, stop: int) -> tuple[int, int]:
        """Return the tokens (first, one past last) that hold characters `start` to `stop`."""
        first = max(0, self.token_of(start))
        return first, max(bisect_left(self.starts, stop), first + 1)


class Mark(NamedTuple):
    """One tag as it stands in a completion: characters `start` to `stop`."""

    start: int
    stop: int
    tag: str


class Markup:
    """The tags of a format, such as `<tool_call>`, each by token or by text, as the vocabulary has it.

    Attributes:
        tokens: Tags that are one added token of the vocabulary, by id. Text that merely spells one is text (law 9).
        texts: The text of every tag and special token.
        anchors: Ids of the control tokens that tags hold.
        spelled: Tags that are no token of the vocabulary, longest first.
        special: Ids of the tokenizer's special tokens that are no tag of the format; stop tokens are among them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tags: Iterable[str], anchors: Iterable[str] = ()) -> None:
        """Look the tags up.

        Args:
            tokenizer: Its added tokens decide.
            tags: All tags that may matter.
            anchors: Control tokens that tags hold, such as DeepSeek's `｜DSML｜`: where the vocabulary has one, a tag
                that merely spells it is text.
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
        """Ids that no content may hold: tags, anchors and special tokens."""
        return self.special.union(self.tokens, self.anchors.values())

    @property
    def strings(self) -> frozenset[str]:
        """Texts of the format's own control tokens: its tags and anchors that are tokens of the vocabulary."""
        return frozenset(self.tokens.values()).union(self.anchors)

    def token_of(self, tag: str) -> int | None:
        """Return the id of a tag that is one token, else None."""
        return self._ids.get(tag)

    def certain(self, tag: str) -> bool:
        """Return whether text cannot spell a tag: it is a token, or holds one."""
        return tag in self._ids or any(anchor in tag for anchor in self.anchors)

    def marks(self, decoded: DecodedIds) -> list[Mark]:
        """Find every tag, in order of characters."""
        tokens, starts, ids = self.tokens, decoded.starts, decoded.ids
        # Few of many, found without steps of Python's own.
        tags = compress(enumerate(ids), map(tokens.__contains__, ids)) if tokens else ()
        found = [Mark(starts[i], starts[i] + len(tokens[token]), tokens[token]) for i, token in tags]
        if self._spelled is not None:
            spelled = self._spelled.finditer(decoded.text)
            marks = [Mark(m.start(), m.end(), m.group()) for m in spelled if self._anchored(decoded, m)]
            found = [*self._alone(found, marks), *marks]
            found.sort()
        return found

    def _alone(self, tokens: list[Mark], tags: list[Mark]) -> list[Mark]:
        """Leave out the anchors that are part of a tag, where an anchor alone is a tag too."""
        if not self.tokens.keys() & self.anchors.values():
            return tokens
        held = {tag.start + tag.tag.find(anchor) for tag in tags for anchor in self.anchors if anchor in tag.tag}
        return [token for token in tokens if token.start not in held]

    def _anchored(self, decoded: DecodedIds, match: re.Match[str]) -> bool:
        for anchor, token in self.anchors.items():
            at = match.group().find(anchor)
            if at >= 0:
                holds = decoded.token_of(match.start() + at)
                return decoded.ids[holds] == token and decoded.starts[holds] == match.start() + at
        return True
