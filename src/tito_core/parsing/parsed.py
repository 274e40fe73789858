"""What a completion says: reasoning, text and tool calls, with the tokens of each call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class CallStatus(StrEnum):
    """How well a tool call is formed."""

    OK = "ok"
    LENIENT = "lenient"  # not as the family documents it, with one reading; executed where `tool_calls` is "lenient"
    MALFORMED = "malformed"  # what a repair would change; never executed
    TRUNCATED = "truncated"  # the engine stopped for length inside it
    SUSPECT = "suspect"  # text that looks like a call: spelled tags, or a tool's name in call form; never executed

    @property
    def runs(self) -> bool:
        """Whether such a call is executed."""
        return self in (CallStatus.OK, CallStatus.LENIENT)


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """One tool call as the tokens say it (law 9).

    Attributes:
        status: See `CallStatus`.
        name: The tool's name; None where the tokens do not say it for certain.
        arguments: The decoded arguments of a call that runs, else None.
        raw: The call's text as sampled, markup included.
        start: First token of the call, markup included, as an offset within the completion.
        stop: One past its last token.
        reason: Why it is not "ok", as a sentence; empty otherwise. The policy reads that of a malformed call.
        id: The call's id where the format has the policy write one (Kimi), as sampled; else None.
        arguments_text: The arguments of a call that runs as sampled, where the format writes them as JSON; else None.
    """

    status: CallStatus
    name: str | None
    arguments: Mapping[str, Any] | None
    raw: str
    start: int
    stop: int
    reason: str = ""
    id: str | None = None
    arguments_text: str | None = None


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """A whole completion, parsed.

    Attributes:
        reasoning: Text of the reasoning, without its markup; several blocks are joined by a newline.
        text: What remains beside reasoning and calls, in order.
        calls: Tool calls, in order.
        reasoning_closed: False when the completion ended inside a reasoning block, whatever that block held.
        late_reasoning: The end of `reasoning` that came after text; it has a place of its own in the message.
        suspects: Parts of `text`, or of reasoning that was never closed, that look like calls; for the record alone.
    """

    reasoning: str
    text: str
    calls: tuple[ParsedCall, ...]
    reasoning_closed: bool = True
    late_reasoning: str = ""
    suspects: tuple[ParsedCall, ...] = ()

    @property
    def records(self) -> tuple[ParsedCall, ...]:
        """The calls and the suspects, in order."""
        return (
            tuple(sorted((*self.calls, *self.suspects), key=lambda call: call.start)) if self.suspects else self.calls
        )

    @property
    def early_reasoning(self) -> str:
        """The reasoning before any text."""
        late = self.late_reasoning
        return self.reasoning.removesuffix(late).removesuffix("\n") if late else self.reasoning
