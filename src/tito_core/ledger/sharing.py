"""One object for equal values that many turns of a ledger carry, and the turn that had it first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tito_core.ledger.strict import strict
from tito_core.ledger.turn import Draft, EngineRecord, Turn, VersionSpan

Server = tuple[str, ...]
"""Backend, model and semantics of an engine's record: what stays while the same server answers alike."""


class Sharing:
    """Interns the sampling parameters, servers and version names of one ledger."""

    def __init__(self) -> None:
        self._samplings: list[tuple[Any, Turn]] = []
        self._servers: dict[Server, Turn] = {}
        self._versions: dict[str | None, str | None] = {}

    def turn(self, index: int, draft: Draft, path_length: int, call_ids: int) -> Turn:
        """Make a turn of a draft, with the values that an earlier one has too. Only `keep` makes it an earlier one."""
        sampler = next((turn for known, turn in reversed(self._samplings) if known == draft.sampling), None)
        server = self._servers.get(_server(draft.engine))
        sampling = draft.sampling if sampler is None else sampler.draft.sampling
        shared = replace(draft, sampling=sampling, engine=self._engine(draft.engine, server))
        return Turn(
            index=index,
            draft=shared,
            path_length=path_length,
            sampling_of=index if sampler is None else sampler.index,
            server_of=index if server is None else server.index,
            call_ids=call_ids,
        )

    def keep(self, turn: Turn) -> None:
        """Let later turns share what this one is the first to have."""
        if turn.sampling_of == turn.index:
            self._samplings.append((strict(dict(turn.draft.sampling)), turn))
        if turn.server_of == turn.index:
            self._servers[_server(turn.draft.engine)] = turn

    def _engine(self, record: EngineRecord, server: Turn | None) -> EngineRecord:
        like = record if server is None else server.draft.engine
        spans = [VersionSpan(s.start, s.stop, self._versions.setdefault(s.version, s.version)) for s in record.versions]
        return EngineRecord(
            backend=like.backend,
            model=like.model,
            request_id=record.request_id,
            latency_s=record.latency_s,
            cached_tokens=record.cached_tokens,
            semantics=like.semantics,
            versions=tuple(spans),
        )


def _server(record: EngineRecord) -> Server:
    semantics = record.semantics
    parts = (semantics.processed, semantics.temperature, semantics.adjusted, semantics.source)
    return record.backend, record.model, *map(repr, parts)
