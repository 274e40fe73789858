"""Malformed calls of a turn, and the error that names them (law 9)."""

from __future__ import annotations

from strands.types.content import Message

from tito_core.parsing.parsed import CallStatus, ParsedCall, ParsedTurn
from tito_core.parsing.said import shortened

_SHOWN = 120
"""Characters of a call's raw text that an error shows."""


class MalformedCallError(ValueError):
    """The policy made a malformed call, and `malformed_calls="raise"` asked to be told. No call of the turn ran.

    The turn is in the ledger: the policy sampled its tokens, so they count, and a turn that Strands does not store is
    still whole there (law 5).

    Attributes:
        calls: The malformed calls of the turn.
        turn: The turn's index in the ledger.
        message: The turn as a message without calls, their raw text kept. Appended to the agent's messages, the
            conversation goes on from the turn.
    """

    def __init__(self, calls: tuple[ParsedCall, ...], turn: int, message: Message) -> None:
        first = calls[0]
        more = f" So were {len(calls) - 1} more of its calls." if len(calls) > 1 else ""
        super().__init__(
            f"Law 9: the policy's call of {first.name or 'an unknown tool'} in turn {turn} is malformed and was not "
            f"executed: {first.reason} It says {shortened(first.raw, _SHOWN)}.{more} The turn is committed, since its "
            "tokens were sampled; malformed_calls='feedback' would let the policy read the reason."
        )
        self.calls = calls
        self.turn = turn
        self.message = message


def malformed_of(parsed: ParsedTurn) -> tuple[ParsedCall, ...]:
    """Give the malformed calls of a turn."""
    return tuple(call for call in parsed.calls if call.status == CallStatus.MALFORMED)
