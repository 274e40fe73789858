"""Rollouts on the machines of a Ray cluster: actors run them, and this process alone writes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self, Unpack

import msgspec

from strands_tito.collect.agent import AgentCode
from strands_tito.collect.connection import Connection
from strands_tito.collect.errors import CollectError
from strands_tito.collect.rollout import Ended, Failure, Rollout
from strands_tito.collect.workers import InProcess, failure_of, fewer_rounds
from tito_core import store
from tito_core.backend.errors import BackendError
from tito_core.ledger.ledger import Ledger
from tito_core.settings import RolloutOptions, Settings
from tito_core.store import from_record
from tito_core.termination import Termination

LOCAL = "local"
TRIES = 5
"""How often a rollout is begun whose actor is lost, on another one where there is one."""
REST_S = 5.0
"""Seconds for which an actor that was lost gets nothing: Ray starts it again where it finds room."""
CLOSE_S = 10.0
"""Seconds for which the end waits for actors to close their connections."""


class OnRay:
    """Runs rollouts in actors of a Ray cluster, each with its own event loop and policy.

    Make one with `OnRay.start`. When an actor is lost, with its machine or alone, its rollouts are run again on others:
    none of them was written. Ray starts it again where there is room. Each machine must find the agent's module and the
    tokenizer by the same names.
    """

    def __init__(self, ray: Any, agent: AgentCode, *, is_ours: bool) -> None:
        self._ray, self._agent, self._is_ours = ray, agent, is_ours
        self._actors: list[Any] = []
        self._running: list[int] = []
        self._rests_until: list[float] = []

    @classmethod
    async def start(
        cls,
        address: str,
        connection: Connection,
        agent: str,
        *,
        actors: int | None = None,
        concurrency: int = 256,
        folder: Path | None = None,
        **options: Unpack[RolloutOptions],
    ) -> Self:
        """Connect to a cluster and start the actors.

        Args:
            address: Of the cluster, such as "auto" or "ray://head:10001"; "local" starts one on this machine.
            connection: How each actor connects its policy.
            agent: The agent as `module:function`.
            actors: How many, each on a CPU of its own; as many as the cluster has when None.
            concurrency: Rollouts at once, over all actors.
            folder: Where the agent's module is looked for first, here and on each machine.
            **options: For each rollout's model: see `RolloutOptions`.

        Raises:
            AgentError: There is no such agent.
            CollectError: Ray is not installed, there is no such cluster, or none with so many CPUs.
            BackendError, TokenizerError, TemplateError: An actor could not connect its policy.
        """
        if find_spec("ray") is None:
            raise CollectError("--ray needs Ray: pip install 'strands-tito[ray]'.")
        import ray

        code = AgentCode.of(agent, folder)
        Settings.of(**options)
        is_ours = not ray.is_initialized()
        if is_ours:
            await asyncio.to_thread(_join, ray, address)
        workers = cls(ray, code, is_ours=is_ours)
        try:
            workers._make(actors, concurrency, connection, agent, folder, dict(options))
            await asyncio.gather(*(workers._asked(actor.connect.remote()) for actor in workers._actors))
        except ray.exceptions.RayActorError as error:
            await workers.aclose()
            raise CollectError(f"An actor could not be made on a machine of the Ray cluster: {error}") from error
        except BaseException:
            await workers.aclose()
            raise
        return workers

    def _make(self, actors: int | None, concurrency: int, *arguments: Any) -> None:
        cpus = int(self._ray.cluster_resources().get("CPU", 0))
        count = actors or max(1, cpus)
        if count > cpus:  # Ray would wait for more without a word
            raise CollectError(f"{count} actors need a CPU each, and the Ray cluster has {cpus}.")
        # Beside rollouts an actor answers `connect` and `aclose`.
        at_once = -(-concurrency // count) + 2
        remote = self._ray.remote(num_cpus=1, max_restarts=-1, max_task_retries=0, max_concurrency=at_once)
        self._actors = [remote(RolloutActor).remote(*arguments) for _ in range(count)]
        self._running, self._rests_until = [0] * count, [0.0] * count

    @property
    def need_prompt(self) -> bool:
        """Whether each task must have a prompt."""
        return not self._agent.is_run

    async def play(self, rollout: Rollout) -> Ended:
        """Run one on the actor that has the fewest, and on another when that one is lost."""
        lost: Exception | None = None
        for _ in range(TRIES):
            number = await self._free()
            self._running[number] += 1
            try:
                answer: Answer = await self._asked(self._actors[number].play.remote(rollout))
            except self._losses() as error:
                lost, self._rests_until[number] = error, time.monotonic() + REST_S
                continue
            finally:
                self._running[number] -= 1
            ledger = from_record(msgspec.msgpack.decode(answer.ledger))
            return Ended(rollout, ledger, Termination(answer.termination), answer.failure)
        failure = Failure(f"Its actor was lost {TRIES} times: {lost}", "")
        return Ended(rollout, Ledger(), Termination.ABORTED, failure)

    def _losses(self) -> tuple[type[Exception], ...]:
        """Return Ray's errors of an actor, or of its answer on its way here, that went with a process or a machine."""
        errors = self._ray.exceptions
        return (
            errors.RayActorError,
            errors.ObjectLostError,  # a long answer stays on its machine until it is fetched
            errors.NodeDiedError,
            errors.OutOfMemoryError,
            errors.WorkerCrashedError,
        )

    async def _free(self) -> int:
        """Return the number of the actor that has the fewest rollouts; wait while all rest."""
        while True:
            now = time.monotonic()
            if up := [number for number, until in enumerate(self._rests_until) if until <= now]:
                return min(up, key=self._running.__getitem__)
            await asyncio.sleep(min(self._rests_until) - now)

    async def aclose(self) -> None:
        """End the actors, and leave the cluster where this has joined it."""
        ends = [self._asked(actor.aclose.remote()) for actor in self._actors]
        with suppress(TimeoutError):  # of one that is lost, and waits for room
            await asyncio.wait_for(asyncio.gather(*ends, return_exceptions=True), CLOSE_S)
        for actor in self._actors:
            self._ray.kill(actor)
        if self._is_ours:
            await asyncio.to_thread(self._ray.shutdown)

    async def _asked(self, reference: Any) -> Any:
        """Wait for an answer; the errors are those that came about there, not Ray's wrappers."""
        try:
            return await reference
        except asyncio.CancelledError:
            self._ray.cancel(reference)
            raise
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None


def _join(ray: Any, address: str) -> None:
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error", include_dashboard=False)
    except (ConnectionError, ValueError) as error:
        raise CollectError(f"No Ray cluster answers at {address!r}: {error}") from error


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
