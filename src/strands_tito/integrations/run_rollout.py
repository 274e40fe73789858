"""One rollout of one agent, run to its end for a trainer, with why it ended in its ledger."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple, Protocol, cast

from strands import Agent
from strands.types.content import Messages

from tito_core.ledger.ledger import Ledger
from tito_core.model import TITOModel
from tito_core.termination import Termination, record_termination, termination_of

logger = logging.getLogger(__name__)

Chat = str | Sequence[Mapping[str, Any]]
"""A prompt as trainers' datasets have it: text, or OpenAI-style messages of text."""


class MakeAgent(Protocol):
    """Makes the agent of one rollout. It may annotate `model.ledger` with a reward once the agent is done."""

    def __call__(self, model: TITOModel, row: Any) -> Agent:
        """Return an agent over a model of its own.

        Args:
            model: The rollout's model.
            row: What the trainer has of the prompt: its sample, or its dataset's row.
        """


class Rolled(NamedTuple):
    """A rollout that ended.

    Attributes:
        ledger: What was sampled.
        termination: Why it ended; the ledger says so too.
        error: What the agent raised, or None.
    """

    ledger: Ledger
    termination: Termination
    error: Exception | None


async def roll_out(agent: Agent, model: TITOModel, prompt: Chat | None) -> Rolled:
    """Run an agent once. An error of the agent's or the engine's ends the rollout, not the trainer.

    Args:
        agent: The agent; a system message of the prompt becomes its system prompt.
        model: Its model.
        prompt: What it is asked; None lets it go on from its messages.

    Raises:
        BaseException: A cancellation or an interrupt of the program, once it is recorded.
        ValueError: The prompt has content that is no text, or a system message beside the agent's own.
    """
    asked = None if prompt is None else asked_of(agent, prompt)
    ledger = model.ledger
    limit = model.config.get("context_window_limit")
    try:
        result = await agent.invoke_async(asked)
    except Exception as error:
        ended = termination_of(error, ledger, context_limit=limit)
        logger.warning("rollout=<%s>, termination=<%s> | %s: %s", ledger.uuid, ended, type(error).__name__, error)
        record_termination(ledger, ended)
        return Rolled(ledger, ended, error)
    except BaseException as error:
        record_termination(ledger, termination_of(error, ledger))
        raise
    ended = termination_of(result, ledger, context_limit=limit)
    record_termination(ledger, ended)
    return Rolled(ledger, ended, None)


def let_go(agent: Agent) -> None:
    """End the servers of an agent's tools. One that does not stop is logged: it ends no trainer either."""
    try:
        agent.cleanup()
    except Exception as error:
        logger.warning("agent=<%s> | was not cleaned up: %s: %s", agent.name, type(error).__name__, error)


def asked_of(agent: Agent, prompt: Chat) -> str | Messages:
    """Return a prompt as Strands takes it; its system message goes to the agent.

    Raises:
        ValueError: Content is no text, a role is neither "user" nor "assistant", or there are two system prompts.
    """
    if isinstance(prompt, str):
        return prompt
    messages: list[dict[str, Any]] = []
    for number, message in enumerate(prompt):
        role, text = message.get("role"), _text(message.get("content"))
        if text is None or role not in ("system", "user", "assistant"):
            raise ValueError(f"Message {number} of the prompt is {message!r}; it must be a role and text.")
        if role != "system":
            messages.append({"role": role, "content": [{"text": text}]})
        elif number or agent.system_prompt not in (None, text):
            raise ValueError(
                f"Message {number} of the prompt is a system message, and there is a system prompt already, or other "
                "messages come first: leave one of the two out."
            )
        else:
            agent.system_prompt = text
    return cast(Messages, messages)


def _text(content: Any) -> str | None:
    if isinstance(content, Sequence) and not isinstance(content, str):
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        return None if None in parts else "\n".join(cast(list[str], parts))
    return content if isinstance(content, str) else None


def named(where: str | MakeAgent) -> MakeAgent:
    """Return the function that "module:function" names, or the function itself.

    Raises:
        ValueError: It names none.
    """
    if not isinstance(where, str):
        return where
    module, _, name = where.partition(":")
    try:
        return cast(MakeAgent, getattr(import_module(module), name))
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{where!r} must name a function as 'module:function' ({error}).") from error
