"""The pages of a site: the table of all rollouts, one rollout, and a comparison of two."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import suppress

from strands_tito.viewer.page import as_inert_json, page
from strands_tito.viewer.pictures import Pictures
from strands_tito.viewer.rescored import differences_at
from strands_tito.viewer.rollout import Data, Evidence, ledger_data
from strands_tito.viewer.rollouts import INDEXED, READ, Rollouts, read_rows
from strands_tito.viewer.token_text import TokenTexts
from tito_core.ledger.columns import Logprobs
from tito_core.ledger.ledger import Ledger
from tito_core.store import SchemaError

_STEP_S = 0.2
"""Longest time that one request for table rows reads ledgers, in seconds."""


class Site:
    """Makes pages on request, one at a time because tokenizers are not thread-safe.

    Args:
        rollouts: The rollouts to show.
        texts: Text of their tokens.
        pictures: Images of their prompts.
        rescoring: Backend and URL of a server that re-scores, or None.
        home: Path under which the first page is served; empty for pages in files.
    """

    def __init__(
        self,
        rollouts: Rollouts,
        texts: TokenTexts,
        pictures: Pictures,
        rescoring: tuple[str, str] | None = None,
        home: str = "",
    ) -> None:
        self._rollouts = rollouts
        self._texts = texts
        self._pictures = pictures
        self._rescoring = rescoring
        self._home = home
        self._lock = threading.Lock()

    def warm(self) -> None:
        """Start to load the first rollout's tokenizer in a thread, because loading takes seconds."""
        with suppress(IndexError, SchemaError):  # the rollout's page reports the error
            name = self._rollouts.load(1).header.tokenizer
            threading.Thread(target=self._load_tokenizer, args=(name,), daemon=True).start()

    def collection(self) -> bytes:
        """Return the page with the table of all rollouts."""
        self._rollouts.refresh()
        rows = self._rollouts.index_rows()
        data = {"title": self._rollouts.title, "home": self._home, "columns": INDEXED, "rows": rows}
        return self._page("collection", data)

    def rollout(self, number: int) -> bytes:
        """Return the page of one rollout.

        Raises:
            IndexError: Unknown number.
            SchemaError: Its ledger cannot be read.
        """
        with self._lock:
            data = self._data(number)
        return self._page("rollout", data | {"home": self._home, "rollouts": len(self._rollouts)})

    def comparison(self, left: int, right: int) -> bytes:
        """Return the page that compares two rollouts.

        Raises:
            IndexError: Unknown number.
            SchemaError: A ledger cannot be read.
        """
        with self._lock:
            sides = [self._data(number) for number in (left, right)]
        return self._page("compare", {"title": f"Rollouts {left} and {right}", "home": self._home, "sides": sides})

    def rows(self, start: int) -> bytes:
        """Return table rows as JSON from rollout `start` (counted from 0), as many as `_STEP_S` allows."""
        until = time.monotonic() + _STEP_S
        with self._lock:
            rows = read_rows(self._rollouts, start, self._texts, lambda: time.monotonic() > until)
        return as_inert_json({"columns": READ, "rows": rows})

    def _load_tokenizer(self, tokenizer: str | None) -> None:
        with self._lock:
            self._texts.of(tokenizer)

    def _page(self, view: str, data: Data) -> bytes:
        return page(view, data, is_served=bool(self._home))

    def _data(self, number: int) -> Data:
        ledger = self._rollouts.load(number)
        evidence = Evidence(
            self._texts.of(ledger.header.tokenizer), self._differences(ledger), self._pictures.of(ledger)
        )
        return ledger_data(ledger, evidence) | {"title": self._rollouts.name(number), "number": number}

    def _differences(self, ledger: Ledger) -> Mapping[int, Logprobs]:
        return differences_at(ledger, *self._rescoring) if self._rescoring is not None else {}
