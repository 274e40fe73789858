"""A parsed completion: reasoning, text and tool calls, with the tokens of each call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class CallStatus(StrEnum):
    """Whether a tool call is well formed."""

    OK = "ok"
    LENIENT = "lenient"  # undocumented form with exactly one reading; executed if `tool_calls` is "lenient"
    MALFORMED = "malformed"  # would need a repair; never executed
    TRUNCATED = "truncated"  # the engine stopped for length inside it
    SUSPECT = "suspect"  # text that looks like a call: a spelled tag, or a tool's name in call form; never executed

    @property
    def runs(self) -> bool:
        """Whether such a call is executed."""
        return self in (CallStatus.OK, CallStatus.LENIENT)


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """One tool call, exactly as sampled (law 9).

    Attributes:
        status: See `CallStatus`.
        name: The tool's name; None if it is not certain.
        arguments: The decoded arguments of a call that runs, else None.
        raw: The call's text as sampled, including tags.
        start: First token of the call, including tags, as an offset in the completion.
        stop: One past its last token.
        reason: Why the status is not "ok", as a sentence; else empty. The policy reads the reason of a malformed call.
        id: The call's id as sampled, in formats in which the policy writes one (Kimi); else None.
        arguments_text: The arguments as sampled, of a call that runs in a format that writes them as JSON; else None.
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
        text: The rest, without reasoning and calls, in order.
        calls: Tool calls, in order.
        reasoning_closed: False if the completion ended inside a reasoning block.
        late_reasoning: The last part of `reasoning`, if it came after text; it is a separate block of the message.
        suspects: Parts of `text`, or of reasoning that was never closed, that look like calls; only recorded.
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
