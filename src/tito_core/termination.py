"""Why a rollout ended: derived from the invocation's result or error, and recorded in the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from enum import StrEnum
from typing import Protocol

from tito_core.ledger.ledger import Ledger
from tito_core.ledger.turn import Finish

ANNOTATION = "termination"
"""Name of the annotation in the ledger."""


class Termination(StrEnum):
    """Why a rollout ended. Exporters map it to their trainer's status."""

    COMPLETED = "completed"  # the agent finished
    TRUNCATED = "truncated"  # an answer or the trajectory reached its token limit
    CONTEXT = "context"  # history or answer did not fit, or was trimmed to what the template cannot show
    LIMIT = "limit"  # a limit of the loop, or a deadline; the history is complete
    TOOL_ERROR = "tool_error"  # an error on the agent's side: a hook, a malformed call, its own code
    TEMPLATE = "template"  # the chat template can show the history in no form
    ENGINE_ERROR = "engine_error"  # the engine or the store failed
    ABORTED = "aborted"  # stopped from outside and could continue: by a trainer, an interrupt or a checkpoint
    CANCELLED = "cancelled"  # abandoned: by agent.cancel(), or with its task


class Outcome(Protocol):
    """The result of an invocation, such as Strands' `AgentResult`."""

    @property
    def stop_reason(self) -> str:
        """Strands' reason for the end of the loop."""


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
    """Return why a rollout ended.

    Args:
        outcome: The result or the error of `agent.invoke_async`. Strands' wrappers and the causes of an error are
            searched for a known type. None when neither is known: the finish of the last answer then decides.
        ledger: The rollout's ledger. Its last turn distinguishes an answer that the engine aborted, or that filled
            the context, from one that reached its own limit. Without it, all of them are `TRUNCATED`.
        context_limit: The model's context length in tokens, `model.config["context_window_limit"]`.

    Raises:
        ValueError: `stop_reason` is not one of Strands 1.54 to 1.62.
    """
    if outcome is None:
        termination = Termination.COMPLETED if _last_finish(ledger) in (None, Finish.STOP) else Termination.TRUNCATED
    elif isinstance(outcome, BaseException):
        termination = _of_error(outcome)
    elif (reason := outcome.stop_reason) in _BY_STOP_REASON:
        termination = _BY_STOP_REASON[reason]
    else:
        raise ValueError(f"Unknown stop reason {reason!r} of Strands. Known: {', '.join(_BY_STOP_REASON)}.")
    return _of_truncated(ledger, context_limit) if termination is Termination.TRUNCATED else termination


def record_termination(ledger: Ledger, termination: Termination) -> None:
    """Record in a ledger why its rollout ended, as its annotation "termination". A later record replaces it."""
    ledger.annotate(ANNOTATION, termination.value)


def recorded_termination(ledger: Ledger) -> Termination | None:
    """Return why a ledger's rollout ended; None where it is not recorded.

    Raises:
        ValueError: The annotation is not a `Termination`.
    """
    value = ledger.annotation(ANNOTATION)
    if value is None or value in list(Termination):
        return None if value is None else Termination(value)
    raise ValueError(
        f"Ledger {ledger.uuid} has the unknown termination {value!r}; it must be one of {', '.join(Termination)}. "
        "Use record_termination(ledger, termination_of(outcome, ledger))."
    )


def _last_finish(ledger: Ledger | None) -> Finish | None:
    return ledger[len(ledger) - 1].draft.finish if ledger is not None and len(ledger) else None


def _of_truncated(ledger: Ledger | None, context_limit: int | None) -> Termination:
    """Return ABORTED or CONTEXT where the last turn shows it, else TRUNCATED."""
    finish = _last_finish(ledger)
    if finish is Finish.ABORT:
        return Termination.ABORTED
    if ledger is not None and finish is Finish.LENGTH and context_limit is not None:
        return Termination.CONTEXT if ledger[len(ledger) - 1].path_length >= context_limit else Termination.TRUNCATED
    return Termination.TRUNCATED


def _of_error(error: BaseException) -> Termination:
    """Return the meaning of the first known type among an error, its originals and causes; else TOOL_ERROR."""
    known = _meanings()
    for cause in _chain(error):
        for kinds, termination in known:
            if isinstance(cause, kinds):
                return termination
    return Termination.TOOL_ERROR


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, then repeatedly the one that it wraps, the first of a group, or its cause."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        inner = getattr(current, "original_exception", None)  # an `EventLoopException`
        if isinstance(current, BaseExceptionGroup):
            inner = current.exceptions[0]
        current = inner if isinstance(inner, BaseException) and inner is not current else current.__cause__


def _meanings() -> list[tuple[tuple[type[BaseException], ...], Termination]]:
    """Return the meaning of each error type, subclasses first. Local imports: ledgers must load without Strands."""
    from strands.types import exceptions

    from tito_core.backend import errors
    from tito_core.chat.rendering import TemplateError
    from tito_core.hooks import LoopLimitReachedError
    from tito_core.ledger.errors import LawViolationError
    from tito_core.store import SchemaError
    from tito_core.turn.recording import TurnNotStoredError
    from tito_core.turn.request import TrimmedHistoryError

    too_long = exceptions.ContextWindowOverflowException, errors.ContextLengthError, TrimmedHistoryError
    engine = errors.BackendError, exceptions.ModelThrottledException, LawViolationError, TurnNotStoredError, SchemaError
    return [
        ((LoopLimitReachedError,), Termination.LIMIT),
        (too_long, Termination.CONTEXT),
        ((TemplateError,), Termination.TEMPLATE),
        ((exceptions.MaxTokensReachedException,), Termination.TRUNCATED),
        ((errors.GenerationAbortedError,), Termination.ABORTED),
        (engine, Termination.ENGINE_ERROR),
        ((asyncio.CancelledError, KeyboardInterrupt, exceptions.IdempotencyAbortedError), Termination.CANCELLED),
        ((TimeoutError,), Termination.LIMIT),  # the caller's own deadline; the engine's is an EngineTimeoutError
    ]
