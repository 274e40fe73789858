"""Runtime checks: the first delta of each shape is compared with the plain rendering before it is sent (law 7)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tito_core.chat.certificate import Certificate
from tito_core.chat.messages import MALFORMED_CALL
from tito_core.chat.referee import Referee, RefusedError
from tito_core.chat.verdict import Difference
from tito_core.ledger.errors import LawViolationError

MOVED = "text besides calls"
"""Prefix of the rewrite that marks a template which moves text that was sampled with calls."""
MAX_COMPARED_TOKENS = 8192
"""Longest prompt, in tokens, that is rendered again for a comparison."""

Shape = tuple[Any, ...]
"""What a template's rendering of a delta may depend on, other than content."""


class Comparisons:
    """Compares the first delta of each shape and remembers the shapes that passed. Thread-safe.

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
        """Return a function that compares a delta, or None if no comparison is due.

        Args:
            messages: The whole history.
            answered: Number of leading messages up to and including the parent turn; 0 for a first prompt.
            system: The system prompt.
            tools: The tool specifications.
            length: Tokens of the whole prompt; prompts above `MAX_COMPARED_TOKENS` are not compared.
            text: Renders the delta as text, or the whole of a first prompt.

        Returns:
            A function that may run in a thread. It raises `LawViolationError` (law 7) on a difference.
        """
        if length > MAX_COMPARED_TOKENS or any(_calls(message, MALFORMED_CALL) for message in messages):
            return None  # a malformed call is rendered with feedback of ours
        if answered and self._moves_text and {"text", "toolUse"} <= set(_kinds(messages[answered - 1])):
            return None
        shape = shape_of(messages, answered, system, tools)
        if shape in self._seen:
            return None

        def compare() -> None:
            try:
                whole = self._referee.render(messages, system, tools)
            except RefusedError:  # the template cannot render the whole history to compare with
                return
            found = text()
            expected = whole[len(whole) - len(found) :] if answered else whole
            if expected != found or _text_before_delta(messages[answered:], whole, found):
                raise LawViolationError(
                    7,
                    "the prompt tokens that this turn adds differ from the chat template's own rendering "
                    f"{Difference(expected, found)}\nNothing was sent. Use another chat template and report this one.",
                )
            self._seen.add(shape)

        return compare


def shape_of(messages: Sequence[Any], answered: int, system: str | None, tools: Sequence[Any] | None) -> Shape:
    """Return the shape of a delta or, where `answered` is 0, of a first prompt.

    It holds the system prompt, tool names, counts of earlier messages and tool results, and the kinds of the blocks
    from the parent turn on; of a first prompt, those of all messages.
    """
    opening = system, tuple(tool["name"] for tool in tools or ())
    if not answered:
        return (*opening, *map(_kinds, messages))
    earlier = sum("toolResult" in block for message in messages[: answered - 1] for block in message["content"][:1])
    return (*opening, answered, earlier, *map(_kinds, messages[answered - 1 :]))


def _calls(message: Any, name: str) -> bool:
    return any(block.get("toolUse", {}).get("name") == name for block in message["content"])


def _text_before_delta(new: Sequence[Any], whole: str, found: str) -> bool:
    """Return whether the rendering shows a text of the new messages before the delta instead of in it."""
    return any(text.strip() not in found and text.strip() in whole for message in new for text in _texts(message))


def _texts(message: Any) -> Iterator[str]:
    for block in message["content"]:
        yield from (item["text"] for item in block.get("toolResult", {}).get("content", ()) if "text" in item)
        if "text" in block:
            yield block["text"]


def _kinds(message: Any) -> tuple[str, ...]:
    return (message["role"], *(_kind(block) for block in message["content"]))


def _kind(block: Any) -> str:
    kind, result = next(iter(block), ""), block.get("toolResult")
    images = sum("image" in item for item in result["content"]) if isinstance(result, dict) else 0
    return f"{kind} with {images} images" if images else str(kind)
