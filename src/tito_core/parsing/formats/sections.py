"""Calls that stand together in a section, each in tags of its own (DeepSeek, Kimi, MiniMax)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tito_core.parsing.call_text import ParsedCallText, shortened
from tito_core.parsing.completion import Completion
from tito_core.parsing.cursor import Cursor


@dataclass(frozen=True, slots=True)
class Section:
    """The four tags of such a format.

    Attributes:
        open: Opens the section.
        close: Closes it.
        call: Opens a call in it.
        end_call: Closes that.
    """

    open: str
    close: str
    call: str
    end_call: str

    def read(self, said: Completion, opened: int, body: Callable[[Cursor], ParsedCallText]) -> int:
        """Read the section that begins at character `opened`, each call by `body`; return the character after it."""
        first, at = len(said.calls), opened + len(self.open)
        inside = {self.open, self.close, self.call}
        while True:
            mark = said.next(at, inside)
            stop = len(said.text) if mark is None else mark.start
            if mark is not None and mark.tag == self.close:
                self._stray(said, at, stop)
                if len(said.calls) == first:
                    said.malformed(opened, mark.stop, "The section holds no call.")
                return mark.stop
            if mark is None or mark.tag == self.open:
                self._unclosed(said, first, opened, at, stop)
                return stop
            self._stray(said, at, stop)
            frame = said.frame(mark.start, mark.stop, self.end_call, frozenset(inside))
            at = said.read(frame, self.end_call, body)

    def _stray(self, said: Completion, start: int, stop: int) -> None:
        text = said.text[start:stop]
        if text.strip():
            said.malformed(start, stop, f"There is stray text among the calls: {shortened(text)}.")

    def _unclosed(self, said: Completion, first: int, opened: int, at: int, stop: int) -> None:
        """The section does not end: where nothing cut it off, no call in it is sound."""
        reason = f"The section of calls has no closing {self.close} tag."
        if said.truncated and stop == len(said.text):
            if said.text[at:stop].strip() or len(said.calls) == first:
                said.unclosed(at if len(said.calls) > first else opened, stop, reason)
            return
        if len(said.calls) == first:
            said.malformed(opened, stop, reason)
            return
        self._stray(said, at, stop)
        for i in range(first, len(said.calls)):
            said.spoil(i, reason)
