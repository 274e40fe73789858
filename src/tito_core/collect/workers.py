"""Where rollouts are run: here, in this process's event loop, or elsewhere."""

from __future__ import annotations

from typing import Protocol, Unpack

from tito_core.collect.agent import AgentCode, Factory, Run
from tito_core.collect.play import play
from tito_core.collect.rollout import Ended, Rollout
from tito_core.model import Policy
from tito_core.settings import RolloutOptions, Settings


class Workers(Protocol):
    """Runs rollouts, many at once."""

    @property
    def need_prompt(self) -> bool:
        """Whether each task must have a prompt, which the agent is asked."""

    async def play(self, rollout: Rollout) -> Ended:
        """Run one to its end, whatever it is; a cancelled one leaves nothing behind."""

    async def aclose(self) -> None:
        """End what belongs to it."""


class InProcess:
    """Runs rollouts as tasks of the running event loop.

    Args:
        policy: The policy, without a store: rollouts are written once they are finished.
        agent: `async def run(model, task)`, a factory of agents, or the name of either as `module:function`.
        **options: For each rollout's model: see `RolloutOptions`.

    Raises:
        AgentError: There is no such agent.
        ValueError: A bad option, or a policy with a store.
    """

    def __init__(
        self, policy: Policy, agent: AgentCode | str | Run | Factory, **options: Unpack[RolloutOptions]
    ) -> None:
        if policy.store is not None:
            raise ValueError(
                "Connect the policy without a store: the collection writes each rollout once it is finished."
            )
        self._settings = Settings.of(**options)
        self.policy = policy
        self.agent = agent if isinstance(agent, AgentCode) else AgentCode.of(agent)

    @property
    def need_prompt(self) -> bool:
        """Whether each task must have a prompt."""
        return not self.agent.is_run

    async def play(self, rollout: Rollout) -> Ended:
        """Run one."""
        return await play(self.policy, self.agent, rollout, self._settings)

    async def aclose(self) -> None:
        """Close the policy's connections."""
        await self.policy.backend.aclose()
