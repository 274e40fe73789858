"""What runs on a machine of a Ray cluster: rollouts in one event loop, over one policy."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tito_core import store
from tito_core.backend.errors import BackendError
from tito_core.collect.agent import AgentCode
from tito_core.collect.connection import Connection
from tito_core.collect.garbage import fewer_rounds
from tito_core.collect.play import failure_of
from tito_core.collect.rollout import Failure, Rollout
from tito_core.collect.workers import InProcess
from tito_core.ledger.ledger import Ledger
from tito_core.termination import Termination


@dataclass(frozen=True, slots=True)
class Answer:
    """How a rollout ended, for the process that writes.

    Attributes:
        ledger: Its ledger, encoded.
        termination: Why it ended.
        failure: Why it failed, or None.
    """

    ledger: bytes
    termination: str
    failure: Failure | None


class RolloutActor:
    """One of the actors; it knows nothing of Ray, and Ray makes an actor of it.

    Args:
        connection: How to connect its policy.
        agent: The agent as `module:function`.
        folder: Where its module is looked for first.
        options: For each rollout's model: see `RolloutOptions`.
    """

    def __init__(self, connection: Connection, agent: str, folder: Path | None, options: Mapping[str, Any]) -> None:
        self._connection, self._options = connection, options
        self._agent = AgentCode.of(agent, folder)
        self._connected: asyncio.Task[InProcess] | None = None

    async def connect(self) -> None:
        """Connect its policy, once; after a restart the first rollout does."""
        await self._workers()

    async def play(self, rollout: Rollout) -> Answer:
        """Run a rollout. It fails where the actor was started again and the server does not answer it by then."""
        try:
            workers = await self._workers()
        except BackendError as error:
            return Answer(store.encode(Ledger()), Termination.ENGINE_ERROR.value, failure_of(error))
        ended = await workers.play(rollout)
        return Answer(store.encode(ended.ledger), ended.termination.value, ended.failure)

    async def aclose(self) -> None:
        """Close its connections; what its engine still works on is aborted."""
        if self._connected is not None and not _failed(self._connected):
            await (await self._connected).aclose()

    async def _workers(self) -> InProcess:
        if self._connected is None or _failed(self._connected):
            self._connected = asyncio.ensure_future(self._connect())
        return await asyncio.shield(self._connected)

    async def _connect(self) -> InProcess:
        workers = InProcess(await self._connection.connect(), self._agent, **self._options)
        fewer_rounds()  # an actor's process does nothing else
        return workers


def _failed(connecting: asyncio.Task[InProcess]) -> bool:
    return connecting.done() and (connecting.cancelled() or connecting.exception() is not None)
