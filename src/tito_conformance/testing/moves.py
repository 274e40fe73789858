"""Moves of an agent, as plain data that is drawn at random, printed, and written to JSON."""

from __future__ import annotations

from typing import Literal

import msgspec


class Move(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """One move of agent number `agent`. Indices wrap around."""

    agent: int = 0


class Ask(Move, frozen=True):
    """Add a user text, or results of pending calls; then sample an answer.

    Attributes:
        text: The user's text, or a tool's result.
        form: Content of a tool result.
        reverse: Whether several results are in reverse order of their calls.
    """

    text: str = "Hi"
    form: Literal["text", "json", "blocks", "empty", "error"] = "text"
    reverse: bool = False


class Look(Move, frozen=True):
    """Add a user text with pictures, or results of pending calls that each have them; then sample an answer.

    Attributes:
        text: The user's text, or a tool's result.
        pictures: Seeds of the pictures (`tito_conformance.testing.pictures`). All have one size.
        form: Where they are: before, after, or around the text, or alone.
    """

    text: str = "Hi"
    pictures: tuple[int, ...] = (0,)
    form: Literal["before", "after", "around", "alone"] = "before"


class Cut(Move, frozen=True):
    """Sample an answer of only a few tokens."""

    text: str = "Hi"
    tokens: int = 3


class StopAt(Move, frozen=True):
    """Sample an answer with a stop string."""

    text: str = "Hi"
    stop: str = " "


class Force(Move, frozen=True):
    """Force a call of one tool (`named`), or of any."""

    text: str = "Hi"
    named: bool = True


class Call(Move, frozen=True):
    """Sample an answer that consists of these calls, under a grammar. A policy seldom writes such answers by itself.

    Attributes:
        text: The user's text, or a tool's result.
        calls: The text between the tags of each call. It may be malformed.
        before: The text before the first call.
    """

    text: str = "Hi"
    before: str = ""
    calls: tuple[str, ...] = ("{}",)


class Shape(Move, frozen=True):
    """Request a structured output."""

    text: str = "Hi"


class Cancel(Move, frozen=True):
    """Cancel the answer after `after_s` seconds, in one of three ways."""

    text: str = "Hi"
    after_s: float = 0.02
    how: Literal["task", "signal", "close"] = "task"


class Edit(Move, frozen=True):
    """Edit a message, then sample an answer."""

    at: int = 0
    text: str = "Ho"


class Trim(Move, frozen=True):
    """Drop the oldest messages, then sample an answer."""

    count: int = 1


class Rewind(Move, frozen=True):
    """Drop the latest messages, add a user text, then sample an answer."""

    count: int = 1
    text: str = "Hm"


class Again(Move, frozen=True):
    """Drop the last answer, and sample another."""


class Seed(Move, frozen=True):
    """Add an assistant message that the policy never sampled, then sample an answer."""

    text: str = "Well."


class System(Move, frozen=True):
    """Change the system prompt, then sample an answer."""

    system: int = 0


class Sampling(Move, frozen=True):
    """Change the sampling parameters of all following turns."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None


class Together(Move, frozen=True):
    """Run a turn of several new agents at once on one model."""

    texts: tuple[str, ...] = ("One", "Two")


class Reload(Move, frozen=True):
    """Change the weights during an answer. Only for a server whose owner allows it."""

    text: str = "Hi"


class Opening(Move, frozen=True):
    """A move that configures the whole conversation, and comes first."""


class Stream(Opening, frozen=True):
    """Stream answers."""


class Want(Opening, frozen=True):
    """Request optional outputs; see `tito_core.backend.OptionalOutputs`."""

    top_logprobs: int = 0
    prompt_logprobs: bool = False
    routed_experts: bool = False
    sampling_mask: bool = False


AnyMove = (
    Stream
    | Want
    | Ask
    | Look
    | Cut
    | StopAt
    | Force
    | Call
    | Shape
    | Cancel
    | Edit
    | Trim
    | Rewind
    | Again
    | Seed
    | System
    | Sampling
    | Together
    | Reload
)
"""Any move, for decoding from JSON."""
