"""Termination reasons: each way that an agent stops, its reason, and its record in the ledger."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, get_args

import pytest
from strands import Agent, tool
from strands.hooks import AfterModelCallEvent, BeforeToolCallEvent
from strands.types.event_loop import StopReason
from strands.types.exceptions import (
    ContextWindowOverflowException,
    EventLoopException,
    MaxTokensReachedException,
    ModelThrottledException,
)

from support.drafts import make_draft
from support.scripted import BACKENDS, Says, call, model_of
from tito_core import TITOModel, TotalTokensReachedError, TurnNotStoredError
from tito_core.backend.errors import (
    BackendError,
    ContextLengthError,
    EngineTimeoutError,
    GenerationAbortedError,
    ProtocolViolationError,
)
from tito_core.chat.rendering import TemplateError
from tito_core.hooks import LoopLimiter, MaxMessagesReachedError
from tito_core.ledger import Finish, LawViolationError, Ledger
from tito_core.store import from_record, to_record
from tito_core.termination import (
    Termination,
    record_termination,
    recorded_termination,
    termination_of,
)
from tito_core.turn.request import TrimmedHistoryError

ADD = call("add", '{"a": 1, "b": 2}')
LONG = " one two three" * 400 + "..."
by_kind = pytest.mark.parametrize("kind", BACKENDS)


@dataclass
class Ended:
    stop_reason: str


@tool
def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: One.
        b: Other.
    """
    return a + b


async def ended(model: TITOModel, **options: Any) -> Termination:
    """Run an agent once and return why it ended, as a user does."""
    limits = options.pop("limits", None)
    agent = Agent(model=model, tools=[add], callback_handler=None, **options)
    outcome: Any
    try:
        outcome = await agent.invoke_async("Add.", limits=limits)
    except BaseException as error:
        outcome = error
    return termination_of(outcome, model.ledger, context_limit=model.config.get("context_window_limit"))


def fail(event: BeforeToolCallEvent) -> None:
    raise KeyError("the user's own")


def stop(event: AfterModelCallEvent) -> None:
    event.agent.cancel()


LIMITER = LoopLimiter(max_tool_iters=1)
CUT = {"sampling": {"max_new_tokens": 8}}
FULL = {"context_window_limit": 600, "sampling": {"max_new_tokens": 4096}}
ENDS: list[tuple[tuple[str, ...], dict[str, Any], dict[str, Any], Termination, int | None]] = [
    ((ADD, "It is 3."), {}, {}, Termination.COMPLETED, None),
    ((LONG,), CUT, {}, Termination.TRUNCATED, None),
    ((LONG,), {"max_total_tokens": 500}, {}, Termination.TRUNCATED, 500),
    ((LONG,), {"max_total_tokens": 1}, {}, Termination.TRUNCATED, 0),
    ((LONG,), FULL, {}, Termination.CONTEXT, 600),
    (("Yes.",), {"context_window_limit": 20}, {}, Termination.CONTEXT, 0),
    ((ADD,), {}, {"hooks": [LIMITER]}, Termination.LIMIT, None),
    ((ADD,), {}, {"limits": {"turns": 1}}, Termination.LIMIT, None),
    ((ADD,), {}, {"hooks": [fail]}, Termination.TOOL_ERROR, None),
    ((call("add", '{"a": 1'),), {"malformed_calls": "raise"}, {}, Termination.TOOL_ERROR, None),
    ((ADD,), {}, {"hooks": [stop]}, Termination.CANCELLED, None),
]


@by_kind
@pytest.mark.parametrize(("answers", "settings", "options", "termination", "tokens"), ENDS)
async def test_how_an_agent_ended(
    kind: str, answers: tuple[str, ...], settings: Any, options: Any, termination: Termination, tokens: int | None
) -> None:
    LIMITER.reset()
    model = model_of(kind, Says(*answers), **settings)
    assert await ended(model, **options) is termination
    assert tokens is None or sum(len(path) for path in model.ledger.trajectories) == tokens


@by_kind
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("error", [RuntimeError("the actor died"), TimeoutError(), OSError("no route")])
async def test_what_a_backends_client_raises_is_an_engine_error(kind: str, error: Exception, stream: bool) -> None:
    """A third party's backend may raise anything; as the agent's own error the rollout would be trained."""
    model = model_of(kind, Says(ADD), stream=stream)

    async def broken(*_: Any) -> Any:
        raise error

    model.policy.backend.generate = broken  # type: ignore[method-assign]
    assert await ended(model) is Termination.ENGINE_ERROR
    with pytest.raises(BackendError, match=f"client raised {type(error).__name__}: {error}") as caught:
        await Agent(model=model, callback_handler=None).invoke_async("Add.")
    assert caught.value.__cause__ is error
    assert len(model.ledger) == 0


def test_every_stop_reason_of_strands_has_a_termination() -> None:
    assert {termination_of(Ended(reason)) for reason in get_args(StopReason)} >= {
        Termination.COMPLETED,
        Termination.TRUNCATED,
        Termination.LIMIT,
        Termination.ABORTED,
        Termination.CANCELLED,
    }
    with pytest.raises(ValueError, match="stop reason 'new_word'"):
        termination_of(Ended("new_word"))


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "termination"),
    [
        (asyncio.CancelledError(), Termination.CANCELLED),
        (KeyboardInterrupt(), Termination.CANCELLED),
        (TimeoutError(), Termination.LIMIT),
        (MaxMessagesReachedError(1, 2), Termination.LIMIT),
        (EventLoopException(MaxMessagesReachedError(1, 2)), Termination.LIMIT),
        (MaxTokensReachedException("cut"), Termination.TRUNCATED),
        (TotalTokensReachedError("none left"), Termination.TRUNCATED),
        (ContextWindowOverflowException("long"), Termination.CONTEXT),
        (ContextLengthError("long"), Termination.CONTEXT),
        (GenerationAbortedError("paused"), Termination.ABORTED),
        (EngineTimeoutError("late"), Termination.ENGINE_ERROR),
        (EventLoopException(BackendError("down")), Termination.ENGINE_ERROR),
        (EventLoopException(EventLoopException(ProtocolViolationError("no"))), Termination.ENGINE_ERROR),
        (ModelThrottledException("busy"), Termination.ENGINE_ERROR),
        (LawViolationError(2, "no."), Termination.ENGINE_ERROR),
        (TurnNotStoredError("full"), Termination.ENGINE_ERROR),
        (ExceptionGroup("tasks", [BackendError("down"), KeyError("x")]), Termination.ENGINE_ERROR),
        (caused(RuntimeError("Graph node failed"), BackendError("down")), Termination.ENGINE_ERROR),
        (caused(RuntimeError("Graph node failed"), KeyError("x")), Termination.TOOL_ERROR),
        (EventLoopException(TemplateError("one call")), Termination.TEMPLATE),
        (TrimmedHistoryError("no question"), Termination.CONTEXT),
        (ZeroDivisionError(), Termination.TOOL_ERROR),
        (OSError("a user's disk"), Termination.TOOL_ERROR),
    ],
)
def test_what_each_error_means(error: BaseException, termination: Termination) -> None:
    assert termination_of(error) is termination


def test_a_cycle_of_causes_ends() -> None:
    first, second = RuntimeError("a"), RuntimeError("b")
    first.__cause__, second.__cause__ = second, first
    assert termination_of(first) is Termination.TOOL_ERROR


def ledger_of(finish: Finish) -> Ledger:
    ledger = Ledger()
    ledger.commit(make_draft(None, 0, [100] * 3, [200] * 5, finish=finish))
    return ledger


@pytest.mark.parametrize(
    ("finish", "limit", "cut", "unknown"),
    [
        (Finish.STOP, None, Termination.TRUNCATED, Termination.COMPLETED),
        (Finish.LENGTH, None, Termination.TRUNCATED, Termination.TRUNCATED),
        (Finish.LENGTH, 9, Termination.TRUNCATED, Termination.TRUNCATED),
        (Finish.LENGTH, 8, Termination.CONTEXT, Termination.CONTEXT),
        (Finish.ABORT, 8, Termination.ABORTED, Termination.ABORTED),
    ],
)
def test_the_last_turn_decides_what_truncated_an_answer(
    finish: Finish, limit: int | None, cut: Termination, unknown: Termination
) -> None:
    ledger = ledger_of(finish)
    assert termination_of(MaxTokensReachedException("cut"), ledger, context_limit=limit) is cut
    assert termination_of(Ended("max_tokens"), ledger, context_limit=limit) is cut
    assert termination_of(None, ledger, context_limit=limit) is unknown
    assert termination_of(Ended("end_turn"), ledger, context_limit=limit) is Termination.COMPLETED
    assert termination_of(None) is termination_of(None, Ledger()) is Termination.COMPLETED


@pytest.mark.parametrize("termination", Termination)
def test_a_ledgers_termination_survives_a_file(termination: Termination) -> None:
    ledger = ledger_of(Finish.STOP)
    assert recorded_termination(ledger) is None
    record_termination(ledger, Termination.ENGINE_ERROR)
    record_termination(ledger, termination)
    assert recorded_termination(from_record(to_record(ledger))) is termination


def test_an_unknown_termination_is_an_error() -> None:
    ledger = ledger_of(Finish.STOP)
    ledger.annotate("termination", "MaxToolIterationsReachedError")
    with pytest.raises(ValueError, match=r"'MaxToolIterationsReachedError'.*completed, "):
        recorded_termination(ledger)
