"""What an agent may do, as plain data: drawn at random, shown to a person, and read again from JSON."""

from __future__ import annotations

from typing import Literal

import msgspec


class Move(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """One step of agent number `agent`; numbers that point at something count around."""

    agent: int = 0


class Ask(Move, frozen=True):
    """The user says something, or the tools answer what was called; then the policy speaks.

    Attributes:
        text: What the user says, or a tool's result.
        form: What a tool's result is made of.
        reverse: Whether several results come in another order than their calls.
    """

    text: str = "Hi"
    form: Literal["text", "json", "blocks", "empty", "error"] = "text"
    reverse: bool = False


class Cut(Move, frozen=True):
    """The policy may say only a few tokens."""

    text: str = "Hi"
    tokens: int = 3


class StopAt(Move, frozen=True):
    """A text that ends the answer."""

    text: str = "Hi"
    stop: str = " "


class Force(Move, frozen=True):
    """A grammar forces a call: of one tool, or of any."""

    text: str = "Hi"
    named: bool = True


class Shape(Move, frozen=True):
    """A grammar gives the answer a shape."""

    text: str = "Hi"


class Cancel(Move, frozen=True):
    """The agent gives up in the middle of the answer."""

    text: str = "Hi"
    after_s: float = 0.02
    how: Literal["task", "signal", "close"] = "task"


class Edit(Move, frozen=True):
    """A message becomes another; then the policy speaks."""

    at: int = 0
    text: str = "Ho"


class Trim(Move, frozen=True):
    """The oldest messages go."""

    count: int = 1


class Rewind(Move, frozen=True):
    """The latest messages go, and the user says something else."""

    count: int = 1
    text: str = "Hm"


class Again(Move, frozen=True):
    """The last answer goes, and the policy speaks once more."""


class Seed(Move, frozen=True):
    """The history says that the policy said something, which it never did."""

    text: str = "Well."


class System(Move, frozen=True):
    """Another system prompt."""

    system: int = 0


class Sampling(Move, frozen=True):
    """Other sampling parameters from here on, for every agent."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None


class Together(Move, frozen=True):
    """Several agents ask at once on one model."""

    texts: tuple[str, ...] = ("One", "Two")


class Reload(Move, frozen=True):
    """The weights change while the policy speaks. Only a server whose owner asks for it is played so."""

    text: str = "Hi"


class Opening(Move, frozen=True):
    """How the whole conversation is played; it comes first."""


class Stream(Opening, frozen=True):
    """Answers are streamed."""


class Want(Opening, frozen=True):
    """More is wanted of each answer; see `tito_core.backend.Wanted`."""

    top_logprobs: int = 0
    prompt_logprobs: bool = False
    routed_experts: bool = False
    sampling_mask: bool = False


AnyMove = (
    Stream
    | Want
    | Ask
    | Cut
    | StopAt
    | Force
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
"""Any move, for reading it from JSON."""
