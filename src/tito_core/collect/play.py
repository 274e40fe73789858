"""One rollout, from its model to its ledger's last annotation."""

from __future__ import annotations

import asyncio
import traceback
from dataclasses import replace

from tito_core.collect.agent import AgentCode, Said, annotate
from tito_core.collect.errors import AgentError
from tito_core.collect.rollout import Ended, Failure, Rollout
from tito_core.model import Policy, TITOModel
from tito_core.settings import Settings
from tito_core.termination import Outcome, Termination, record_termination, termination_of

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


async def _run(agent: AgentCode, model: TITOModel, rollout: Rollout) -> tuple[Outcome | None, Said]:
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
