"""Estimate the prompt tokens that messages add, which Strands requests before every turn.

The estimate avoids rendering them, which takes as long as the turn's delta and includes the template's opening text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from strands.types.content import Message, Messages

from tito_core.chat.delta import DeltaSource
from tito_core.chat.encoder import ContentSafeEncoder
from tito_core.chat.messages import ImagePart, MessageFormat, TemplateMessage, template_messages
from tito_core.chat.probes import LOOK, assistant_message, call_message, result_message, user_message
from tito_core.chat.rendering import Rendering, TemplateError
from tito_core.chat.traced import Traced

USUAL_IMAGE_TOKENS = 256
"""Tokens of an image in an estimate; only the server knows the number: that of a 512 x 512 picture in Qwen3-VL."""
_AGAIN = "tool, again"
"""Pseudo-role of a tool result that follows another; templates group them."""
_QUESTION, _LOOK, _RESULT = user_message("."), ("look", {"at": "it"}), [{"text": "."}]
_ROUNDS: Mapping[str, tuple[Message, Messages]] = {
    "user": (assistant_message("."), [_QUESTION]),
    "tool": (call_message(_LOOK), [result_message(_RESULT)]),
    _AGAIN: (call_message(_LOOK, _LOOK), [result_message(_RESULT, _RESULT)]),
}
"""For each role of a template message: an answer, and the messages after it, one of that role more than before."""


@dataclass(frozen=True, slots=True)
class Counting:
    """Counts messages for one template. Build it with `Counting.of`; immutable.

    Attributes:
        around: Tokens that the template adds around a message's text, by role. Roles that it refuses are missing.
    """

    encoder: ContentSafeEncoder
    message_format: MessageFormat
    around: Mapping[str, int]

    @classmethod
    def of(cls, source: DeltaSource) -> Counting:
        """Measure, in a template's own deltas, the tokens around a question and around a tool result."""
        around: dict[str, int] = {}
        learned = cls(source.encoder, source.rendering.message_format, around)
        without, begun = (
            len(source.encoder.encode(_rendered(source.rendering, prompt)).ids) for prompt in (False, True)
        )
        for role, (answer, more) in _ROUNDS.items():
            try:
                tail = source.tail(answer, more, [LOOK], [_QUESTION])
            except TemplateError:
                continue
            written = len(source.encoder.encode(tail.text, tail.start, tail.controls).ids)
            around[role] = 0  # `added` returns None for a role that is missing
            around[role] = written - (begun - without) - (learned.added(more) or 0)
        return learned

    def added(self, messages: Messages) -> int | None:
        """Return about how many tokens user messages add to a prompt, without the generation prompt.

        Each text is counted alone. The count is off where a text merges with the template's text around it, or where
        the template strips blanks.

        Returns:
            The count; None if there are messages of other roles.

        Raises:
            UnsupportedContentError: A block cannot become text.
        """
        count, before = 0, ""
        for message in template_messages(messages, message_format=self.message_format):
            role = message["role"]
            around = self.around.get(_AGAIN if role == before == "tool" else role)
            if around is None:
                return None
            count += around + self.encoder.count(_text(message)) + USUAL_IMAGE_TOKENS * _images(message)
            before = role
        return count


def _rendered(rendering: Rendering, prompt: bool) -> Traced:
    return rendering.of_messages([_QUESTION], tool_specs=rendering.default_tools, generation_prompt=prompt)


def _text(message: TemplateMessage) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _images(message: TemplateMessage) -> int:
    content = message["content"]
    return 0 if isinstance(content, str) else sum(isinstance(part, ImagePart) for part in content)
