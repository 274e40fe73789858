"""A turn's answer on its way to people who watch: Strands' events for what is certain of it."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Protocol, cast

from strands.types.streaming import StreamEvent

from tito_core.backend.protocol import TokenChunk
from tito_core.parsing.preview import Piece
from tito_core.parsing.registry import ToolParser
from tito_core.view import delta_of


class Previewing(Protocol):
    """What shows a completion while it comes; see `Preview`."""

    def feed(self, ids: Sequence[int]) -> list[Piece]:
        """Take the next sampled ids; give what they make certain."""


class Showing:
    """Shows one answer. Reasoning and text come as they are sampled; calls once the answer is whole.

    Args:
        parser: The policy's. One without a `preview(prompt_tail)` shows nothing before the end.
        prompt_tail: The last ids of the prompt.

    Attributes:
        blocks: What was shown, block by block; the last one is still open.
    """

    def __init__(self, parser: ToolParser, prompt_tail: Sequence[int]) -> None:
        self._parser, self._prompt_tail = parser, prompt_tail
        self.blocks: list[Piece] = []

    @functools.cached_property
    def _preview(self) -> Previewing | None:
        begin = getattr(self._parser, "preview", None)
        return None if begin is None else cast(Previewing, begin(self._prompt_tail))

    def events(self, chunk: TokenChunk) -> Iterator[StreamEvent]:
        """Yield the events of what a chunk makes certain."""
        for piece in [] if self._preview is None else self._preview.feed(chunk.output_ids.tolist()):
            if not self.blocks:
                yield {"messageStart": {"role": "assistant"}}
            if not self.blocks or self.blocks[-1].kind != piece.kind:
                if self.blocks:
                    yield {"contentBlockStop": {}}
                yield {"contentBlockStart": {"start": {}}}
                self.blocks.append(Piece(piece.kind, ""))
            self.blocks[-1] = Piece(piece.kind, self.blocks[-1].text + piece.text)
            yield {"contentBlockDelta": {"delta": delta_of(piece)}}
