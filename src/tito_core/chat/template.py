"""A chat template bound to its tokenizer: first prompts, and the certified deltas of later turns."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strands.types.content import Message, Messages
from strands.types.tools import ToolSpec

from tito_core.chat.bounds import excess_of
from tito_core.chat.certify import HEAD, Certificate, CertificateStore, ContentTokens, Thinking, certified
from tito_core.chat.comparison import Comparisons
from tito_core.chat.delta import DeltaSource
from tito_core.chat.encoder import ContentSafeEncoder, EncodedText
from tito_core.chat.ending import Opened, OpenTags, cut
from tito_core.chat.message_check import describe
from tito_core.chat.messages import (
    TOOLS_SOURCE,
    ImagePart,
    MessageFormat,
    TemplateMessage,
    template_messages,
    template_tools,
)
from tito_core.chat.probes import LOOK, assistant_message, call_message, cases, result_message, user_message
from tito_core.chat.referee import Referee
from tito_core.chat.rendering import Rendering, TemplateError
from tito_core.chat.traced import UNKNOWN, Traced

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """Renders Strands messages with a tokenizer's own chat template.

    Build it with `ChatTemplate.of`. It is immutable and safe to share between threads.

    Attributes:
        closer_id: The token that usually ends an assistant turn (law 7: inserted once, never doubled).
        stop_ids: All tokens that end an assistant turn, the usual one first. They include those that close a turn of
            calls or the last answer and, if nothing closes a turn, those that open the next message.
        fingerprint: Digest of the template, the tokenizer's control tokens and the template arguments.
        certificate: The evidence that the deltas are right.
        deltas: The candidate that renders the deltas.
    """

    encoder: ContentSafeEncoder
    rendering: Rendering
    closer_id: int
    stop_ids: tuple[int, ...]
    fingerprint: str
    certificate: Certificate
    deltas: DeltaSource
    _counting: Counting
    _comparisons: Comparisons
    _warned: set[str] = field(default_factory=set)

    @classmethod
    def of(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        *,
        content_tokens: ContentTokens = "inert",
        markup: Collection[str] = (),
        certificates: Path | None = None,
        **arguments: Any,
    ) -> ChatTemplate:
        """Bind a tokenizer's chat template and certify its deltas.

        Args:
            tokenizer: A fast tokenizer with a chat template.
            content_tokens: "inert", or "as-template" to let content become control tokens, as in the tokenizer itself.
            markup: Texts of added tokens that the parser reads as control tokens, besides those of a known form.
            certificates: Folder of cached certificates; by default in the user's cache directory.
            **arguments: Template arguments fixed for a rollout, such as `enable_thinking=False`.

        Raises:
            TemplateError: The tokenizer has no chat template, or its deltas do not equal its own rendering.
        """
        source = tokenizer.chat_template
        if not isinstance(source, str):
            raise TemplateError(_without_template(tokenizer))
        if content_tokens not in ("inert", "as-template"):
            raise ValueError(f"content_tokens must be 'inert' or 'as-template', not {describe(content_tokens)}.")
        encoder = ContentSafeEncoder(tokenizer, inert=content_tokens == "inert", markup=markup)
        variables = {**tokenizer.special_tokens_map, **arguments}
        store = CertificateStore(certificates)
        if not store.holds(store.key_of(source, variables, encoder, content_tokens)):
            _check_bounds(source, variables)
        rendering = Rendering.of(source, variables)
        text = rendering.of_messages(
            [user_message("."), assistant_message("."), user_message(".")],
            tool_specs=rendering.default_tools,
            generation_prompt=False,
        )
        _check_encoding(encoder, tokenizer, text)
        referee = Referee(source, rendering.variables, lambda: rendering.now)
        image_token = getattr(tokenizer, "image_token", None)
        certificate, deltas = certified(source, rendering, encoder, referee, content_tokens, image_token, store)
        if head := [rewrite for rewrite in certificate.rewrites if rewrite.startswith(HEAD)]:
            logger.warning("rewrites=<%s> | the policy keeps reading the head that its first prompt had", head[0])
        # The rendered text includes what else a template may write, such as the date.
        fixed = (source, sorted(encoder.added.items()), sorted(variables.items()), content_tokens, str.__str__(text))
        digest = hashlib.sha256(repr(fixed).encode())
        deltas = replace(deltas, rendering=replace(rendering, nearest=True))
        return cls(
            encoder,
            deltas.rendering,
            deltas.stops[0],
            deltas.stops,
            digest.hexdigest(),
            certificate,
            deltas,
            Counting.of(deltas),
            Comparisons(referee, certificate),
        )

    @property
    def placeholder_id(self) -> int | None:
        """Id of the token that the template writes for an image, or None if it takes no images."""
        placeholder = self.certificate.placeholder
        return None if placeholder is None else self.encoder.added[placeholder]

    @classmethod
    def certify(
        cls, tokenizer: PreTrainedTokenizerBase, *, content_tokens: ContentTokens = "inert", **arguments: Any
    ) -> Certificate:
        """Return the certificate of a tokenizer's chat template; print its `lines()`.

        Raises:
            TemplateError: As `ChatTemplate.of`.
        """
        return cls.of(tokenizer, content_tokens=content_tokens, **arguments).certificate

    def first_prompt(
        self, messages: Messages, system_prompt: str | None, tool_specs: Sequence[ToolSpec] | None
    ) -> EncodedText:
        """Return the tokens of a whole history with the generation prompt: the delta of a root turn."""
        if self.certificate.needs_tools and not tool_specs:
            raise TemplateError("The chat template works only with tools. Give the agent at least one tool.")
        text = self.rendering.of_messages(messages, system_prompt, tool_specs)
        if tool_specs and not self._warned and _SHOWS_TOOLS.isdisjoint(origin for _, _, origin in text.spans):
            self._warned.add("tools")
            logger.warning(
                "tools=<%s> | the chat template shows no tools, so the policy never sees the agent's. Use a template "
                "that shows them, such as that of the model's instruct version, or describe them in the system prompt",
                ", ".join(spec["name"] for spec in tool_specs),
            )
        return self.encoder.encode(text)

    def delta(
        self,
        answer: Message,
        new: Messages,
        last_output_id: int | None,
        *,
        opened: Opened | OpenTags = Opened.MESSAGE,
        tool_specs: Sequence[ToolSpec] | None = None,
        history: Messages | None = None,
        system_prompt: str | None = None,
    ) -> EncodedText:
        """Return the tokens after an assistant turn: missing closers, the new messages, the generation prompt.

        Cost grows with the new messages only (law 14). After a word that switches the template, the history up to it is
        rendered too.

        Args:
            answer: The assistant message as Strands stores it; some templates quote its calls in the results.
            new: The messages after it, without assistant messages.
            last_output_id: The last token that the engine sampled, or None for an empty output. The missing closers
                come first, with provenance `INSERTED`. A stop token that also opens the next message is not repeated.
            opened: The part that a truncated turn left open; of a call, the tags that its parser found open.
            tool_specs: The rollout's tools, an empty list for none; required by templates that render them with later
                messages.
            history: Messages before the answer; required by templates whose deltas depend on earlier messages.
            system_prompt: The rollout's system prompt, which switches some templates.

        Raises:
            TemplateError: The template refuses the messages, or needs `tool_specs` or `history`.
        """
        return self.deltas.delta(answer, new, last_output_id, opened, tool_specs, history, system_prompt)

    def tail(
        self,
        answer: Message,
        new: Messages,
        *,
        tool_specs: Sequence[ToolSpec] | None = None,
        history: Messages | None = None,
        system_prompt: str | None = None,
    ) -> Traced:
        """Return the text of a delta without the turn's closers; arguments and errors as `delta`."""
        tail = self.deltas.tail(answer, new, tool_specs, history, system_prompt)
        return cut(tail.text, tail.start)

    def comparison(
        self,
        messages: Messages,
        parent_end: int,
        system_prompt: str | None,
        tool_specs: Sequence[ToolSpec] | None,
        length: int,
        *,
        added: int = 0,
        first_delta: bool = False,
        rendered: str | None = None,
    ) -> Callable[[], None] | None:
        """Return a function that compares a delta with the template's plain rendering; see `Comparisons.due`.

        `rendered` is the delta's text, which is rendered again where it was not kept.
        """

        def text(nearest: bool = True) -> str:
            if nearest and rendered is not None:
                return rendered
            rendering = replace(self.rendering, nearest=nearest)
            if not parent_end:
                return str.__str__(rendering.of_messages(messages, system_prompt, tool_specs))
            turn, new, history = messages[parent_end - 1], messages[parent_end:], messages[: parent_end - 1]
            tail = replace(self.deltas, rendering=rendering).tail(turn, new, tool_specs or (), history, system_prompt)
            return str.__str__(cut(tail.text, tail.start))

        return self._comparisons.due(
            messages, parent_end, system_prompt, tool_specs, length, text, added=added, first_delta=first_delta
        )

    def strips_thinking(self, new: Messages) -> bool:
        """Return whether the template strips the reasoning of earlier answers when these messages follow."""
        match self.certificate.thinking:
            case Thinking.KEPT:
                return False
            case Thinking.STRIPPED:
                contents = (message["content"] for message in new if message["role"] == "user")
                return any("text" in block or "image" in block for content in contents for block in content)
            case Thinking.ALWAYS_STRIPPED:
                return bool(new)
            case Thinking.NOT_SHOWN:
                return True

    def count_tokens(self, messages: Messages, system_prompt: str | None, tool_specs: Sequence[ToolSpec] | None) -> int:
        """Return the number of tokens of a history as a first prompt, without the generation prompt."""
        text = self.rendering.of_messages(messages, system_prompt, tool_specs, generation_prompt=False)
        return len(self.encoder.encode(text).ids)

    def added_tokens(self, messages: Messages) -> int:
        """Return about how many tokens messages add to a non-empty prompt, without the generation prompt.

        Strands asks before every turn but the first. Rendering the messages takes as long as the turn's delta, so user
        messages are counted by their text plus the template's usual text around it, which is much faster than
        `count_tokens` and excludes the template's opening text. Other messages are counted by `count_tokens`.
        """
        added = self._counting.added(messages)
        return self.count_tokens(messages, None, self.rendering.default_tools) if added is None else added

    @property
    def arguments(self) -> Mapping[str, Any]:
        """Return the template's variables besides messages and tools."""
        return self.rendering.variables


_SHOWS_TOOLS = {TOOLS_SOURCE, UNKNOWN}
"""Trace sources of a rendering that shows tools."""


def _without_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return why a tokenizer has no usable chat template, and what to do."""
    name, several = tokenizer.name_or_path, tokenizer.chat_template
    if several:
        return (
            f"The tokenizer {name!r} has several chat templates ({', '.join(sorted(several))}); one is needed. Set "
            "tokenizer.chat_template to the text of one."
        )
    return (
        f"The tokenizer {name!r} has no chat template; one is needed. Load the tokenizer of the model's instruct "
        "version. DeepSeek V3.2, V4 and V4.1 ship none, since their servers write prompts in Python code. Set "
        "tokenizer.chat_template to the text of a Jinja template that writes what that code writes, and check it "
        "first: tito template check FILE.jinja --tokenizer NAME."
    )


def _check_bounds(source: str, variables: Mapping[str, Any]) -> None:
    """Check that a template ends, before it runs in this process.

    Raises:
        TemplateError: It takes too much time or memory.
    """
    probes = [
        {
            "messages": template_messages([*case.history, *case.new], case.system, message_format=message_format),
            "tools": template_tools(case.tools),
            "add_generation_prompt": True,
        }
        for case in cases()
        if case.system is not None
        for message_format in (MessageFormat(), MessageFormat(parts=True))
    ]
    if excess := excess_of(source, variables, probes):
        raise TemplateError(f"The chat template {excess} on a few short messages. Use another template.")


def _check_encoding(encoder: ContentSafeEncoder, tokenizer: PreTrainedTokenizerBase, text: Traced) -> None:
    """Refuse a tokenizer whose ids of a rendering without markup in content differ from the encoder's."""
    expected: list[int] = encoder.tokenizer.encode(str.__str__(text), add_special_tokens=False).ids
    found = encoder.encode(text).ids.tolist()
    if found != expected:
        raise TemplateError(
            f"Unsupported tokenizer {tokenizer.name_or_path!r}: encoding control tokens apart changes its ids. "
            f"For {str.__str__(text)!r} it gives {expected}, and {found} in parts. Use the model's own tokenizer.json."
        )


def checked_arguments(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return template arguments that can be passed to `ChatTemplate.of`.

    Raises:
        ValueError: The arguments are not a dict by name, a name is reserved, or a value has no `repr`.
    """
    if given is not None and not (isinstance(given, Mapping) and all(isinstance(name, str) for name in given)):
        raise ValueError(
            f"template_arguments must be a dict by name, such as {{'enable_thinking': False}}, not {describe(given)}."
        )
    arguments = dict(given or {})
    if reserved := _SET_EACH_TURN & arguments.keys():
        raise ValueError(
            f"template_arguments has {', '.join(sorted(reserved))}, which each turn sets itself: leave it out."
        )
    if reserved := _TRANSFORMERS_PARAMETERS & arguments.keys():
        raise ValueError(
            f"template_arguments has {', '.join(sorted(reserved))}, which apply_chat_template takes itself and no "
            "template reads: leave it out. To change the template, set tokenizer.chat_template."
        )
    for name, value in arguments.items():
        try:
            repr(value)
        except Exception as error:  # too deep, an integer with too many digits, or a `__repr__` that raises
            raise ValueError(
                f"template_arguments[{name[:80]!r}] is {describe(value)}, which has no repr() for the "
                f"certificate ({type(error).__name__}). Use a smaller or simpler value."
            ) from None
    if reserved := _OUR_PARAMETERS & arguments.keys():
        raise ValueError(
            f"template_arguments has {', '.join(sorted(reserved))}, which is not an argument of a chat template. Pass "
            "content_tokens=... to the policy instead."
        )
    return arguments


_SET_EACH_TURN = frozenset({"messages", "tools", "documents", "add_generation_prompt", "tokenizer", "cls"})
_TRANSFORMERS_PARAMETERS = frozenset(
    {
        *("conversation", "conversations", "chat_template", "continue_final_message", "tokenize", "padding"),
        *("truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
        *("tokenizer_kwargs", "sanitize_control_tokens"),
    }
)
"""Parameters of `apply_chat_template` (transformers 5) that never reach a template."""
_OUR_PARAMETERS = frozenset({"content_tokens", "markup", "certificates"})


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
            len(source.encoder.encode(_render_question(source.rendering, prompt)).ids) for prompt in (False, True)
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


def _render_question(rendering: Rendering, prompt: bool) -> Traced:
    return rendering.of_messages([_QUESTION], tool_specs=rendering.default_tools, generation_prompt=prompt)


def _text(message: TemplateMessage) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _images(message: TemplateMessage) -> int:
    content = message["content"]
    return 0 if isinstance(content, str) else sum(isinstance(part, ImagePart) for part in content)
