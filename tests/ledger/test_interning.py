"""Turns share equal sampling parameters and servers: one object that refers to the first turn that had it."""

from __future__ import annotations

from dataclasses import replace

from support.drafts import make_draft
from tito_core.ledger import Draft, Ledger, Sampling
from tito_core.ledger.turn import Server
from tito_core.store import from_json, to_json


def next_draft(ledger: Ledger, *, temperature: float, backend: str) -> Draft:
    parent = len(ledger) - 1 if len(ledger) else None
    draft = make_draft(parent, ledger.path_length(parent), [1], [2, 3])
    server = draft.engine.server
    engine = replace(draft.engine, server=Server(backend, server.model, server.semantics))
    return replace(draft, sampling=Sampling({"temperature": temperature}), engine=engine)


def test_equal_values_are_shared_after_a_reload() -> None:
    ledger = Ledger()
    ledger.commit(next_draft(ledger, temperature=1.0, backend="a"))
    ledger.commit(next_draft(ledger, temperature=0.5, backend="a"))  # other parameters, the same server
    ledger.commit(next_draft(ledger, temperature=0.5, backend="b"))  # the same parameters, another server
    again = from_json(to_json(ledger))
    for temperature, first in ((1.0, 0), (0.5, 1)):
        for backend, server in (("a", 0), ("b", 2)):
            turn = again.commit(next_draft(again, temperature=temperature, backend=backend))
            assert turn.draft.sampling is again[first].draft.sampling
            assert turn.draft.engine.server is again[server].draft.engine.server
            assert (turn.draft.sampling.first, turn.draft.engine.server.first) == (first, server)
