"""How a turn ends: what closes it, what of that a turn lacks, and where in rendered text it stands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum

from tito_core.chat.encoder import ContentSafeEncoder, Control
from tito_core.chat.traced import Span, Traced
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
        """Return the ids at which an engine must stop."""
        return frozenset(self.closing[-1:]) | self.finals | self.openers


def content_start(text: Traced, source: int) -> int:
    """Return where the content of message `source` begins; the end where it shows none."""
    return next((start for start, _, origin in text.spans if origin == source), len(text))


def content_spans(text: Traced, source: int) -> list[Span]:
    """List the spans of message `source`."""
    return [span for span in text.spans if span[2] == source]


def controls_from(encoder: ContentSafeEncoder, text: Traced, start: int) -> list[Control]:
    """List the scaffold's control tokens from a position on."""
    return [control for control in encoder.controls(text) if control[0] >= start]


def find_run(controls: Sequence[Control], ids: Sequence[int], start: int) -> tuple[int, int] | None:
    """Find the first run of control tokens with these ids from `start` on: its first and last character."""
    last = len(ids) - 1
    for i in range(len(controls) - last):
        if controls[i][0] >= start and all(controls[i + j][2] == token for j, token in enumerate(ids)):
            return controls[i][0], controls[i + last][1]
    return None


def run_before(controls: Sequence[Control], text: Traced, start: int, stop: int) -> int:
    """Return where the run of control tokens begins that ends at `stop`, with blanks between and before them."""
    plain = str.__str__(text)
    at = stop
    for begin, end, _ in reversed([control for control in controls if start <= control[0] and control[1] <= stop]):
        if plain[end:at].strip():
            break
        at = begin
    return at if at == stop else start + len(plain[start:at].rstrip())


def adjacent(controls: Sequence[Control]) -> tuple[int, ...]:
    """Return the ids of the first control tokens that follow each other without text between."""
    ids: list[int] = []
    for i, (start, _, token) in enumerate(controls):
        if i and start != controls[i - 1][1]:
            break
        ids.append(token)
    return tuple(ids)


def cut(text: Traced, start: int, stop: int | None = None) -> Traced:
    """Slice with traces."""
    piece = text[start:stop]
    return piece if isinstance(piece, Traced) else Traced.of(piece, ())
