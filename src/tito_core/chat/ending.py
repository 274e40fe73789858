"""How a turn ends: its closing tokens, which of them a sampled turn lacks, and where they are in rendered text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum

from tito_core.chat.encoder import ContentSafeEncoder, Control
from tito_core.chat.traced import Span, Traced
from tito_core.ledger.columns import TokenIds


class Opened(StrEnum):
    """The part that a truncated turn left open; its closing tokens are inserted before the next message."""

    MESSAGE = "message"
    REASONING = "reasoning"
    CALL = "call"


@dataclass(frozen=True, slots=True)
class Ending:
    """How turns of one kind (answers or calls) end.

    Attributes:
        closing: Ids of the control tokens between the turn and the next message's opener: one in most families, two
            in Cohere's, none where the next opener ends the turn (GLM).
        finals: Ids that end the last turn of a conversation, if they differ from `closing` (gpt-oss).
        openers: Ids that open the next message, if nothing else ends a turn.
        closers: Ids to append to a truncated turn, by the part it left open; each ends with `closing`.
    """

    closing: tuple[int, ...]
    finals: frozenset[int]
    openers: frozenset[int]
    closers: Mapping[Opened, TokenIds]

    def missing(self, last_output_id: int | None, opened: Opened, controls: Set[int] = frozenset()) -> TokenIds:
        """Return the ids to insert after a turn; none if it is closed.

        Args:
            last_output_id: The last token that the engine sampled.
            opened: What the turn left open.
            controls: Ids of control tokens. A call's closer that was sampled last is not inserted again.
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
        """Return the stop token ids for the engine."""
        return frozenset(self.closing[-1:]) | self.finals | self.openers


def content_start(text: Traced, source: int) -> int:
    """Return where the content of message `source` begins, or the length of the text if it is not shown."""
    return next((start for start, _, origin in text.spans if origin == source), len(text))


def content_spans(text: Traced, source: int) -> list[Span]:
    """List the spans of message `source`."""
    return [span for span in text.spans if span[2] == source]


def controls_from(encoder: ContentSafeEncoder, text: Traced, start: int) -> list[Control]:
    """List the scaffold's control tokens from a position on."""
    return [control for control in encoder.controls(text) if control[0] >= start]


def find_run(controls: Sequence[Control], ids: Sequence[int], start: int) -> tuple[int, int] | None:
    """Return the (start, stop) characters of the first run of control tokens `ids` at or after `start`, or None."""
    last = len(ids) - 1
    for i in range(len(controls) - last):
        if controls[i][0] >= start and all(controls[i + j][2] == token for j, token in enumerate(ids)):
            return controls[i][0], controls[i + last][1]
    return None


def run_before(controls: Sequence[Control], text: Traced, start: int, stop: int) -> int:
    """Return where the run of control tokens that ends at `stop` begins, with the blanks between and before them."""
    plain = str.__str__(text)
    at = stop
    for begin, end, _ in reversed([control for control in controls if start <= control[0] and control[1] <= stop]):
        if plain[end:at].strip():
            break
        at = begin
    return at if at == stop else start + len(plain[start:at].rstrip())


def adjacent(controls: Sequence[Control]) -> tuple[int, ...]:
    """Return the ids of the leading control tokens that have no text between them."""
    ids: list[int] = []
    for i, (start, _, token) in enumerate(controls):
        if i and start != controls[i - 1][1]:
            break
        ids.append(token)
    return tuple(ids)


def cut(text: Traced, start: int, stop: int | None = None) -> Traced:
    """Return `text[start:stop]` with its content spans."""
    piece = text[start:stop]
    return piece if isinstance(piece, Traced) else Traced.of(piece, ())
