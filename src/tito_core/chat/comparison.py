"""The referee in use: the first delta of each shape is compared with the plain rendering before it is sent (law 7)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tito_core.chat.certificate import Certificate
from tito_core.chat.messages import MALFORMED_CALL
from tito_core.chat.referee import Referee, RefusedError
from tito_core.chat.verdict import Difference
from tito_core.ledger.errors import LawViolationError

MOVED = "text besides calls"
"""What a certificate's rewrites say of a template that writes such text elsewhere than the policy sampled it."""
LONGEST = 8192
"""Tokens of the longest conversation that is rendered anew to be compared."""

Shape = tuple[Any, ...]
"""What a template can tell deltas apart by, other than content."""


class Comparisons:
    """Remembers which shapes of deltas were right. Threads may share it.

    Args:
        referee: Renders whole conversations.
        certificate: The template's.
    """

    def __init__(self, referee: Referee, certificate: Certificate) -> None:
        self._referee = referee
        self._moves_text = any(line.startswith(MOVED) for line in certificate.rewrites)
        self._seen: set[Shape] = set()

    def due(
        self,
        messages: Sequence[Any],
        answered: int,
        system: str | None,
        tools: Sequence[Any] | None,
        length: int,
        text: Callable[[], str],
    ) -> Callable[[], None] | None:
        """Return what compares a delta, where its shape was not compared yet; it may run in a thread.

        Args:
            messages: The whole history.
            answered: Number of leading messages up to the turn that the delta follows; 0 where it is a first prompt.
            system: The system prompt.
            tools: The tool specifications.
            length: Tokens of the whole prompt; long ones are not compared.
            text: Renders the delta as text; a first prompt is compared whole.

        Returns:
            A function that may run in a thread and raises `LawViolationError` (law 7) where they differ, or None.
        """
        if length > LONGEST or any(_calls(message, MALFORMED_CALL) for message in messages):
            return None  # of a malformed call the policy reads our own words
        if answered and self._moves_text and {"text", "toolUse"} <= set(_kinds(messages[answered - 1])):
            return None
        shape = shape_of(messages, answered, system, tools)
        if shape in self._seen:
            return None

        def compare() -> None:
            try:
                whole = self._referee.render(messages, system, tools)
            except RefusedError:  # the template takes no such history as a whole: there is nothing to compare with
                return
            found = text()
            expected = whole[len(whole) - len(found) :] if answered else whole
            if expected != found or _left_behind(messages[answered:], whole, found):
                raise LawViolationError(
                    7,
                    "what this turn adds to the prompt is not the chat template's own rendering. It differs "
                    f"{Difference(expected, found)}\nNothing was sent. Use another chat template, and report this one.",
                )
            self._seen.add(shape)

        return compare


def shape_of(messages: Sequence[Any], answered: int, system: str | None, tools: Sequence[Any] | None) -> Shape:
    """Return the shape of a delta: the system prompt, the tools, how many messages and results came before, and the
    kinds of the blocks in its turn and in what follows it; of a first prompt, those of all messages.
    """
    opened = system, tuple(tool["name"] for tool in tools or ())
    if not answered:
        return (*opened, *map(_kinds, messages))
    earlier = sum("toolResult" in block for message in messages[: answered - 1] for block in message["content"][:1])
    return (*opened, answered, earlier, *map(_kinds, messages[answered - 1 :]))


def _calls(message: Any, name: str) -> bool:
    return any(block.get("toolUse", {}).get("name") == name for block in message["content"])


def _left_behind(new: Sequence[Any], whole: str, found: str) -> bool:
    """Return whether a text of the new messages stands before a delta instead of in it."""
    return any(text.strip() not in found and text.strip() in whole for message in new for text in _texts(message))


def _texts(message: Any) -> Iterator[str]:
    for block in message["content"]:
        yield from (item["text"] for item in block.get("toolResult", {}).get("content", ()) if "text" in item)
        if "text" in block:
            yield block["text"]


def _kinds(message: Any) -> tuple[str, ...]:
    return (message["role"], *(next(iter(block), "") for block in message["content"]))
