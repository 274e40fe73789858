"""What the engine itself says of recorded logprobs, token by token."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

from tito_core.backend.protocol import Backend
from tito_core.ledger.columns import Logprobs
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.turn import Turn
from tito_core.verify import connect_for_scoring, rescore


def differences(ledger: Ledger, backend: str, base_url: str) -> Mapping[int, Logprobs]:
    """Return |recorded - re-scored| of each output token in nats, by turn; turns that cannot be compared are left out.

    Args:
        ledger: The ledger.
        backend: Backend of the server.
        base_url: A server with the weights that sampled.

    Raises:
        BackendError: The server cannot be asked.
    """
    return asyncio.run(_differences(ledger, backend, base_url))


async def _differences(ledger: Ledger, backend: str, base_url: str) -> dict[int, Logprobs]:
    engine = await connect_for_scoring(backend, base_url)
    found: dict[int, Logprobs] = {}
    try:
        for leaf in ledger.leaves():
            found |= await _of_path(ledger, ledger.path(leaf), engine)
    finally:
        await engine.aclose()
    return found


async def _of_path(ledger: Ledger, path: list[Turn], engine: Backend) -> dict[int, Logprobs]:
    """Score one path as a ledger of its own, whose differences then lie in the order of its turns."""
    drafts = [replace(turn.draft, parent=place - 1 if place else None, branch=None) for place, turn in enumerate(path)]
    scored = await rescore(Ledger.load(ledger.header, drafts, ()), engine)
    compared = [turn for turn in path if turn.draft.engine.semantics.comparable_with_scoring()]
    if len(scored.differences) != sum(turn.draft.columns.output for turn in compared):
        return {}  # the server takes no context of this length
    found, at = {}, 0
    for turn in compared:
        found[turn.index] = scored.differences[at : at + turn.draft.columns.output]
        at += turn.draft.columns.output
    return found
