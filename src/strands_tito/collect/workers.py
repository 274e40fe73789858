"""Workers run rollouts: `InProcess` in this process's event loop, `on_ray.OnRay` on a cluster."""

from __future__ import annotations

import asyncio
import gc
import traceback
from dataclasses import replace
from typing import Protocol, Unpack

from strands_tito.collect.agent import AgentCode, Factory, Run, RunReturn, annotate
from strands_tito.collect.errors import AgentError
from strands_tito.collect.rollout import Failure, Rollout, RolloutResult
from tito_core.backend.errors import hidden, readable
from tito_core.model import Policy, TITOModel
from tito_core.settings import RolloutOptions, Settings
from tito_core.termination import Outcome, Termination, record_termination, termination_of


class Workers(Protocol):
    """Runs rollouts, many at once."""

    @property
    def need_prompt(self) -> bool:
        """Whether each task must have a prompt, because the agent is a factory."""

    async def run(self, rollout: Rollout) -> RolloutResult:
        """Run a rollout to its end and return its result; errors are part of the result. Cancellable."""

    async def aclose(self) -> None:
        """Release the workers' resources."""


class InProcess:
    """Runs rollouts as tasks of the running event loop.

    Args:
        policy: The policy, without a store: the collection writes finished rollouts itself.
        agent: `async def run(model, task)`, a factory of agents, or the name of either as `module:function`.
        **options: Options of each rollout's model; see `RolloutOptions`.

    Raises:
        AgentError: The agent was not found.
        ValueError: An option is invalid, or the policy has a store.
    """

    def __init__(
        self, policy: Policy, agent: AgentCode | str | Run | Factory, **options: Unpack[RolloutOptions]
    ) -> None:
        if policy.store is not None:
            raise ValueError(
                "The policy has a store: connect it without one, because the collection writes the finished rollouts."
            )
        self._settings = Settings.of(**options)
        self.policy = policy
        self.agent = agent if isinstance(agent, AgentCode) else AgentCode.of(agent)

    @property
    def need_prompt(self) -> bool:
        """Whether each task must have a prompt, because the agent is a factory."""
        return not self.agent.is_run

    async def run(self, rollout: Rollout) -> RolloutResult:
        """Run a rollout to its end."""
        return await run_rollout(self.policy, self.agent, rollout, self._settings)

    async def aclose(self) -> None:
        """Close the policy's connections."""
        await self.policy.backend.aclose()


BOUNDS = frozenset({Termination.TRUNCATED, Termination.CONTEXT, Termination.LIMIT})
"""Terminations by a limit. Such a rollout is finished, not failed, even if an error reported the limit."""
LONGEST_TRACEBACK = 4000


async def run_rollout(policy: Policy, agent: AgentCode, rollout: Rollout, settings: Settings) -> RolloutResult:
    """Run one rollout. Errors of the agent and the engine become part of the result; only a cancellation is raised.

    Args:
        policy: Makes the rollout's model.
        agent: The user's function.
        rollout: The rollout.
        settings: Settings of the model. A sampling seed is replaced by the rollout's own.
    """
    ledger = policy.ledger(group_id=rollout.group_id, task_id=rollout.task.id, user=rollout.user)
    model = TITOModel.with_settings(policy, ledger, _of_rollout(settings, rollout))
    error: BaseException | None = None
    try:
        # In a task of its own, so that an agent that cancels its task ends only itself.
        outcome, returned = await asyncio.create_task(_run(agent, model, rollout))
        if model.ledger is not ledger and len(model.ledger):
            raise AgentError(
                "The run sampled after model.reset(), into a second ledger. A rollout has one: do not reset."
            )
        termination = annotate(ledger, returned) or termination_of(outcome, ledger, context_limit=_context(model))
    except asyncio.CancelledError as cancelled:
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise  # the collection ends
        error, termination = cancelled, Termination.CANCELLED
    except Exception as raised:
        error, termination = raised, termination_of(raised, ledger, context_limit=_context(model))
    record_termination(ledger, termination)
    failed = error is not None and termination not in BOUNDS
    return RolloutResult(
        rollout, ledger.seal(), termination, failure_of(error) if failed and error is not None else None
    )


async def _run(agent: AgentCode, model: TITOModel, rollout: Rollout) -> tuple[Outcome | None, RunReturn]:
    """Run the agent; turn `sys.exit()`, which would end the event loop, into an error of this rollout."""
    try:
        return await agent.run(model, rollout.task.value)
    except (SystemExit, GeneratorExit) as error:
        raise AgentError(f"The agent's code raised {error!r}: raise an error to end a rollout, do not exit.") from error


def _of_rollout(settings: Settings, rollout: Rollout) -> Settings:
    """Return the settings with the seed, if any, replaced by the rollout's own."""
    sampling = settings.sampling
    if sampling.seed is None:
        return settings
    return replace(settings, sampling=sampling.model_copy(update={"seed": rollout.seed(sampling.seed)}))


def _context(model: TITOModel) -> int | None:
    return model.config.get("context_window_limit")


def failure_of(error: BaseException) -> Failure:
    """Return the message of an error and the end of its traceback."""
    text = "".join(traceback.format_exception(error))
    message = readable(_text(error))
    return Failure(_writable(f"{type(error).__name__}: {message}"), _writable(hidden(text)[-LONGEST_TRACEBACK:]))


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as other:  # raised by the user's own `__str__`
        return f"(its text cannot be shown: __str__ raised {type(other).__name__})"


def _writable(text: str) -> str:
    """Escape lone surrogates, which cannot be encoded as UTF-8; errors may quote them from JSON."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


GC_THRESHOLDS = 2_000, 10, 100
"""Thresholds of the three generations (`gc.set_threshold`); Python 3.11's own are 700, 10, 10."""


def tune_gc() -> None:
    """Run the garbage collector less often, and never on objects that exist now. Call it once, before the rollouts.

    With a thousand agents in memory a full collection blocks the event loop for hundreds of milliseconds, and the
    default thresholds start one every few hundred turns: a fifth of the CPU. Cycles that agents leave are still
    collected, but later.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
