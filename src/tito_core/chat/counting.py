"""What messages add to a prompt, counted from their own text: Strands asks for it before every turn.

To render them takes as long as the turn's own delta, and would count what a template writes before all messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from strands.types.content import Message, Messages

from tito_core.chat.delta import DeltaSource
from tito_core.chat.encoder import ContentSafeEncoder
from tito_core.chat.messages import MessageFormat, TemplateMessage, template_messages
from tito_core.chat.probes import LOOK, assistant_message, call_message, result_message, user_message
from tito_core.chat.rendering import Rendering, TemplateError
from tito_core.chat.traced import Traced

_AGAIN = "tool, again"
"""The role of a result right after another, which templates write together."""
_ASKED, _LOOK, _SEEN = user_message("."), ("look", {"at": "it"}), [{"text": "."}]
_ROUNDS: Mapping[str, tuple[Message, Messages]] = {
    "user": (assistant_message("."), [_ASKED]),
    "tool": (call_message(_LOOK), [result_message(_SEEN)]),
    _AGAIN: (call_message(_LOOK, _LOOK), [result_message(_SEEN, _SEEN)]),
}
"""By role of a template's message: an answer, and what comes after it, with one more message of that role."""


@dataclass(frozen=True, slots=True)
class Counting:
    """Counts messages for one template. Build it with `Counting.of`; immutable.

    Attributes:
        around: Tokens that the template writes around a message's text, by role; without those that it refuses.
    """

    encoder: ContentSafeEncoder
    message_format: MessageFormat
    around: Mapping[str, int]

    @classmethod
    def of(cls, source: DeltaSource) -> Counting:
        """Learn from a template's own deltas what it writes around a question and around a tool's result."""
        around: dict[str, int] = {}
        learned = cls(source.encoder, source.rendering.message_format, around)
        without, begun = (
            len(source.encoder.encode(_rendered(source.rendering, prompt)).ids) for prompt in (False, True)
        )
        for role, (answer, more) in _ROUNDS.items():
            try:
                tail = source.tail(answer, more, [LOOK], [_ASKED])
            except TemplateError:
                continue
            written = len(source.encoder.encode(tail.text, tail.start, tail.controls).ids)
            around[role] = 0  # so that the others, and its text, are counted
            around[role] = written - (begun - without) - (learned.added(more) or 0)
        return learned

    def added(self, messages: Messages) -> int | None:
        """Count about what questions and results add to a prompt, without the generation prompt.

        Each message's text is counted by itself: where it would merge with what the template writes around it, or the
        template strips its blanks, the count is off by as much.

        Returns:
            The count; None where there are other messages.

        Raises:
            UnsupportedContentError: A block that cannot become text.
        """
        count, before = 0, ""
        for message in template_messages(messages, message_format=self.message_format):
            role = message["role"]
            around = self.around.get(_AGAIN if role == before == "tool" else role)
            if around is None:
                return None
            count += around + self.encoder.count(_text(message))
            before = role
        return count


def _rendered(rendering: Rendering, prompt: bool) -> Traced:
    return rendering.of_messages([_ASKED], tool_specs=rendering.usual_tools, generation_prompt=prompt)


def _text(message: TemplateMessage) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
