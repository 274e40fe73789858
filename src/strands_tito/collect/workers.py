"""Where and how rollouts are run: here, in this process's event loop, or elsewhere."""

from __future__ import annotations

import asyncio
import gc
import traceback
from dataclasses import replace
from typing import Protocol, Unpack

from strands_tito.collect.agent import AgentCode, Factory, ParsedCallText, Run, annotate
from strands_tito.collect.errors import AgentError
from strands_tito.collect.rollout import Ended, Failure, Rollout
from tito_core.model import Policy, TITOModel
from tito_core.settings import RolloutOptions, Settings
from tito_core.termination import Outcome, Termination, record_termination, termination_of


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


BOUNDS = frozenset({Termination.TRUNCATED, Termination.CONTEXT, Termination.LIMIT})
"""Errors that end a rollout at one of its bounds: it is finished, and says something of the policy."""
LONGEST_TRACEBACK = 4000


async def play(policy: Policy, agent: AgentCode, rollout: Rollout, settings: Settings) -> Ended:
    """Run one rollout. Whatever the agent and the engine do, it ends; only cancellation comes out.

    Args:
        policy: Makes its model.
        agent: Runs it.
        rollout: Which one.
        settings: For its model. A seed among its sampling parameters is made into one of this rollout's own.
    """
    ledger = policy.ledger(group_id=rollout.group_id, task_id=rollout.task.id, user=rollout.user)
    model = TITOModel.with_settings(policy, ledger, _of_rollout(settings, rollout))
    error: BaseException | None = None
    try:
        outcome, said = await asyncio.create_task(_run(agent, model, rollout))  # which alone ends if it cancels itself
        if model.ledger is not ledger and len(model.ledger):
            raise AgentError("The run went on after model.reset(), with a second ledger: a rollout has one.")
        termination = annotate(ledger, said) or termination_of(outcome, ledger, context_limit=_context(model))
    except asyncio.CancelledError as cancelled:
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise  # the collection ends
        error, termination = cancelled, Termination.CANCELLED
    except Exception as raised:
        error, termination = raised, termination_of(raised, ledger, context_limit=_context(model))
    record_termination(ledger, termination)
    failed = error is not None and termination not in BOUNDS
    return Ended(rollout, ledger.seal(), termination, failure_of(error) if failed and error is not None else None)


async def _run(agent: AgentCode, model: TITOModel, rollout: Rollout) -> tuple[Outcome | None, ParsedCallText]:
    """Run the agent; what would end the event loop, such as `sys.exit(0)`, ends the rollout alone."""
    try:
        return await agent.run(model, rollout.task.value)
    except (SystemExit, GeneratorExit) as error:
        raise AgentError(f"The agent's code raised {error!r}, which ends its rollout only: raise an error.") from error


def _of_rollout(settings: Settings, rollout: Rollout) -> Settings:
    """Return settings with a seed of the rollout's own, where there is one."""
    sampling = settings.sampling
    if sampling.seed is None:
        return settings
    return replace(settings, sampling=sampling.model_copy(update={"seed": rollout.seed(sampling.seed)}))


def _context(model: TITOModel) -> int | None:
    return model.config.get("context_window_limit")


def failure_of(error: BaseException) -> Failure:
    """Keep what an error says, and the end of its traceback."""
    told = "".join(traceback.format_exception(error))
    return Failure(_writable(f"{type(error).__name__}: {_text(error)}"), _writable(told[-LONGEST_TRACEBACK:]))


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as other:  # of the user's own `__str__`
        return f"(its text cannot be shown: __str__ raised {type(other).__name__})"


def _writable(text: str) -> str:
    """Spell out what no file takes: half a character, as JSON's escapes may hold, and errors repeat."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


ROUNDS = 2_000, 10, 100
"""Thresholds of the three generations (`gc.set_threshold`); Python 3.11's own are 700, 10, 10."""


def fewer_rounds() -> None:
    """Look for garbage less often, and never again in what is loaded by now. Call it once, before the rollouts.

    With a thousand agents in memory a full round holds the event loop up for hundreds of milliseconds, and the usual
    thresholds start one every few hundred turns: in all a fifth of the CPU. What agents leave behind in cycles is still
    found, later.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*ROUNDS)
