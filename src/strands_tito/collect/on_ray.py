"""Rollouts on a Ray cluster: Ray's actors run them."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self, Unpack

from strands_tito.collect.actors import CLOSE_S, ActorLostError, ActorResult, Actors, Connection, RolloutActor
from strands_tito.collect.rollout import AgentCode, CollectError, Rollout
from tito_core.ledger.errors import how_to_install
from tito_core.settings import RolloutOptions, Settings


class OnRay(Actors):
    """Runs rollouts in actors of a Ray cluster. Create one with `OnRay.start`.

    Ray restarts an actor that was lost where it finds resources. Every machine must have the agent's module and the
    tokenizer under the same names.
    """

    def __init__(self, ray: Any, agent: AgentCode, *, is_ours: bool) -> None:
        super().__init__(agent)
        self._ray, self._is_ours = ray, is_ours
        self._actors: list[Any] = []

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
        self._expect(count)

    async def _run_on(self, number: int, rollout: Rollout) -> ActorResult:
        try:
            answer: ActorResult = await self._await(self._actors[number].run.remote(rollout))
        except self._loss_errors() as error:
            raise ActorLostError(str(error)) from error
        return answer

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
