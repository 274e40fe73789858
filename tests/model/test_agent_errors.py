"""The errors that a Strands agent raises, on an invocation's first model call and on a later one."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from strands import Agent, tool
from strands.agent.conversation_manager import NullConversationManager, SlidingWindowConversationManager
from strands.types.exceptions import (
    ContextWindowOverflowException,
    EventLoopException,
)

from support.backends import TRIES
from support.scripted import Says, call, engine_of, tokenizer
from tito_conformance.checks import BrokenLawError
from tito_conformance.testing import Fault, ScriptedServer
from tito_core import MalformedCallError, Termination, TITOModel, termination_of
from tito_core.backend import (
    BackendError,
    BadRequestError,
    ContextLengthError,
    EngineConnectionError,
    ProtocolViolationError,
    ServerError,
    ThrottledError,
)
from tito_core.ledger.errors import LawViolationError
from tito_core.parsing.completion import CallStatus, ParsedCall
from tito_core.turn.recording import TurnNotStoredError

CALL = call("add", '{"a": 2, "b": 3}')
LONG = "word " * 400


@tool
def add(a: int, b: int) -> str:
    """Add.

    Args:
        a: One.
        b: The other.
    """
    return str(a + b)


@tool
def read() -> str:
    """Read a long page."""
    return LONG


@contextmanager
def serving(kind: str, *answers: Any, fault: Fault | None = None, at: int = 0, **options: Any) -> Iterator[Any]:
    """Serve a scripted engine that has a fault from the agent's request `at` on."""
    script = Says(*answers)
    engine = engine_of(kind, script, fault=lambda *_: fault if len(script.requests) >= at else None, **options)
    with ScriptedServer(engine) as server:
        engine.fault, ours = None, engine.fault  # not at connect
        yield server, lambda: setattr(engine, "fault", ours)


def agent_at(url: str, kind: str, **options: Any) -> Agent:
    agent_options = {name: options.pop(name) for name in ("conversation_manager", "tools") if name in options}
    model = TITOModel(backend=kind, base_url=url, tokenizer=tokenizer(), **options)
    return Agent(model=model, **{"tools": [add, read], "callback_handler": None, **agent_options})


def no_logprobs(answer: dict[str, Any]) -> None:
    if "choices" in answer:
        answer["choices"][0]["logprobs"] = None
    else:
        answer["meta_info"]["output_token_logprobs"] = None


FAILURES: dict[str, tuple[Fault, type[BackendError]]] = {
    "refused": (Fault(status=400, body=b'{"message": "no"}'), BadRequestError),
    "failed": (Fault(status=500, body=b'{"message": "oops"}'), ServerError),
    "throttled": (Fault(status=429, headers={"retry-after": "0.01"}), ThrottledError),
    "broke": (Fault(reset_after=30), EngineConnectionError),
    "against a law": (Fault(edit=no_logprobs), ProtocolViolationError),
}


@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.parametrize(("kind", "later"), [("vllm", False), ("sglang", True)])
async def test_an_engines_failure_is_raised_unchanged_by_an_agent(kind: str, name: str, later: bool) -> None:
    """On a later call Strands wraps any error that is not an `EventLoopException`."""
    fault, expected = FAILURES[name]
    with serving(kind, CALL, "Five.", fault=fault, at=later) as (server, begin):
        agent = agent_at(server.base_url, kind, patience_s=TRIES[2])
        begin()
        caught = await one_clause(agent)
        assert type(caught) is expected
        assert isinstance(caught, BackendError)
        assert isinstance(caught, EventLoopException)  # so that code for other providers catches it, too
        assert caught.original_exception is caught
        assert len(agent.model.ledger) == later  # type: ignore[attr-defined]
        assert termination_of(caught) is Termination.ENGINE_ERROR


async def one_clause(agent: Agent, question: str = "2 + 3?") -> Exception:
    """The clause that docs/errors.md gives."""
    try:
        await agent.invoke_async(question)
    except (BackendError, ContextWindowOverflowException) as error:
        return error
    raise AssertionError("it did not fail")


@pytest.mark.parametrize(("kind", "later"), [("vllm", True), ("sglang", False)])
async def test_an_overflow_is_caught_by_the_same_clause(kind: str, later: bool) -> None:
    """Strands' managers raise Strands' own error when they cannot shorten more; ours is its cause."""
    answers = [call("read", "{}"), "Read."] if later else ["No."]
    for manager in (NullConversationManager(), SlidingWindowConversationManager(should_truncate_results=False)):
        with serving(kind, *answers, max_model_len=500) as (server, _):
            agent = agent_at(server.base_url, kind, conversation_manager=manager, sampling={"max_new_tokens": 64})
            caught = await one_clause(agent, "Read it." if later else LONG)
            assert isinstance(caught, ContextWindowOverflowException)
            ours = caught if isinstance(manager, NullConversationManager) else caught.__cause__
            assert isinstance(ours, ContextLengthError)
            assert termination_of(caught) is Termination.CONTEXT


@pytest.mark.parametrize(("kind", "later"), [("vllm", False), ("sglang", True)])
async def test_a_malformed_call_is_wrapped_on_a_later_call_only(kind: str, later: bool) -> None:
    broken = "<tool_call>\n{\n</tool_call>"
    with serving(kind, *([CALL] if later else []), broken) as (server, _):
        agent = agent_at(server.base_url, kind, malformed_calls="raise")
        with pytest.raises((MalformedCallError, EventLoopException)) as caught:
            await agent.invoke_async("2 + 3?")
    error = caught.value
    assert isinstance(error, EventLoopException) == later
    assert isinstance(error.__cause__ if later else error, MalformedCallError)
    assert termination_of(error) is Termination.TOOL_ERROR


def test_errors_with_arguments_of_their_own_go_through_pickle_and_copy() -> None:
    malformed = ParsedCall(CallStatus.MALFORMED, "add", None, "<tool_call>", 0, 1, "It has no end.")
    for error in (
        MalformedCallError((malformed,), 3, {"role": "assistant", "content": [{"text": "<tool_call>"}]}),
        BrokenLawError("prompt", "It differs."),
        LawViolationError(4, "It differs."),
        TurnNotStoredError(28, "No space.", "rollouts.tito"),
        BackendError("No.", backend="vllm"),
    ):
        for copied in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
            assert (type(copied), str(copied), vars(copied)) == (type(error), str(error), vars(error))
            assert (copied.args, copied.__notes__) == (error.args, error.__notes__)
            assert getattr(copied, "filename", None) == getattr(error, "filename", None)
