"""Find text that looks like a call: a spelled tag of the format, or a tool's name in call form."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Set

from tito_core.parsing.completion import Completion, Tools
from tito_core.parsing.json_call import after_blank
from tito_core.parsing.parsed import ParsedCall

_STRUCTURE = "<{[(=>]})"
_KEY = re.compile(r"""["'](?:arguments|parameters)["']?\s*:""")
_BEFORE, _AFTER = frozenset("\"'=[{<>|.:"), frozenset("\"'=[{<>|(")
UNMARKED = "It looks like a call, but lacks the markup of one."


class SuspectFinder:
    """Finds text that looks like a call of one format. Stateless.

    Args:
        tags: The format's tags.
    """

    def __init__(self, tags: Iterable[str]) -> None:
        spelled = sorted(tags, key=len, reverse=True)
        self._tags = re.compile("|".join(map(re.escape, spelled))) if spelled else None
        self._signs = (*_STRUCTURE, *(tag for tag in spelled if set(tag).isdisjoint(_STRUCTURE)))

    def records(self, completion: Completion, start: int, stop: int, reason: str = UNMARKED) -> tuple[ParsedCall, ...]:
        """Return a record of what looks like a call between two characters of a completion, or nothing."""
        found = self.find(completion.text[start:stop], completion.tools)
        if found is None:
            return ()
        first, last, name = found
        return (completion.suspect_record(start + first, start + last, reason, name),)

    def find(self, text: str, tools: Tools) -> tuple[int, int, str | None] | None:
        """Return the span of what looks like a call, as (first, one past last, tool name or None); None for plain text.

        Takes time linear in the text, and in the number of tools only if the text has a call's punctuation or a tag.
        """
        if not any(map(text.__contains__, self._signs)):  # far faster than a regular expression
            return None
        found = [match.span() for match in self._tags.finditer(text)] if self._tags else []
        after_tags = {after_blank(text, stop) for _, stop in found}
        if '"' in text or "'" in text:
            found += [match.span() for match in _KEY.finditer(text)]
        name = None
        for tool in tools:
            places = list(_in_call_form(text, tool, after_tags)) if tool in text else []
            name = name or (tool if places else None)
            found += places
        if not found:
            return None
        return min(start for start, _ in found), max(stop for _, stop in found), name


def _in_call_form(text: str, tool: str, after_tags: Set[int]) -> Iterator[tuple[int, int]]:
    """Yield the spans where a tool's name is a whole word after a tag, or next to a call's punctuation."""
    for match in re.finditer(rf"(?<!\w){re.escape(tool)}(?!\w)", text):
        start, stop = match.span()
        if start in after_tags or text[start - 1 : start] in _BEFORE or text[stop : stop + 1] in _AFTER:
            yield start, stop
