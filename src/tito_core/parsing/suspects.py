"""Text that looks like a call: a spelled tag of the format, or a tool's name in call form."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from tito_core.parsing.completion import Completion, Tools
from tito_core.parsing.parsed import ParsedCall

_STRUCTURE = "<{[(=>]})"
_KEY = re.compile(r"""["'](?:arguments|parameters)["']?\s*:""")
_BEFORE, _AFTER = frozenset("\"'=[{<>|.:"), frozenset("\"'=[{<>|(")
UNMARKED = "It looks like a call, but has not the markup of one."


class Suspicion:
    """Finds such text. Stateless; one a format.

    Args:
        tags: The format's tags.
    """

    def __init__(self, tags: Iterable[str]) -> None:
        spelled = sorted(tags, key=len, reverse=True)
        self._tags = re.compile("|".join(map(re.escape, spelled))) if spelled else None

    def of(self, said: Completion, start: int, stop: int, reason: str = UNMARKED) -> tuple[ParsedCall, ...]:
        """Return the record of what looks so between two characters of a completion, or nothing."""
        found = self.find(said.text[start:stop], said.tools)
        return () if found is None else (said.suspect(start + found[0], start + found[1], reason, found[2]),)

    def find(self, text: str, tools: Tools) -> tuple[int, int, str | None] | None:
        """Find the first and one past the last character that look so, and the tool that is named; None for plain text.

        Time grows with the text, and with the number of tools only where the text has a call's punctuation.
        """
        if not any(map(text.__contains__, _STRUCTURE)):  # far faster than a regular expression
            return None
        found = [match.span() for match in self._tags.finditer(text)] if self._tags else []
        if '"' in text or "'" in text:
            found += [match.span() for match in _KEY.finditer(text)]
        name = None
        for tool in tools:
            places = list(_in_call_form(text, tool)) if tool in text else []
            name = name or (tool if places else None)
            found += places
        if not found:
            return None
        return min(start for start, _ in found), max(stop for _, stop in found), name


def _in_call_form(text: str, tool: str) -> Iterator[tuple[int, int]]:
    """Yield where a tool's name stands as a whole word with a call's punctuation on one side."""
    for match in re.finditer(rf"(?<!\w){re.escape(tool)}(?!\w)", text):
        start, stop = match.span()
        if text[start - 1 : start] in _BEFORE or text[stop : stop + 1] in _AFTER:
            yield start, stop
