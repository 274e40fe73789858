"""Counts of malformed calls in a dict that a user may hold, change and clear."""

from __future__ import annotations

import threading

from tito_core.turn.answer import ParseReport

UNKNOWN_TOOL = "unknown_tool"
"""The key of calls that do not name a tool for certain."""


class ParseErrors:
    """A dict of counts by tool, to which new errors are added. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._seen: dict[str, int] = {}
        self.is_shared = False

    def add(self, report: ParseReport) -> None:
        """Add the errors of a rollout's report that earlier reports did not have."""
        with self._lock:
            for tool, calls in report.tools.items():
                name, total = tool or UNKNOWN_TOOL, sum(calls.malformed.values())
                if new := total - self._seen.get(name, 0):
                    self._counts[name] = self._counts.get(name, 0) + new
                    self._seen[name] = total

    def share(self) -> dict[str, int]:
        """Return the dict; from now on the user may hold it."""
        self.is_shared = True
        return self._counts

    def replace(self, counts: dict[str, int]) -> None:
        """Continue in another dict."""
        with self._lock:
            self._counts, self.is_shared = counts, True

    def reset(self) -> None:
        """Start a new rollout with a new dict."""
        with self._lock:
            self._counts, self._seen, self.is_shared = {}, {}, False
