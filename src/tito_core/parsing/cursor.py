"""The body of one call, read from left to right."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tito_core.parsing.call_text import Malformed, is_sound_name, shortened
from tito_core.parsing.markup import Mark

if TYPE_CHECKING:
    from tito_core.parsing.completion import Completion, Tools


class Cursor:
    """Takes piece after piece of a body; whatever is not as expected is malformed.

    Attributes:
        name: The tool's name, once it is known for certain; faults carry it.
        taken: The tag that was taken last.
        loose: The first way in which the call differs from what its family documents; see `Said`.
    """

    def __init__(self, said: Completion, start: int, stop: int) -> None:
        self._said = said
        self._at = start
        self._stop = stop
        self.name: str | None = None
        self.taken: str | None = None
        self.loose = ""

    @property
    def tools(self) -> Tools:
        """Schemas by the tool's name."""
        return self._said.tools

    def fault(self, reason: str) -> Malformed:
        """Make the error for a reason."""
        return Malformed(reason, self.name)

    def loosen(self, reason: str) -> None:
        """Note that the call is loose."""
        self.loose = self.loose or reason

    def rest(self) -> str:
        """Take everything that is left, tags included."""
        text = self._said.text[self._at : self._stop]
        self._at = self._stop
        return text

    def peek(self) -> str | None:
        """Return the next tag; None when no tag is left."""
        mark = self._next()
        return None if mark is None else mark.tag

    def upto(self, *tags: str) -> str:
        """Take the text before the next tag, which must be one of these, and the tag.

        Raises:
            Malformed: Another tag comes first, or none.
        """
        mark = self._next()
        wanted = " or ".join(tags)
        if mark is None:
            raise self.fault(f"The call lacks {wanted}.")
        if mark.tag not in tags:
            raise self.fault(f"The call has {mark.tag} where {wanted} belongs.")
        text = self._said.text[self._at : mark.start]
        self._at, self.taken = mark.stop, mark.tag
        return text

    def through(self, text: str) -> str:
        """Take what comes before a text that is no tag, and the text; both must come before the next tag.

        Raises:
            Malformed: The text does not come.
        """
        mark = self._next()
        end = self._stop if mark is None else mark.start
        found = self._said.text.find(text, self._at, end)
        if found < 0:
            raise self.fault(f"The call lacks {text!r} after {self._said.text[max(0, self._at - 20) : self._at]!r}.")
        taken = self._said.text[self._at : found]
        self._at = found + len(text)
        return taken

    def peek_here(self) -> str | None:
        """Return the tag that stands right here; None when there is none."""
        mark = self._next()
        return mark.tag if mark is not None and mark.start == self._at else None

    def skip_blank(self) -> bool:
        """Take the blanks that stand right here; return whether there are any."""
        begun = self._at
        while self._at < self._stop and self._said.text[self._at].isspace():
            self._at += 1
        return self._at > begun

    def skip(self, text: str) -> bool:
        """Take a text that is no tag, if it stands right here."""
        here = self._said.text.startswith(text, self._at, self._stop) and self.peek_here() is None
        self._at += len(text) if here else 0
        return here

    def need(self, text: str) -> None:
        """Take a text that is no tag, which must stand right here.

        Raises:
            Malformed: It does not.
        """
        if not self.skip(text):
            raise self.fault(f"The call has {self._ahead()} where {text!r} belongs.")

    def match(self, pattern: re.Pattern[str], what: str) -> str:
        """Take what a pattern matches right here, up to the next tag at most.

        Raises:
            Malformed: It matches nothing.
        """
        mark = self._next()
        found = pattern.match(self._said.text, self._at, self._stop if mark is None else mark.start)
        if not found:
            raise self.fault(f"The call has {self._ahead()} where {what} belongs.")
        self._at = found.end()
        return found.group()

    def _ahead(self) -> str:
        return shortened(self._said.text[self._at : min(self._stop, self._at + 20)])

    def tag(self, *tags: str) -> None:
        """Take the next tag, with nothing but blanks before it."""
        self.blank(self.upto(*tags))

    def end(self) -> None:
        """Check that only blanks are left."""
        self.blank(self.rest())

    def blank(self, text: str) -> None:
        """Check that a text is only blanks."""
        if text.strip():
            raise self.fault(f"The call has stray text: {shortened(text)}.")

    def sound_name(self, name: str) -> str:
        """Check a tool's name that stands without quotes, and note it for later faults."""
        if not is_sound_name(name):
            raise self.fault(f"The call has no sound name: {name[:60]!r}.")
        self.name = name
        return name

    def _next(self) -> Mark | None:
        mark = self._said.next(self._at)
        return mark if mark is not None and mark.stop <= self._stop else None
