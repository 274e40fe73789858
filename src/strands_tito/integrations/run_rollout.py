"""Run one rollout of an agent for a trainer and record in its ledger why it ended."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple, Protocol, cast

from strands import Agent
from strands.types.content import Messages

from tito_core.ledger.ledger import Ledger
from tito_core.model import Policy, TITOModel
from tito_core.termination import Termination, record_termination, termination_of

logger = logging.getLogger(__name__)

Chat = str | Sequence[Mapping[str, Any]]
"""A prompt from a trainer's dataset: text, or OpenAI-style messages with text content."""


class MakeAgent(Protocol):
    """Makes the agent of one rollout. Its hooks may annotate `model.ledger` with a reward when the agent is done."""

    def __call__(self, model: TITOModel, row: Any) -> Agent:
        """Return an agent that uses `model`.

        Args:
            model: The rollout's own model.
            row: The trainer's sample or the row of its dataset.
        """


class RolloutResult(NamedTuple):
    """The result of a rollout.

    Attributes:
        ledger: The rollout's ledger.
        termination: Why the rollout ended; also annotated in the ledger.
        error: The exception that the agent raised, or None.
    """

    ledger: Ledger
    termination: Termination
    error: Exception | None


async def run_rollout(agent: Agent, model: TITOModel, prompt: Chat | None) -> RolloutResult:
    """Run an agent once. An error of the agent or the engine ends the rollout, not the trainer.

    Args:
        agent: The agent. A system message of the prompt becomes its system prompt.
        model: The agent's model.
        prompt: The prompt; None continues from the agent's messages.

    Raises:
        BaseException: A cancellation or an interrupt, after it was recorded in the ledger.
        ValueError: The prompt has non-text content, or a system message that differs from the agent's system prompt, or
            the agent sampled after `model.reset()`, so that its turns are in two ledgers.
    """
    agent_input = None if prompt is None else strands_prompt(agent, prompt)
    ledger = model.ledger
    limit = model.config.get("context_window_limit")
    try:
        result = await agent.invoke_async(agent_input)
    except Exception as error:
        _expect_one_ledger(model, ledger)
        ended = termination_of(error, ledger, context_limit=limit)
        logger.warning("rollout=<%s>, termination=<%s> | %s: %s", ledger.uuid, ended, type(error).__name__, error)
        record_termination(ledger, ended)
        return RolloutResult(ledger, ended, error)
    except BaseException as error:
        record_termination(ledger, termination_of(error, ledger))
        raise
    _expect_one_ledger(model, ledger)
    ended = termination_of(result, ledger, context_limit=limit)
    record_termination(ledger, ended)
    return RolloutResult(ledger, ended, None)


def _expect_one_ledger(model: TITOModel, ledger: Ledger) -> None:
    """A reset when the agent is done is fine; `ValueError` if it has sampled since."""
    if model.ledger is not ledger and len(model.ledger):
        raise ValueError(
            f"The agent sampled into another ledger, after model.reset() or as a restored session. Turns in the "
            f"rollout's ledger: {len(ledger)}, in that one: {len(model.ledger)}. A rollout has one ledger: reset when "
            "the agent is done, or not at all, and give a session's ledger to the model."
        )


def expect_template_arguments(policy: Policy, arguments: Mapping[str, Any] | None, option: str) -> None:
    """Check that the policy's chat template has the arguments that a trainer's option sets.

    Raises:
        ValueError: It has others: the trainer's would be ignored.
    """
    own = policy.template.arguments
    if other := {name: own.get(name) for name, value in (arguments or {}).items() if own.get(name) != value}:
        raise ValueError(
            f"The trainer's {option} is {arguments!r}, but the policy's template has {other!r}. Connect the policy "
            "with template_arguments=..., or leave the trainer's option out."
        )


def cleanup_agent(agent: Agent) -> None:
    """Stop the servers of an agent's tools. Failures are logged, not raised."""
    try:
        agent.cleanup()
    except Exception as error:
        logger.warning("agent=<%s> | cleanup failed: %s: %s", agent.name, type(error).__name__, error)


def strands_prompt(agent: Agent, prompt: Chat) -> str | Messages:
    """Convert a prompt to Strands messages; set its system message as the agent's system prompt.

    Raises:
        ValueError: Content is not text, a role is not "system", "user" or "assistant", a system message is not the
            first message, or it differs from the agent's system prompt.
    """
    if isinstance(prompt, str):
        return prompt
    messages: list[dict[str, Any]] = []
    for number, message in enumerate(prompt):
        role, text = message.get("role"), _text(message.get("content"))
        if text is None or role not in ("system", "user", "assistant"):
            raise ValueError(
                f"Message {number} of the prompt is {message!r}; it must have a role ('system', 'user' or 'assistant') "
                "and text content."
            )
        if role != "system":
            messages.append({"role": role, "content": [{"text": text}]})
        elif number or agent.system_prompt not in (None, text):
            raise ValueError(
                f"Message {number} of the prompt is a second system prompt or does not come first. Keep one system "
                "message, the first, or the agent's system_prompt."
            )
        else:
            agent.system_prompt = text
    return cast(Messages, messages)


def _text(content: Any) -> str | None:
    if isinstance(content, Sequence) and not isinstance(content, str):
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        return None if None in parts else "\n".join(cast(list[str], parts))
    return content if isinstance(content, str) else None


def load_function(function: str | MakeAgent) -> MakeAgent:
    """Import a function by its name, "module:function"; return a function unchanged.

    Raises:
        ValueError: The function was not found.
    """
    if not isinstance(function, str):
        return function
    module, _, name = function.partition(":")
    try:
        return cast(MakeAgent, getattr(import_module(module), name))
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"Cannot import {function!r}: name a function as 'module:function' ({error}).") from error
