"""Where a call's history continues its ledger, and what is new there, checked before anything is made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from strands.types.content import Messages
from strands.types.tools import ToolSpec

from tito_core.chat.message_check import InvalidMessageError, check_bounds, check_messages, check_schemas
from tito_core.chat.words import LONG_TEXT
from tito_core.history import Place, find_place, opening_of
from tito_core.ledger.ledger import Ledger
from tito_core.policy import Policy


class Found(NamedTuple):
    """Where a history continues, and how many characters of content are new there."""

    place: Place
    characters: int

    @property
    def is_long(self) -> bool:
        """Return whether what is new takes milliseconds to encode."""
        return self.characters >= LONG_TEXT


def find(
    policy: Policy,
    ledger: Ledger,
    messages: Messages,
    system_prompt: str | None,
    tool_specs: Sequence[ToolSpec] | None,
    state: Mapping[str, Any] | None,
    *,
    may_branch: bool,
    keeps: bool = True,
) -> Found:
    """Find where a history continues, and check the messages that are new there.

    Raises:
        HistoryChangedError: The agent's history changed, and `may_branch` is False.
        InvalidMessageError, UnsupportedContentError: The messages cannot become tokens.
    """
    if not messages:
        raise InvalidMessageError("messages is an empty list: give at least one, such as by agent('Hi').")
    opening = opening_of(system_prompt, tool_specs, policy.template.fingerprint)
    strips = None if keeps else policy.template.strips_thinking
    try:
        place = find_place(ledger, opening, messages, state, may_branch=may_branch, strips=strips)
    except (LookupError, AttributeError, TypeError, ValueError, RecursionError):
        check_messages(messages)  # says what is wrong with them, if that is the reason
        check_schemas(tool_specs)
        check_bounds(messages, "messages")
        raise
    characters = check_messages(messages[place.answered :], place.answered)
    if place.parent is None:
        check_schemas(tool_specs)
        characters += len(system_prompt or "")
    return Found(place, characters)
