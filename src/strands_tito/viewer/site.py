"""The pages of some rollouts: one for all of them, one for each, one for two beside each other."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import suppress

from strands_tito.viewer.page import as_inert_json, page
from strands_tito.viewer.pictures import Pictures
from strands_tito.viewer.rescored import rescored
from strands_tito.viewer.rollout import Data, Evidence, ledger_data
from strands_tito.viewer.rollouts import INDEXED, READ, Rollouts, read_rows
from strands_tito.viewer.token_text import TokenTexts
from tito_core.ledger.columns import Logprobs
from tito_core.ledger.ledger import Ledger
from tito_core.store import SchemaError

_STEP_S = 0.2
"""How long ledgers are read for one step of a table, in seconds."""


class Site:
    """Pages, made when they are asked for. One at a time: tokenizers are not made to be shared.

    Args:
        rollouts: What they show.
        texts: What their tokens stand for.
        pictures: Pictures that they may show.
        rescoring: Backend and URL of a server that re-scores, or None.
        home: Where the page of all of them is served; empty for pages in files.
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
        """Begin to load the first rollout's tokenizer, which takes seconds, before its page is asked for."""
        with suppress(IndexError, SchemaError):  # its page, if anybody asks for it, says so
            name = self._rollouts.load(1).header.tokenizer
            threading.Thread(target=self._load, args=(name,), daemon=True).start()

    def all(self) -> bytes:
        """Return the page of all rollouts."""
        self._rollouts.refresh()
        rows = self._rollouts.index_rows()
        data = {"title": self._rollouts.title, "home": self._home, "columns": INDEXED, "rows": rows}
        return self._page("collection", data)

    def one(self, number: int) -> bytes:
        """Return the page of one rollout.

        Raises:
            IndexError, SchemaError: It cannot be had.
        """
        with self._lock:
            data = self._data(number)
        return self._page("rollout", data | {"home": self._home, "rollouts": len(self._rollouts)})

    def two(self, left: int, right: int) -> bytes:
        """Return the page of two rollouts.

        Raises:
            IndexError, SchemaError: One cannot be had.
        """
        with self._lock:
            sides = [self._data(number) for number in (left, right)]
        return self._page("compare", {"title": f"Rollouts {left} and {right}", "home": self._home, "sides": sides})

    def facts(self, start: int) -> bytes:
        """Return, as JSON, what ledgers say from rollout `start` on, counted from 0: as many as take a moment."""
        until = time.monotonic() + _STEP_S
        with self._lock:
            rows = read_rows(self._rollouts, start, self._texts, lambda: time.monotonic() > until)
        return as_inert_json({"columns": READ, "rows": rows})

    def _load(self, tokenizer: str | None) -> None:
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
        return rescored(ledger, *self._rescoring) if self._rescoring is not None else {}
