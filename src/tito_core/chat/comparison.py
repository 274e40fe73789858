"""Comparison in use: some deltas are compared with the plain rendering of the whole conversation (law 7).

Probes hold no content of the rollout. So the first delta of each path, the first of each shape in a process while the
conversation is short, and a sample of the others are compared, at a rate that keeps a turn's cost linear (law 14).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tito_core.chat.messages import MALFORMED_CALL
from tito_core.chat.referee import Difference, Referee, RefusedError
from tito_core.chat.rendering import TemplateError
from tito_core.ledger.errors import LawViolationError

if TYPE_CHECKING:
    from tito_core.chat.certify import Certificate

MAX_COMPARED_TOKENS = 8192
"""Longest prompt, in tokens, that is rendered again because its shape is new."""
TOKENS_PER_COMPARED_TOKEN = 4
"""New tokens for each token of a sampled comparison."""
WAITS = 32
"""Number of different waits, in turns, between a sample that is paid for and its comparison."""

Shape = tuple[Any, ...]
"""What a template's rendering of a delta may depend on, other than content."""


class Comparisons:
    """Chooses and compares deltas, and remembers the shapes that passed. Thread-safe.

    A comparison renders the whole conversation, so the sample is paid for by new tokens: those since the last one must
    be `TOKENS_PER_COMPARED_TOKEN` times the prompt. First prompts add most tokens, so the sample then waits for 0 to
    `WAITS` - 1 more turns, one more each time: over many rollouts it falls on every turn of conversations of any
    length. It depends only on the turns' token counts. After a difference, all turns under that template are compared.

    Args:
        referee: Renders whole conversations.
        certificate: The template's.
    """

    def __init__(self, referee: Referee, certificate: Certificate) -> None:
        self._referee = referee
        self._moves_text = certificate.moves_text
        self._seen: set[int] = set()  # hashes, since shapes hold whole system prompts
        self._lock = threading.Lock()
        self._unspent = self._samples = self._wait = 0
        self._differed = False

    def due(
        self,
        messages: Sequence[Any],
        parent_end: int,
        system: str | None,
        tools: Sequence[Any] | None,
        length: int,
        text: Callable[..., str],
        added: int,
        first_delta: bool,
    ) -> Callable[[], None] | None:
        """Return a function that compares a delta, or None if no comparison is due.

        Args:
            messages: The whole history.
            parent_end: Number of leading messages up to and including the parent turn; 0 for a first prompt.
            system: The system prompt.
            tools: The tool specifications.
            length: Tokens of the whole prompt.
            text: Renders the delta as text, or the whole of a first prompt; with `nearest=False` in no nearest form.
            added: Tokens of the prompt that were not in the parent turn's prompt.
            first_delta: Whether the parent turn begins its path.

        Returns:
            A function that may run in a thread. It raises `LawViolationError` (law 7) on a difference.
        """
        shape = hash(delta_shape(messages, parent_end, system, tools)) if length <= MAX_COMPARED_TOKENS else None
        is_new = shape is not None and shape not in self._seen
        with self._lock:
            self._unspent += added
            is_sampled = 0 < length * TOKENS_PER_COMPARED_TOKEN <= self._unspent and self._is_next()
        if not (is_sampled or first_delta or is_new or self._differed):
            return None
        uses = [block["toolUse"] for message in messages for block in message["content"] if "toolUse" in block]
        if MALFORMED_CALL in [use["name"] for use in uses]:
            return None  # a malformed call is rendered with feedback of ours
        if parent_end and self._moves_text and {"text", "toolUse"} <= set(_kinds(messages[parent_end - 1])):
            return None

        def compare() -> None:
            try:
                whole = self._referee.render(messages, system, tools)
            except RefusedError:  # the template cannot render the whole history to compare with
                return
            found = text()
            expected = whole[len(whole) - len(found) :] if parent_end else whole
            if expected != found or _text_before_delta(messages[parent_end:], whole, found):
                try:
                    text(nearest=False)
                except TemplateError:  # nothing judges a nearest form
                    return
                self._differed = True
                raise LawViolationError(
                    7,
                    "the prompt tokens that this turn adds differ from the chat template's own rendering "
                    f"{Difference(expected, found)}\nNothing was sent. Earlier turns of this rollout may differ too, "
                    "since only a sample of them was compared: do not train on it. Use another chat template and "
                    "report this one. Until then every turn under this template is compared.",
                )
            if shape is not None:
                self._seen.add(shape)

        return compare

    def _is_next(self) -> bool:
        """Return whether the wait before a sample that is paid for has ended, and begin the next one."""
        if self._wait:
            self._wait -= 1
            return False
        self._samples += 1
        self._unspent, self._wait = 0, self._samples % WAITS
        return True


def delta_shape(messages: Sequence[Any], parent_end: int, system: str | None, tools: Sequence[Any] | None) -> Shape:
    """Return the shape of a delta or, where `parent_end` is 0, of a first prompt.

    It holds the system prompt, tool names, counts of earlier messages and tool results, and the kinds of the blocks
    from the parent turn on; of a first prompt, those of all messages.
    """
    opening = system, tuple(tool["name"] for tool in tools or ())
    if not parent_end:
        return (*opening, *map(_kinds, messages))
    before = messages[: parent_end - 1]
    earlier = sum(["toolResult" in block for message in before for block in message["content"][:1]])
    return (*opening, parent_end, earlier, *map(_kinds, messages[parent_end - 1 :]))


def _text_before_delta(new: Sequence[Any], whole: str, found: str) -> bool:
    """Return whether the rendering shows a text of the new messages before the delta instead of in it."""
    return any(text.strip() not in found and text.strip() in whole for message in new for text in _texts(message))


def _texts(message: Any) -> Iterator[str]:
    for block in message["content"]:
        yield from (item["text"] for item in block.get("toolResult", {}).get("content", ()) if "text" in item)
        if "text" in block:
            yield block["text"]


def _kinds(message: Any) -> tuple[Any, ...]:
    kinds = [message["role"]]
    for block in message["content"]:
        images, result = 0, block.get("toolResult")
        for item in result["content"] if type(result) is dict else ():
            images += "image" in item
        for kind in [*block][:1] or [""]:
            kinds += [f"{kind} with {images} images" if images else kind]
    return (*kinds,)
