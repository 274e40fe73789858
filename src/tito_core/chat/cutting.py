"""Where a turn ends in rendered text, found through control tokens that the scaffold wrote."""

from __future__ import annotations

from collections.abc import Sequence

from tito_core.chat.encoder import ContentSafeEncoder, Control
from tito_core.chat.traced import Span, Traced


def content_start(text: Traced, source: int) -> int:
    """Give where the content of message `source` begins; the end where it shows none."""
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
    """Give where the run of control tokens begins that ends at `stop`, with blanks between and before them."""
    plain = str.__str__(text)
    at = stop
    for begin, end, _ in reversed([control for control in controls if start <= control[0] and control[1] <= stop]):
        if plain[end:at].strip():
            break
        at = begin
    return at if at == stop else start + len(plain[start:at].rstrip())


def adjacent(controls: Sequence[Control]) -> tuple[int, ...]:
    """Give the ids of the first control tokens that follow each other without text between."""
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
