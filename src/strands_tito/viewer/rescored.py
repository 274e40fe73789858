"""Differences between recorded logprobs and the engine's scores, token by token."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import fields

from strands_tito.inspect.verify import connect_for_scoring, rescore
from tito_core.backend.protocol import Backend
from tito_core.ledger.columns import Logprobs
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.turn import Draft, Turn


def differences_at(ledger: Ledger, backend: str, base_url: str) -> Mapping[int, Logprobs]:
    """Connect to a server and return `differences`.

    Args:
        ledger: The ledger.
        backend: Name of the server's backend.
        base_url: Address of a server with the weights that sampled the ledger.

    Raises:
        BackendError: Scoring failed.
        UnknownBackendError: Unknown backend.
    """

    async def connect_and_score() -> Mapping[int, Logprobs]:
        engine = await connect_for_scoring(backend, base_url)
        try:
            return await differences(ledger, engine)
        finally:
            await engine.aclose()

    return asyncio.run(connect_and_score())


async def differences(ledger: Ledger, engine: Backend) -> dict[int, Logprobs]:
    """Return |recorded - re-scored| of each output token in nats, by turn. Turns that cannot be compared are left out.

    Raises:
        BackendError: Scoring failed.
    """
    found: dict[int, Logprobs] = {}
    for leaf in ledger.leaves():
        found |= await _path_differences(ledger, ledger.path(leaf), engine)
    return found


async def _path_differences(ledger: Ledger, path: list[Turn], engine: Backend) -> dict[int, Logprobs]:
    """Score one path as a ledger of its own, so that the differences come in the order of its turns."""
    drafts = [_with_parent(turn.draft, number - 1 if number else None) for number, turn in enumerate(path)]
    scored = await rescore(Ledger.load(ledger.header, drafts, (), ledger.images.values()), engine)
    compared = [turn for turn in path if turn.draft.engine.semantics.comparable_with_scoring()]
    if len(scored.differences) != sum(turn.draft.columns.output for turn in compared):
        return {}  # the context is too long for the server
    found, at = {}, 0
    for turn in compared:
        found[turn.index] = scored.differences[at : at + turn.draft.columns.output]
        at += turn.draft.columns.output
    return found


def _with_parent(draft: Draft, parent: int | None) -> Draft:
    """Copy a draft with another parent. `dataclasses.replace` cannot: a draft read from a file has its own type."""
    return Draft(
        **{field.name: getattr(draft, field.name) for field in fields(Draft)} | {"parent": parent, "branch": None}
    )
