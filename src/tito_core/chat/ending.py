"""How a turn ends: what closes it, and what of that a turn lacks whose last token is known."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from enum import StrEnum

from tito_core.ledger.columns import TokenIds


class Opened(StrEnum):
    """What a truncated turn left open; what closes it is inserted before the next message."""

    MESSAGE = "message"
    REASONING = "reasoning"
    CALL = "call"


@dataclass(frozen=True, slots=True)
class Ending:
    """How turns of one kind (answers, or calls) end.

    Attributes:
        closing: Ids of the control tokens between the turn and the next message's opener: one in most families, two
            in Cohere's, none where the next opener ends the turn (GLM).
        finals: Ids that end a turn which nothing follows, where these differ (gpt-oss): they count as closed.
        openers: Where nothing closes a turn, the ids that open the next message.
        closers: Ids that close a turn which was cut off, by what it left open; the closing is their end.
    """

    closing: tuple[int, ...]
    finals: frozenset[int]
    openers: frozenset[int]
    closers: Mapping[Opened, TokenIds]

    def missing(self, last_output_id: int | None, opened: Opened, controls: Set[int] = frozenset()) -> TokenIds:
        """Return the ids to insert after a turn whose last token is this one; none where it closed itself.

        Args:
            last_output_id: The last token that the engine sampled.
            opened: What the turn left open.
            controls: Ids of control tokens: one of a call's closers that was sampled last is not inserted again.
        """
        closers = self.closers.get(opened, self.closers[Opened.MESSAGE])
        if last_output_id in self.finals:
            return closers[:0]
        if last_output_id in self.closing:
            return closers[len(closers) - len(self.closing) + self.closing.index(last_output_id) + 1 :]
        call = self.closers.get(Opened.CALL, closers).tolist()
        if opened != Opened.REASONING and last_output_id in controls and last_output_id in call:
            return self.closers[Opened.CALL][call.index(last_output_id) + 1 :]
        return closers

    @property
    def stops(self) -> frozenset[int]:
        """Give the ids at which an engine must stop."""
        return frozenset(self.closing[-1:]) | self.finals | self.openers
