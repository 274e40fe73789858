"""Rollouts in actors: processes with an event loop and a policy of their own. Only the process that starts them writes.

`Actors` chooses the actor of a rollout, and runs it again if its actor is lost. `Processes` and `OnRay` start them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from strands_tito.collect.rollout import AgentCode, Failure, Rollout, RolloutResult
from strands_tito.collect.run import InProcess, failure_of, tune_gc
from tito_core import store
from tito_core.backend.errors import BackendError
from tito_core.ledger.ledger import Ledger
from tito_core.model import Policy
from tito_core.store import from_record
from tito_core.termination import Termination

MAX_ATTEMPTS = 5
"""Attempts of a rollout whose actor is lost."""
RESTART_S = 5.0
"""Seconds without rollouts for a lost actor, while it is restarted."""
CLOSE_S = 10.0
"""Seconds that `aclose` waits for actors to abort their requests and close their connections."""


@dataclass(frozen=True, slots=True)
class Connection:
    """The arguments of `Policy.connect_async`, as plain values that can be sent to another process.

    Attributes:
        backend: Name of the backend.
        base_url: Address of the server, or of a router before several.
        tokenizer: Name or folder of the tokenizer, valid on every machine.
        parser: Name of the tool-call format.
        options: More arguments, such as `model` and `template_arguments`.
    """

    backend: str
    base_url: str
    tokenizer: str
    parser: str = "auto"
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)  # it may hold the API key

    async def connect(self) -> Policy:
        """Connect in this process.

        Raises:
            TokenizerError, TemplateError, UnknownBackendError, UnknownParserError, DetectionError, BackendError: As
                `Policy.connect_async`.
        """
        return await Policy.connect_async(
            backend=self.backend, base_url=self.base_url, tokenizer=self.tokenizer, parser=self.parser, **self.options
        )


class ActorLostError(Exception):
    """An actor, or a result of its, was lost with its process or machine."""


class Actors(ABC):
    """Runs rollouts in actors. If an actor is lost, its rollouts run again on the others, and it is restarted.

    Args:
        agent: The agent.
    """

    def __init__(self, agent: AgentCode) -> None:
        self._agent = agent
        self._expect(0)

    def _expect(self, count: int) -> None:
        """Set the number of actors."""
        self._running, self._available_at = [0] * count, [0.0] * count

    @property
    def need_prompt(self) -> bool:
        """Whether each task must have a prompt."""
        return not self._agent.is_run

    async def run(self, rollout: Rollout) -> RolloutResult:
        """Run a rollout on the least busy actor, and again on another one if that actor is lost."""
        lost: Exception | None = None
        for _ in range(MAX_ATTEMPTS):
            number = await self._pick_actor()
            self._running[number] += 1
            try:
                answer = await self._run_on(number, rollout)
            except ActorLostError as error:
                lost, self._available_at[number] = error, time.monotonic() + RESTART_S
                continue
            finally:
                self._running[number] -= 1
            ledger = from_record(msgspec.msgpack.decode(answer.ledger))
            return RolloutResult(rollout, ledger, Termination(answer.termination), answer.failure)
        failure = Failure(f"The rollout's actor was lost {MAX_ATTEMPTS} times, last with: {lost}", "")
        return RolloutResult(rollout, Ledger(), Termination.ABORTED, failure)

    async def _pick_actor(self) -> int:
        """Return the number of the least busy actor; wait while all are restarting."""
        while True:
            now = time.monotonic()
            if up := [number for number, until in enumerate(self._available_at) if until <= now]:
                return min(up, key=self._running.__getitem__)
            await asyncio.sleep(min(self._available_at) - now)

    @abstractmethod
    async def _run_on(self, number: int, rollout: Rollout) -> ActorResult:
        """Run a rollout on an actor; a cancellation reaches it.

        Raises:
            ActorLostError: The actor or the result was lost.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Stop the actors."""


@dataclass(frozen=True, slots=True)
class ActorResult:
    """A rollout's result, encoded for the process that writes.

    Attributes:
        ledger: The ledger, encoded.
        termination: Why the rollout ended.
        failure: Why the rollout failed, or None.
    """

    ledger: bytes
    termination: str
    failure: Failure | None


class RolloutActor:
    """The class of the actors. It does not import Ray.

    Args:
        connection: How to connect the policy.
        agent: The agent as `module:function`.
        folder: Put in front of `sys.path` for the agent's module.
        options: Options of each rollout's model; see `RolloutOptions`.
    """

    def __init__(self, connection: Connection, agent: str, folder: Path | None, options: Mapping[str, Any]) -> None:
        self._connection, self._options = connection, options
        self._agent = AgentCode.of(agent, folder)
        self._connected: asyncio.Task[InProcess] | None = None

    async def connect(self) -> None:
        """Connect the policy, once. After a restart of the actor the first rollout connects it."""
        await self._workers()

    async def run(self, rollout: Rollout) -> ActorResult:
        """Run a rollout. It fails if the actor was restarted and cannot connect to the server."""
        try:
            workers = await self._workers()
        except BackendError as error:
            return ActorResult(store.encode(Ledger()), Termination.ENGINE_ERROR.value, failure_of(error))
        result = await workers.run(rollout)
        return ActorResult(store.encode(result.ledger), result.termination.value, result.failure)

    async def aclose(self) -> None:
        """Abort running requests and close the connections."""
        if self._connected is not None and not _failed(self._connected):
            await (await self._connected).aclose()

    async def _workers(self) -> InProcess:
        if self._connected is None or _failed(self._connected):
            self._connected = asyncio.ensure_future(self._connect())
        return await asyncio.shield(self._connected)

    async def _connect(self) -> InProcess:
        workers = InProcess(await self._connection.connect(), self._agent, **self._options)
        tune_gc()  # the process runs nothing but this actor
        quiet_strands()
        return workers


def _failed(connecting: asyncio.Task[InProcess]) -> bool:
    return connecting.done() and (connecting.cancelled() or connecting.exception() is not None)


def quiet_strands() -> None:
    """Turn off Strands' log of each malformed call: no tool has the call's name."""
    logging.getLogger("strands.tools").setLevel(logging.CRITICAL)
