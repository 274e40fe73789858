"""Why a rollout ended: one word for it, derived from what an invocation gave, and kept in the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from enum import StrEnum
from typing import Protocol

from tito_core.ledger.ledger import Ledger
from tito_core.ledger.turn import Finish

ANNOTATION = "termination"
"""Name of the ledger's annotation."""


class Termination(StrEnum):
    """Why a rollout ended. Each trainer's status follows from it by a rule of the exporter."""

    COMPLETED = "completed"  # the agent was done
    TRUNCATED = "truncated"  # an answer, or the trajectory, reached its bound of tokens
    CONTEXT = "context"  # the history, or an answer to it, did not fit the context
    LIMIT = "limit"  # a limit of the loop or a deadline; the history is whole
    TOOL_ERROR = "tool_error"  # the agent's side failed: a tool, a hook, a call that was to be raised, its own code
    ENGINE_ERROR = "engine_error"  # the engine, or what keeps its answers, failed
    ABORTED = "aborted"  # stopped from outside, so that it might go on: by a trainer, an interrupt or a checkpoint
    CANCELLED = "cancelled"  # given up: by agent.cancel(), or with its task


class Outcome(Protocol):
    """What an invocation returned, such as Strands' `AgentResult`."""

    @property
    def stop_reason(self) -> str:
        """Strands' word for why the loop ended."""


_BY_STOP_REASON = {
    "end_turn": Termination.COMPLETED,
    "stop_sequence": Termination.COMPLETED,
    "tool_use": Termination.COMPLETED,  # a tool or a hook ended the loop
    "max_tokens": Termination.TRUNCATED,
    "limit_turns": Termination.LIMIT,
    "limit_total_tokens": Termination.LIMIT,
    "limit_output_tokens": Termination.LIMIT,
    "interrupt": Termination.ABORTED,
    "checkpoint": Termination.ABORTED,
    "content_filtered": Termination.ABORTED,
    "guardrail_intervened": Termination.ABORTED,
    "cancelled": Termination.CANCELLED,
}


def termination_of(
    outcome: Outcome | BaseException | None, ledger: Ledger | None = None, *, context_limit: int | None = None
) -> Termination:
    """Say why a rollout ended.

    Args:
        outcome: What `agent.invoke_async` returned, or what it raised. Strands' wrappers are opened, and of an error
            that says nothing by itself its cause is asked. None where nobody knows: the last answer then decides,
            by its finish.
        ledger: The rollout's ledger. Its last turn tells an answer that the engine aborted, or that filled the
            context, from one that reached its own bound; without, all of them are `TRUNCATED`.
        context_limit: Tokens of context that the model uses, `model.config["context_window_limit"]`.

    Raises:
        ValueError: `stop_reason` is no word of Strands 1.54 to 1.62.
    """
    if outcome is None:
        found = Termination.COMPLETED if _last_finish(ledger) in (None, Finish.STOP) else Termination.TRUNCATED
    elif isinstance(outcome, BaseException):
        found = _of_error(outcome)
    elif (reason := outcome.stop_reason) in _BY_STOP_REASON:
        found = _BY_STOP_REASON[reason]
    else:
        raise ValueError(f"Strands ended with the stop reason {reason!r}; known are {', '.join(_BY_STOP_REASON)}.")
    return _refined(found, ledger, context_limit) if found is Termination.TRUNCATED else found


def record_termination(ledger: Ledger, termination: Termination) -> None:
    """Write to a ledger why its rollout ended, as its annotation "termination"; the last one counts."""
    ledger.annotate(ANNOTATION, termination.value)


def recorded_termination(ledger: Ledger) -> Termination | None:
    """Read from a ledger why its rollout ended; None where nobody said.

    Raises:
        ValueError: The annotation is another word.
    """
    said = ledger.annotation(ANNOTATION)
    if said is None or said in list(Termination):
        return None if said is None else Termination(said)
    raise ValueError(
        f"Ledger {ledger.uuid} is annotated with the termination {said!r}; it must be one of {', '.join(Termination)}: "
        "use record_termination(ledger, termination_of(outcome, ledger))."
    )


def _last_finish(ledger: Ledger | None) -> Finish | None:
    return ledger[len(ledger) - 1].draft.finish if ledger is not None and len(ledger) else None


def _refined(found: Termination, ledger: Ledger | None, context_limit: int | None) -> Termination:
    finish = _last_finish(ledger)
    if finish is Finish.ABORT:
        return Termination.ABORTED
    if ledger is not None and finish is Finish.LENGTH and context_limit is not None:
        return Termination.CONTEXT if ledger[len(ledger) - 1].path_length >= context_limit else found
    return found


def _of_error(error: BaseException) -> Termination:
    """Give the first meaning along the chain of an error's originals and causes; what has none is the agent's side."""
    known = _meanings()
    for cause in _chain(error):
        for kinds, termination in known:
            if isinstance(cause, kinds):
                return termination
    return Termination.TOOL_ERROR


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, then what it wraps, of a group its first, or what caused it."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        inner = getattr(following, "original_exception", None)  # an `EventLoopException`
        if isinstance(following, BaseExceptionGroup):
            inner = following.exceptions[0]
        following = inner if isinstance(inner, BaseException) and inner is not following else following.__cause__


def _meanings() -> list[tuple[tuple[type[BaseException], ...], Termination]]:
    """List what each error means, the narrower before the wider; here, so that reading ledgers loads no Strands."""
    from strands.types import exceptions

    from tito_core.backend import errors
    from tito_core.hooks.limits import LoopLimitReachedError
    from tito_core.ledger.errors import LawViolationError
    from tito_core.turn.commit import TurnNotStoredError

    return [
        ((LoopLimitReachedError,), Termination.LIMIT),
        ((exceptions.ContextWindowOverflowException, errors.ContextLengthError), Termination.CONTEXT),
        ((exceptions.MaxTokensReachedException,), Termination.TRUNCATED),
        ((errors.GenerationAbortedError,), Termination.ABORTED),
        (
            (errors.BackendError, exceptions.ModelThrottledException, LawViolationError, TurnNotStoredError),
            Termination.ENGINE_ERROR,
        ),
        (
            (asyncio.CancelledError, KeyboardInterrupt, exceptions.IdempotencyAbortedError),
            Termination.CANCELLED,
        ),
        ((TimeoutError,), Termination.LIMIT),  # the caller's own deadline: the engine's has another error
    ]
