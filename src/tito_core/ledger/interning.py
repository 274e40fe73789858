"""What a ledger gives its turns: ids for their calls, and one object for equal values, which knows its first turn."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any

from tito_core.ledger.json_equality import strict
from tito_core.ledger.turn import Draft, EngineRecord, Sampling, Server, Turn, VersionSpan


class CallIds:
    """Counts them. Threads may share it.

    Args:
        uuid: Identity of the ledger, whose first eight characters every id carries.
        given: How many were given out before.
    """

    def __init__(self, uuid: str, given: int = 0) -> None:
        self._prefix = f"call_{uuid[:8]}_"
        self._given = given
        self._lock = threading.Lock()

    @property
    def given(self) -> int:
        """How many were given out."""
        return self._given

    def next(self) -> str:
        """Return the next one."""
        return f"{self._prefix}{self._take()}"

    @contextmanager
    def of_a_turn(self) -> Iterator[Callable[[], str]]:
        """Yield what gives out those of a turn; when the turn is lost they are given out again (law 5).

        Where another turn took one meanwhile, those before it stay unused: no id may be given twice.
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


class Sharing:
    """Interns the sampling parameters, servers and version names of one ledger."""

    def __init__(self) -> None:
        self._samplings: list[tuple[Any, Sampling]] = []
        self._servers: dict[tuple[Any, ...], Server] = {}
        self._versions: dict[str | None, str | None] = {}

    def shared(self, draft: Draft, index: int, call_ids: int) -> Draft:
        """Return a draft as turn `index` will hold it. Only `keep` makes its own values ones that others share."""
        parameters = draft.sampling.parameters
        known = next((sampling for value, sampling in reversed(self._samplings) if value == parameters), None)
        server = self._servers.get(_key(draft.engine.server))
        if server is None:
            server = Server(
                draft.engine.server.backend, draft.engine.server.model, draft.engine.server.semantics, index
            )
        said, version = draft.engine, self._versions.setdefault
        spans = [VersionSpan(span.start, span.stop, version(span.version, span.version)) for span in said.versions]
        engine = EngineRecord(
            server, said.request_id, said.latency_s, said.cached_tokens, tuple(spans), tuple(said.responses)
        )
        sampling = Sampling(_copy(parameters), index) if known is None else known
        extras = dict(draft.extras)  # not the caller's own, who may change it
        return replace(draft, sampling=sampling, engine=engine, call_ids=call_ids, extras=extras)

    def keep(self, turn: Turn) -> None:
        """Let later turns share what this one is the first to have."""
        sampling, server = turn.draft.sampling, turn.draft.engine.server
        if sampling.first == turn.index:
            self._samplings.append((strict(sampling.parameters), sampling))
        if server.first == turn.index:
            self._servers[_key(server)] = server


def _copy(parameters: Any) -> Any:
    try:
        return deepcopy(parameters)
    except RecursionError:
        raise ValueError("The sampling parameters are nested too deeply to be kept; flatten the schema.") from None


def _key(server: Server) -> tuple[Any, ...]:
    semantics = server.semantics
    said = (semantics.processed, semantics.temperature, semantics.adjusted)
    return server.backend, server.model, semantics.source, *said, *map(type, said)  # 1, 1.0 and True are three
