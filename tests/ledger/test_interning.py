"""Equal values that many turns carry are one object, which knows the turn that had it first."""

from __future__ import annotations

from dataclasses import replace

from support.drafts import make_draft
from tito_core.ledger import Draft, Ledger, Sampling
from tito_core.ledger.turn import Server
from tito_core.store import from_json, to_json


def drawn(ledger: Ledger, *, temperature: float, backend: str) -> Draft:
    parent = len(ledger) - 1 if len(ledger) else None
    draft = make_draft(parent, ledger.path_length(parent), [1], [2, 3])
    said = draft.engine.server
    engine = replace(draft.engine, server=Server(backend, said.model, said.semantics))
    return replace(draft, sampling=Sampling({"temperature": temperature}), engine=engine)


def test_what_came_first_with_any_turn_is_shared_after_a_restart() -> None:
    ledger = Ledger()
    ledger.commit(drawn(ledger, temperature=1.0, backend="a"))
    ledger.commit(drawn(ledger, temperature=0.5, backend="a"))  # other parameters, the same server
    ledger.commit(drawn(ledger, temperature=0.5, backend="b"))  # the same parameters, another server
    again = from_json(to_json(ledger))
    for temperature, first in ((1.0, 0), (0.5, 1)):
        for backend, server in (("a", 0), ("b", 2)):
            turn = again.commit(drawn(again, temperature=temperature, backend=backend))
            assert turn.draft.sampling is again[first].draft.sampling
            assert turn.draft.engine.server is again[server].draft.engine.server
            assert (turn.draft.sampling.first, turn.draft.engine.server.first) == (first, server)
