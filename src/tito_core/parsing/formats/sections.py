"""Sections: several calls between an outer pair of tags, each in its own tags (DeepSeek, Kimi, MiniMax)."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass

from tito_core.parsing.call_text import ParsedCallText, shortened
from tito_core.parsing.completion import Completion
from tito_core.parsing.cursor import Cursor


@dataclass(frozen=True, slots=True)
class Section:
    """The four tags of a section.

    Attributes:
        open: Opens the section.
        close: Closes the section.
        call: Opens a call in it.
        end_call: Closes a call.
        inner: Tags inside a call; one after a call shows that the call was closed before its arguments.
    """

    open: str
    close: str
    call: str
    end_call: str
    inner: Set[str] = frozenset()

    def read(self, completion: Completion, start: int, body: Callable[[Cursor], ParsedCallText]) -> int:
        """Read the section at character `start`; `body` parses each call. Return the character after the section."""
        first, at = len(completion.calls), start + len(self.open)
        inside = {self.open, self.close, self.call}
        while True:
            mark = completion.next_mark(at, inside)
            stop = len(completion.text) if mark is None else mark.start
            if mark is not None and mark.tag == self.close:
                self._stray(completion, at, stop)
                if len(completion.calls) == first:
                    completion.add_malformed(start, mark.stop, "The section has no calls.")
                return mark.stop
            if mark is None or mark.tag == self.open:
                self._unclosed(completion, first, start, at, stop)
                return stop
            self._stray(completion, at, stop)
            frame = completion.frame(mark.start, mark.stop, self.end_call, frozenset(inside))
            following = completion.next_mark(frame.stop)
            if frame.closed and following is not None and following.tag in self.inner:
                reason = f"The call has {following.tag} after its closing {self.end_call}."
                completion.add_malformed(frame.start, frame.stop, reason)
                at = frame.stop
            else:
                at = completion.read_frame(frame, self.end_call, body)

    def _stray(self, completion: Completion, start: int, stop: int) -> None:
        text = completion.text[start:stop]
        if text.strip():
            completion.add_malformed(start, stop, f"There is stray text among the calls: {shortened(text)}.")

    def _unclosed(self, completion: Completion, first: int, start: int, at: int, stop: int) -> None:
        """Add the end of a section that was not closed.

        If the completion ends after whole calls, they are loose, or sound where the token limit cut the section off.
        """
        reason = f"The section of calls has no closing {self.close} tag."
        if completion.truncated and stop == len(completion.text):
            if completion.text[at:stop].strip() or len(completion.calls) == first:
                completion.add_unclosed(at if len(completion.calls) > first else start, stop, reason)
            return
        if len(completion.calls) == first:
            completion.add_malformed(start, stop, reason)
            return
        self._stray(completion, at, stop)
        if stop == len(completion.text) and all(call.status.runs for call in completion.calls[first:]):
            completion.mark_loose(first, reason)
            return
        for i in range(first, len(completion.calls)):
            completion.mark_malformed(i, reason)
