"""Reads the body of one call from left to right."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tito_core.parsing.call_text import Malformed, is_valid_name, shortened
from tito_core.parsing.markup import Mark
from tito_core.parsing.schema import Choice, ToolSchema, meaning
from tito_core.parsing.typed_value import reading

if TYPE_CHECKING:
    from tito_core.parsing.completion import Completion, Tools


class Cursor:
    """Takes the body of a call piece by piece. A method that finds something else than expected raises `Malformed`.

    "Take" means: return (or skip) the text and move past it.

    Attributes:
        name: The tool's name, once it is certain; errors carry it.
        taken: The tag that was taken last.
        loose: The first difference from the family's documentation; see `ParsedCallText.loose`.
    """

    def __init__(self, completion: Completion, start: int, stop: int) -> None:
        self._completion = completion
        self._at = start
        self._stop = stop
        self.name: str | None = None
        self.taken: str | None = None
        self.loose = ""

    @property
    def tools(self) -> Tools:
        """JSON Schemas of the arguments, by tool name."""
        return self._completion.tools

    def reading(self, text: str, in_python: bool = False) -> Choice:
        """Return what a value written as plain text may be; see `typed_value.reading`.

        `in_python`: the family writes lists and objects as Python does. The chat template may show it, too.
        """
        return reading(text, lambda: in_python or self._completion.in_python())

    @property
    def schema(self) -> ToolSchema | None:
        """The schema of the called tool; None if the tool is unknown."""
        schema = None if self.name is None else self.tools.get(self.name)
        return None if schema is None else meaning(schema, self.name or "")

    def follows(self, text: str) -> bool:
        """Return whether `text`, which has no tag, comes next."""
        mark = self._next()
        return self._completion.text.startswith(text, self._at, self._stop if mark is None else mark.start)

    def error(self, reason: str) -> Malformed:
        """Return the error for a reason, to be raised."""
        return Malformed(reason, self.name)

    def mark_loose(self, reason: str) -> None:
        """Record that the call is loose; an empty reason records nothing."""
        self.loose = self.loose or reason

    def take_rest(self) -> str:
        """Take everything that is left, including tags."""
        text = self._completion.text[self._at : self._stop]
        self._at = self._stop
        return text

    def peek(self) -> str | None:
        """Return the next tag, without taking it; None if no tag is left."""
        mark = self._next()
        return None if mark is None else mark.tag

    def until_tag(self, *tags: str) -> str:
        """Take and return the text before the next tag, and take the tag, which must be one of `tags`.

        Raises:
            Malformed: The next tag is another one, or no tag is left.
        """
        mark = self._next()
        expected = " or ".join(tags)
        if mark is None:
            raise self.error(f"The call lacks {expected}.")
        if mark.tag not in tags:
            raise self.error(f"The call has {mark.tag} where {expected} belongs.")
        text = self._completion.text[self._at : mark.start]
        self._at, self.taken = mark.stop, mark.tag
        return text

    def until_text(self, text: str) -> str:
        """Take and return what comes before `text`, and take `text`, which is not a tag.

        Raises:
            Malformed: `text` does not come before the next tag.
        """
        mark = self._next()
        end = self._stop if mark is None else mark.start
        found = self._completion.text.find(text, self._at, end)
        if found < 0:
            before = self._completion.text[max(0, self._at - 20) : self._at]
            raise self.error(f"The call lacks {text!r} after {before!r}.")
        taken = self._completion.text[self._at : found]
        self._at = found + len(text)
        return taken

    def peek_here(self) -> str | None:
        """Return the tag at this character, without taking it; None if there is none."""
        mark = self._next()
        return mark.tag if mark is not None and mark.start == self._at else None

    def skip_blank(self) -> bool:
        """Take the blanks at this character; return whether there are any."""
        begin = self._at
        while self._at < self._stop and self._completion.text[self._at].isspace():
            self._at += 1
        return self._at > begin

    def skip(self, text: str) -> bool:
        """Take `text`, which is not a tag, if it comes next; return whether it does."""
        here = self._completion.text.startswith(text, self._at, self._stop) and self.peek_here() is None
        self._at += len(text) if here else 0
        return here

    def expect(self, text: str) -> None:
        """Take `text`, which is not a tag and must come next.

        Raises:
            Malformed: Something else comes next.
        """
        if not self.skip(text):
            raise self._unexpected(repr(text))

    def match(self, pattern: re.Pattern[str], what: str) -> str:
        """Take and return what a pattern matches here, before the next tag; `what` names it in the error.

        Raises:
            Malformed: The pattern does not match.
        """
        mark = self._next()
        found = pattern.match(self._completion.text, self._at, self._stop if mark is None else mark.start)
        if not found:
            raise self._unexpected(what)
        self._at = found.end()
        return found.group()

    def _unexpected(self, expected: str) -> Malformed:
        found = self._completion.text[self._at : min(self._stop, self._at + 20)]
        return self.error(f"The call {f'has {shortened(found)}' if found else 'ends'} where {expected} belongs.")

    def tag(self, *tags: str) -> None:
        """Take the next tag, which must be one of `tags`, with only blanks before it."""
        self.expect_blank(self.until_tag(*tags))

    def expect_end(self) -> None:
        """Take the rest, which must be blank."""
        self.expect_blank(self.take_rest())

    def expect_blank(self, text: str) -> None:
        """Check that a text is blank."""
        if text.strip():
            raise self.error(f"The call has stray text: {shortened(text)}.")

    def tool_name(self, name: str) -> str:
        """Check a tool's name, and keep it for later errors."""
        if not is_valid_name(name):
            raise self.error(f"The call has no valid tool name: {name[:60]!r}.")
        self.name = name
        return name

    def _next(self) -> Mark | None:
        mark = self._completion.next_mark(self._at)
        return mark if mark is not None and mark.stop <= self._stop else None
