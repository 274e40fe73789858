"""What the engine itself says of recorded logprobs, token by token."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import fields

from strands_tito.inspect.verify import connect_for_scoring, rescore
from tito_core.backend.protocol import Backend
from tito_core.ledger.columns import Logprobs
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.turn import Draft, Turn


def rescored(ledger: Ledger, backend: str, base_url: str) -> Mapping[int, Logprobs]:
    """Connect to a server, and return `differences`.

    Args:
        ledger: The ledger.
        backend: Backend of the server.
        base_url: A server with the weights that sampled.

    Raises:
        BackendError: The server cannot be asked.
        UnknownBackendError: There is no such backend.
    """

    async def ask() -> Mapping[int, Logprobs]:
        engine = await connect_for_scoring(backend, base_url)
        try:
            return await differences(ledger, engine)
        finally:
            await engine.aclose()

    return asyncio.run(ask())


async def differences(ledger: Ledger, engine: Backend) -> dict[int, Logprobs]:
    """Return |recorded - re-scored| of each output token in nats, by turn; turns that cannot be compared are left out.

    Raises:
        BackendError: The server cannot be asked.
    """
    found: dict[int, Logprobs] = {}
    for leaf in ledger.leaves():
        found |= await _of_path(ledger, ledger.path(leaf), engine)
    return found


async def _of_path(ledger: Ledger, path: list[Turn], engine: Backend) -> dict[int, Logprobs]:
    """Score one path as a ledger of its own, whose differences then lie in the order of its turns."""
    drafts = [_following(turn.draft, place - 1 if place else None) for place, turn in enumerate(path)]
    scored = await rescore(Ledger.load(ledger.header, drafts, ()), engine)
    compared = [turn for turn in path if turn.draft.engine.semantics.comparable_with_scoring()]
    if len(scored.differences) != sum(turn.draft.columns.output for turn in compared):
        return {}  # the server takes no context of this length
    found, at = {}, 0
    for turn in compared:
        found[turn.index] = scored.differences[at : at + turn.draft.columns.output]
        at += turn.draft.columns.output
    return found


def _following(draft: Draft, parent: int | None) -> Draft:
    """Return a draft with another parent; one that was read from a file is of a type of its own."""
    return Draft(
        **{field.name: getattr(draft, field.name) for field in fields(Draft)} | {"parent": parent, "branch": None}
    )
