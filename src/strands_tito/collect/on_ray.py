"""Rollouts on a Ray cluster: actors run them, only this process writes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self, Unpack

import msgspec

from strands_tito.collect.rollout import AgentCode, CollectError, Failure, Rollout, RolloutResult
from strands_tito.collect.run import InProcess, failure_of, tune_gc
from tito_core import store
from tito_core.backend.errors import BackendError
from tito_core.ledger.errors import how_to_install
from tito_core.ledger.ledger import Ledger
from tito_core.model import Policy
from tito_core.settings import RolloutOptions, Settings
from tito_core.store import from_record
from tito_core.termination import Termination


@dataclass(frozen=True, slots=True)
class Connection:
    """The arguments of `Policy.connect_async`, as plain values that can be sent to another process.

    Attributes:
        backend: Name of the backend.
        base_url: Address of the server, or addresses of several equal ones.
        tokenizer: Name or folder of the tokenizer, valid on every machine.
        parser: Name of the tool-call format.
        options: More arguments, such as `model` and `template_arguments`.
    """

    backend: str
    base_url: str | tuple[str, ...]
    tokenizer: str
    parser: str = "auto"
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)  # it may hold the API key

    async def connect(self) -> Policy:
        """Connect in this process.

        Raises:
            TokenizerError, TemplateError, UnknownBackendError, UnknownParserError, DetectionError, BackendError: As
                `Policy.connect_async`.
        """
        url = self.base_url if isinstance(self.base_url, str) else list(self.base_url)
        return await Policy.connect_async(
            backend=self.backend, base_url=url, tokenizer=self.tokenizer, parser=self.parser, **self.options
        )


LOCAL = "local"
MAX_ATTEMPTS = 5
"""Attempts of a rollout whose actor is lost."""
RESTART_S = 5.0
"""Seconds without rollouts for a lost actor, while Ray restarts it."""
CLOSE_S = 10.0
"""Seconds that `aclose` waits for actors to close their connections."""


class OnRay:
    """Runs rollouts in actors of a Ray cluster, each with its own event loop and policy.

    Create one with `OnRay.start`. If an actor or its machine is lost, its rollouts run again on other actors, and Ray
    restarts the actor where it finds resources. Every machine must have the agent's module and the tokenizer under the
    same names.
    """

    def __init__(self, ray: Any, agent: AgentCode, *, is_ours: bool) -> None:
        self._ray, self._agent, self._is_ours = ray, agent, is_ours
        self._actors: list[Any] = []
        self._running: list[int] = []
        self._available_at: list[float] = []

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
            address: Address of the cluster, such as "auto" or "ray://head:10001"; "local" starts one on this machine.
            connection: How each actor connects its policy.
            agent: The agent as `module:function`.
            actors: Number of actors, one CPU each; the cluster's number of CPUs when None.
            concurrency: Rollouts at once, over all actors.
            folder: Put in front of `sys.path` for the agent's module, here and on each machine.
            **options: Options of each rollout's model; see `RolloutOptions`.

        Raises:
            AgentError: The agent was not found.
            CollectError: Ray is not installed, or no cluster answers, or it has too few CPUs.
            BackendError, TokenizerError, TemplateError: An actor could not connect its policy.
        """
        if find_spec("ray") is None:
            raise CollectError(f"--ray needs Ray: {how_to_install('ray')}.")
        import ray

        code = AgentCode.of(agent, folder)
        Settings.of(**options)
        is_ours = not ray.is_initialized()
        if is_ours:
            await asyncio.to_thread(_join, ray, address)
        workers = cls(ray, code, is_ours=is_ours)
        try:
            workers._make(actors, concurrency, connection, agent, folder, dict(options))
            await asyncio.gather(*(workers._await(actor.connect.remote()) for actor in workers._actors))
        except ray.exceptions.RayActorError as error:
            await workers.aclose()
            raise CollectError(f"The Ray cluster could not start an actor: {error}") from error
        except BaseException:
            await workers.aclose()
            raise
        return workers

    def _make(self, actors: int | None, concurrency: int, *arguments: Any) -> None:
        cpus = int(self._ray.cluster_resources().get("CPU", 0))
        count = actors or max(1, cpus)
        if count > cpus:  # Ray would silently wait for more CPUs
            raise CollectError(f"{count} actors need one CPU each, but the Ray cluster has {cpus}: lower --ray-actors.")
        # Two more calls for `connect` and `aclose`.
        at_once = -(-concurrency // count) + 2
        remote = self._ray.remote(num_cpus=1, max_restarts=-1, max_task_retries=0, max_concurrency=at_once)
        self._actors = [remote(RolloutActor).remote(*arguments) for _ in range(count)]
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
                answer: ActorResult = await self._await(self._actors[number].run.remote(rollout))
            except self._loss_errors() as error:
                lost, self._available_at[number] = error, time.monotonic() + RESTART_S
                continue
            finally:
                self._running[number] -= 1
            ledger = from_record(msgspec.msgpack.decode(answer.ledger))
            return RolloutResult(rollout, ledger, Termination(answer.termination), answer.failure)
        failure = Failure(f"The rollout's actor was lost {MAX_ATTEMPTS} times, last with: {lost}", "")
        return RolloutResult(rollout, Ledger(), Termination.ABORTED, failure)

    def _loss_errors(self) -> tuple[type[Exception], ...]:
        """Return Ray's errors for an actor or a result that was lost with its process or machine."""
        errors = self._ray.exceptions
        return (
            errors.RayActorError,
            errors.ObjectLostError,  # a large result stays on its machine until it is fetched
            errors.NodeDiedError,
            errors.OutOfMemoryError,
            errors.WorkerCrashedError,
        )

    async def _pick_actor(self) -> int:
        """Return the number of the least busy actor; wait while all are restarting."""
        while True:
            now = time.monotonic()
            if up := [number for number, until in enumerate(self._available_at) if until <= now]:
                return min(up, key=self._running.__getitem__)
            await asyncio.sleep(min(self._available_at) - now)

    async def aclose(self) -> None:
        """Stop the actors, and disconnect from the cluster if `start` connected to it."""
        ends = [self._await(actor.aclose.remote()) for actor in self._actors]
        with suppress(TimeoutError):  # an actor may be lost and waiting for resources
            await asyncio.wait_for(asyncio.gather(*ends, return_exceptions=True), CLOSE_S)
        for actor in self._actors:
            self._ray.kill(actor)
        if self._is_ours:
            await asyncio.to_thread(self._ray.shutdown)

    async def _await(self, reference: Any) -> Any:
        """Wait for a result; raise the actor's own error instead of Ray's wrapper."""
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
        return workers


def _failed(connecting: asyncio.Task[InProcess]) -> bool:
    return connecting.done() and (connecting.cancelled() or connecting.exception() is not None)
