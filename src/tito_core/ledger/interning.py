"""Values that the turns of a ledger share: tool-call ids, and one object for equal parameters, servers and names."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any

from tito_core.ledger.json_equality import strict
from tito_core.ledger.turn import NEW_AGENT, Draft, Sampling, Server, Turn, VersionSpan


class CallIds:
    """Generates tool-call ids, unique within a ledger. Thread-safe.

    Args:
        uuid: Identity of the ledger. Every id contains its first eight characters.
        given: Number of ids that were generated before.
    """

    def __init__(self, uuid: str, given: int = 0) -> None:
        self._prefix = f"call_{uuid[:8]}_"
        self._given = given
        self._lock = threading.Lock()

    @property
    def given(self) -> int:
        """Number of ids that were generated."""
        return self._given

    def next(self) -> str:
        """Return the next id."""
        return f"{self._prefix}{self._take()}"

    @contextmanager
    def for_turn(self) -> Iterator[Callable[[], str]]:
        """Yield a function that generates a turn's ids. If the turn fails, its ids become available again (law 5).

        If another turn took a later id meanwhile, the earlier ids stay unused, since no id may be used twice.
        """
        taken: list[int] = []

        def take() -> str:
            taken.append(self._take())
            return f"{self._prefix}{taken[-1]}"

        try:
            yield take
        except BaseException:
            with self._lock:
                while taken and taken.pop() == self._given:
                    self._given -= 1
            raise

    def _take(self) -> int:
        with self._lock:
            self._given += 1
            return self._given


class Interner:
    """Interns the sampling parameters, servers, version names and agents of one ledger, under the ledger's lock."""

    def __init__(self) -> None:
        self._samplings: list[tuple[Any, Sampling]] = []
        self._servers: dict[tuple[Any, ...], Server] = {}
        self._versions: dict[str | None, str | None] = {}
        self._agents: dict[str, str] = {}

    def intern(self, draft: Draft, index: int, call_ids: int) -> Draft:
        """Return a draft as turn `index` will hold it, with interned values. `register` adds its new ones."""
        parameters = draft.sampling.parameters
        known = next((sampling for value, sampling in reversed(self._samplings) if value == parameters), None)
        server = self._servers.get(_key(draft.engine.server))
        if server is None:
            server = Server(
                draft.engine.server.backend, draft.engine.server.model, draft.engine.server.semantics, index
            )
        record, version = draft.engine, self._versions.setdefault
        spans = [VersionSpan(span.start, span.stop, version(span.version, span.version)) for span in record.versions]
        engine = replace(record, server=server, versions=tuple(spans), responses=tuple(record.responses))
        sampling = Sampling(_copy(parameters), index) if known is None else known
        extras = dict(draft.extras)  # the caller may change its own dict
        agent = f"agent-{index}" if draft.agent == NEW_AGENT else draft.agent
        agent = None if agent is None else self._agents.setdefault(agent, agent)
        return replace(draft, sampling=sampling, engine=engine, call_ids=call_ids, extras=extras, agent=agent)

    def register(self, turn: Turn) -> None:
        """Register the values that this turn is the first to have, so that later turns share them."""
        sampling, server = turn.draft.sampling, turn.draft.engine.server
        if sampling.first == turn.index:
            self._samplings.append((strict(sampling.parameters), sampling))
        if server.first == turn.index:
            self._servers[_key(server)] = server


def _copy(parameters: Any) -> Any:
    try:
        return deepcopy(parameters)
    except RecursionError:
        raise ValueError("The sampling parameters are nested too deeply to be stored; flatten the schema.") from None


def _key(server: Server) -> tuple[Any, ...]:
    semantics = server.semantics
    values = (semantics.processed, semantics.temperature, semantics.adjusted)
    # The types are part of the key, since 1 == 1.0 == True.
    return server.backend, server.model, semantics.source, *values, *map(type, values)
