"""A chat template bound to its tokenizer: first prompts, and the delta that each later turn adds."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateSyntaxError
from strands.types.content import Message, Messages
from strands.types.tools import ToolSpec

from tito_core.chat.encoder import ContentSafeEncoder, EncodedText
from tito_core.chat.environment import compile_template, render
from tito_core.chat.messages import TemplateMessage, template_messages, template_tools
from tito_core.chat.traced import UNKNOWN, Traced, sources
from tito_core.ledger.provenance import Provenance

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ASKED: Message = {"role": "user", "content": [{"text": "."}]}
_ANSWERED: Message = {"role": "assistant", "content": [{"text": "."}]}
_CALLED: Message = {
    "role": "assistant",
    "content": [{"toolUse": {"toolUseId": "call_1", "name": "look", "input": {"at": "it"}}}],
}
_RETURNED: Message = {
    "role": "user",
    "content": [{"toolResult": {"toolUseId": "call_1", "status": "success", "content": [{"text": "seen"}]}}],
}
_LOOK: ToolSpec = {
    "name": "look",
    "description": "Look at a place.",
    "inputSchema": {"json": {"type": "object", "properties": {"at": {"type": "string"}}}},
}


class TemplateError(ValueError):
    """The chat template is missing, refuses the messages, or its turns cannot be told apart."""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """Renders Strands messages with a tokenizer's own chat template.

    Build it with `ChatTemplate.of`. It is immutable and safe to share between threads.

    Attributes:
        closer_id: The token that ends an assistant turn (law 7: inserted once, never doubled).
        fingerprint: Digest of the template, the tokenizer's control tokens and the template arguments.
    """

    encoder: ContentSafeEncoder
    arguments: Mapping[str, Any]
    closer_id: int
    fingerprint: str
    _compiled: Any

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, **arguments: Any) -> ChatTemplate:
        """Bind a tokenizer's chat template and check that its turns can be extended.

        Args:
            tokenizer: A fast tokenizer with a chat template.
            **arguments: Template arguments fixed for a rollout, such as `enable_thinking=False`.

        Raises:
            TemplateError: No template, or one whose deltas do not equal its own rendering.
        """
        source = tokenizer.chat_template
        if not isinstance(source, str):
            has = f"several chat templates ({', '.join(sorted(source))})" if source else "no chat template"
            raise TemplateError(
                f"The tokenizer {tokenizer.name_or_path!r} has {has}, so messages cannot become tokens: "
                "set tokenizer.chat_template to one, or load the model's instruct version."
            )
        encoder = ContentSafeEncoder(tokenizer)
        variables = {**tokenizer.special_tokens_map, **arguments}
        try:
            compiled = compile_template(source)
        except TemplateSyntaxError as error:
            raise TemplateError(f"The chat template is no valid Jinja: {error} (line {error.lineno}).") from error
        text = _render(compiled, variables, template_messages([_ASKED, _ANSWERED, _ASKED]), None, False)
        _check_encoding(encoder, tokenizer, text)
        # The probe's text shows what else a template writes, such as the date.
        fixed = (source, sorted(encoder.added.items()), sorted(variables.items()), str.__str__(text))
        digest = hashlib.sha256(repr(fixed).encode())
        template = cls(encoder, variables, _closer(encoder, text, 1), digest.hexdigest(), compiled)
        template._check_deltas()
        return template

    def first_prompt(
        self, messages: Messages, system_prompt: str | None, tool_specs: Sequence[ToolSpec] | None
    ) -> EncodedText:
        """Render and encode a whole history with the generation prompt: the delta of a root turn."""
        translated = template_messages(messages, system_prompt)
        return self.encoder.encode(self._render(translated, template_tools(tool_specs), True))

    def delta(self, answered: Message, new: Messages, last_output_id: int | None) -> EncodedText:
        """Render what comes after an assistant turn: its missing closer, the new messages, the generation prompt.

        Cost grows with the new messages only (law 14).

        Args:
            answered: The assistant message as Strands stores it; some templates quote its calls in the results.
            new: Messages after it, none of them the assistant's.
            last_output_id: The last token that the engine sampled, or None for an empty output. When it is not the
                closer, the closer comes first with provenance `INSERTED`.
        """
        encoded = self.encoder.encode(self._after_answer(answered, new))
        if last_output_id == self.closer_id:
            return encoded
        ids = np.concatenate([np.array([self.closer_id], np.int32), encoded.ids])
        provenance = np.concatenate([np.array([Provenance.INSERTED], np.uint8), encoded.provenance])
        return EncodedText(ids, provenance)

    def count_tokens(self, messages: Messages, system_prompt: str | None, tool_specs: Sequence[ToolSpec] | None) -> int:
        """Count the tokens that a history would take as a first prompt, without the generation prompt."""
        translated = template_messages(messages, system_prompt)
        return len(self.encoder.encode(self._render(translated, template_tools(tool_specs), False)).ids)

    def _render(
        self, messages: list[TemplateMessage], tools: list[dict[str, Any]] | None, generation_prompt: bool
    ) -> Traced:
        return _render(self._compiled, self.arguments, messages, tools, generation_prompt)

    def _after_answer(self, answered: Message, new: Messages) -> Traced:
        """Render a minimal conversation around the real answer and cut right after the answer's closer."""
        content = [block for block in answered["content"] if "toolUse" in block]
        stand_in: Message = {"role": "assistant", "content": content} if content else _ANSWERED
        text = self._render(template_messages([_ASKED, stand_in, *new]), None, True)
        return _cut(text, _closer_end(self.encoder, text, 1, self.closer_id), len(text))

    def _check_deltas(self) -> None:
        """Compare deltas with the template's own rendering of a longer conversation, and refuse on a difference."""
        for answered, new in ((_ANSWERED, [_ASKED]), (_CALLED, [_RETURNED]), (_CALLED, [_RETURNED, _ASKED])):
            for system, tools in ((None, None), ("Look.", [_LOOK])):
                history = template_messages([_ASKED, _ANSWERED, _ASKED, answered, *new], system)
                try:
                    whole = self._render(history, template_tools(tools), True)
                except TemplateError:
                    if answered is _ANSWERED and system is None:
                        raise
                    continue  # a template without tools, or without a system prompt, refuses by itself in use
                expected = _cut(whole, _closer_end(self.encoder, whole, 3, self.closer_id), len(whole))
                found = self._after_answer(answered, new)
                if str.__ne__(expected, found):
                    raise TemplateError(
                        "The chat template renders a message differently after a longer history, so a turn's prompt "
                        f"cannot extend the turn before it: expected {str.__str__(expected)!r}, "
                        f"got {str.__str__(found)!r}."
                    )


def _render(
    compiled: Any,
    variables: Mapping[str, Any],
    messages: list[TemplateMessage],
    tools: list[dict[str, Any]] | None,
    generation_prompt: bool,
) -> Traced:
    values = {**variables, "messages": messages, "tools": tools, "documents": None}
    roles = [message["role"] for message in messages]
    try:
        text = render(compiled, {**values, "add_generation_prompt": generation_prompt})
    except Exception as error:  # a template is a program: it raises whatever its author made it raise
        why = str(error).rstrip(".")
        raise TemplateError(f"The chat template refused messages with roles {roles}: {why}.") from error
    shown = {origin for _, _, origin in text.spans}
    for position, message in enumerate(messages):
        # Of an answer's text a template may show nothing, where it strips reasoning.
        told = message.get("tool_calls") if message["role"] == "assistant" else message["content"].strip()
        if told and shown.isdisjoint({UNKNOWN, *sources(told)}):
            raise TemplateError(
                f"The chat template leaves out message {position} of those with roles {roles}: use one that renders "
                f"the role {message['role']!r}."
            )
    return text


def _check_encoding(encoder: ContentSafeEncoder, tokenizer: PreTrainedTokenizerBase, text: Traced) -> None:
    """Refuse a tokenizer that, on harmless text, gives other ids than the encoder."""
    expected: list[int] = tokenizer.backend_tokenizer.encode(str.__str__(text), add_special_tokens=False).ids
    found = encoder.encode(text).ids.tolist()
    if found != expected:
        raise TemplateError(
            f"The tokenizer {tokenizer.name_or_path!r} cannot be followed with its control tokens apart from content: "
            f"for {str.__str__(text)!r} it gives {expected}, and in parts {found}."
        )


def _cut(text: Traced, start: int, stop: int) -> Traced:
    piece = text[start:stop]
    return piece if isinstance(piece, Traced) else Traced.of(piece, ())


def _closer(encoder: ContentSafeEncoder, text: Traced, source: int) -> int:
    """Find the control token that follows the content of message `source`."""
    end = max((stop for _, stop, origin in text.spans if origin == source), default=len(text))
    for start, _, token in encoder.controls(text):
        if start >= end:
            return token
    raise TemplateError("The chat template ends assistant turns with no control token, so turns cannot be told apart.")


def _closer_end(encoder: ContentSafeEncoder, text: Traced, source: int, closer_id: int) -> int:
    """Find the character after the closer of message `source`, which later messages may quote."""
    following = min((start for start, _, origin in text.spans if origin > source), default=len(text))
    own = max((stop for _, stop, origin in text.spans if origin == source and stop <= following), default=len(text))
    for start, stop, token in encoder.controls(text):
        if start >= own and token == closer_id:
            return stop
    raise TemplateError(
        f"The chat template does not end an assistant turn with its closer (token {closer_id}); found no place to "
        "continue from."
    )
