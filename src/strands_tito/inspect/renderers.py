"""What Prime Intellect's package `renderers` (extra `renderers`) makes of a template's deltas, compared with ours.

A renderer is hand-written for a family. Its `bridge_to_next_turn` takes the ids of a prompt and of a completion, and
returns them with those of the new messages after them. Here it bridges from a small stand-in, on every probe of a
template's certificate and on strings that spell control tokens: `tito template check --against renderers`.

Source of these facts: renderers 0.1.12, `base.py` (Renderer, Tokenizer, create_renderer) and `configs.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Protocol

from strands.types.content import Message, Messages
from strands.types.tools import ToolSpec

from tito_core.chat.encoder import ContentSafeEncoder
from tito_core.chat.ending import cut
from tito_core.chat.messages import template_messages, template_tools
from tito_core.chat.probes import TOOLS, assistant_message, call_message, cases, result_message, user_message
from tito_core.chat.rendering import TemplateError
from tito_core.chat.template import ChatTemplate
from tito_core.chat.traced import Traced

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LONGEST = 600
"""Characters of another package's error that ours repeats."""
AROUND = 6
"""Tokens that a difference shows around the first token."""
SEAMS = ("\nhi", " hi ", "\n\n", "\t", "e\u0301", "日本", "0", "'s", "<", ">")
"""Content that merges with what a template writes around it."""
CALLED = call_message(("look", {"at": "the door"}))


class Renderer(Protocol):
    """What is used of a renderer; any object that has it will do."""

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Any],
        *,
        tools: list[Any] | None = None,
    ) -> Any:
        """Return all ids, or an object that has them as `token_ids`; None where the turn cannot be extended."""


MakeRenderer = Callable[[Any], Renderer]
"""Makes a renderer for a tokenizer."""


class RendererTokenizer:
    """A tokenizer whose `encode` reads all text as ordinary text, so that a renderer writes control tokens by id only.

    Everything else is the tokenizer's own.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, encoder: ContentSafeEncoder) -> None:
        self._tokenizer = tokenizer
        self._encoder = encoder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        """Encode text, in which nothing is a control token."""
        ids: list[int] = self._encoder.encode(Traced.content(str.__str__(text), 0)).ids.tolist()
        return ids

    def __call__(self, text: str, *_: Any, **options: Any) -> Any:
        """Refuse offsets, which tell a renderer apart content and scaffold: provenance is ours."""
        if options.get("return_offsets_mapping"):
            raise NotImplementedError("This tokenizer gives ids only.")  # the error from which a renderer knows it
        return {"input_ids": self.encode(text)}


@dataclass(frozen=True, slots=True)
class RendererComparison:
    """A renderer beside a template. Build it with `RendererComparison.of`.

    Attributes:
        name: The renderer's class, and of one of the package's its version.
        renderer: The renderer.
        template: The template, whose deltas are right by its certificate.
        tokenizer: The tokenizer of both.
    """

    name: str
    renderer: Renderer
    template: ChatTemplate
    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def of(
        cls, chosen: str | MakeRenderer, tokenizer: PreTrainedTokenizerBase, template: ChatTemplate
    ) -> RendererComparison:
        """Make a renderer.

        Args:
            chosen: The name of one of the package's, such as "qwen3"; "auto" for the one that the package has for the
                tokenizer's name; or a function that makes one for a tokenizer.
            tokenizer: The template's. The renderer gets one that cannot spell control tokens where content may not.
            template: The template to compare with.

        Raises:
            TemplateError: The package is not installed, has no such renderer, or that one does not fit the tokenizer.
        """
        given = RendererTokenizer(tokenizer, template.encoder) if template.encoder.inert else tokenizer
        arguments = {
            name: value for name, value in template.arguments.items() if name not in tokenizer.special_tokens_map
        }
        try:
            made = _by_name(chosen, given, arguments) if isinstance(chosen, str) else chosen(given)
        except ImportError as error:
            raise TemplateError(
                f"The renderer {chosen!r} needs the package renderers ({error}): pip install 'strands-tito[renderers]'."
            ) from error
        except Exception as error:  # pydantic's, assertions, KeyErrors: whatever a renderer does with a tokenizer
            why = _why(error)
            raise TemplateError(f"The renderer {chosen!r} cannot be made for this tokenizer: {why}") from error
        package = f"renderers {version('renderers')}, " if isinstance(chosen, str) else ""
        return cls(f"{package}{type(made).__name__}", made, template, tokenizer)

    def differences(self) -> Iterator[str]:
        """Yield what differs: on every probe that is certified, and on content that spells control tokens."""
        passed = self.template.certificate.passed
        for case in cases():
            if case.name in passed and (found := self.difference(case.answer, case.new, case.tools, case.before)):
                yield f"{case.name}: {found}"
        spelled = " ".join(sorted(self.template.encoder.added))
        for text in (*SEAMS, spelled, f"{spelled}\n"):
            if found := self.difference(assistant_message(), [user_message(text)]):
                yield f"a question {text[:40]!r}: {found}"
            if not self.template.certificate.tools:
                continue
            if found := self.difference(CALLED, [result_message([{"text": text}])], TOOLS):
                yield f"a result {text[:40]!r}: {found}"

    def difference(
        self, answered: Message, new: Messages, tools: Sequence[ToolSpec] | None = None, history: Messages | None = None
    ) -> str | None:
        """Bridge new messages after an answer; return how the ids differ from the template's, or None."""
        encoder = self.template.encoder
        tail = self.template.deltas.tail(answered, new, tools or (), history or [])
        ours = encoder.encode(tail.text, tail.start, tail.controls).ids.tolist()
        before = encoder.encode(cut(tail.text, 0, tail.start)).ids.tolist()
        # The turn ended by itself: in what closes it, or where nothing does in the token that opens the next message.
        last = len(tail.ending.closing)
        done = before if last else [*before, *ours[:1]]
        last = max(1, last)
        messages = [
            plain(each)
            for each in template_messages([answered, *new], message_format=self.template.rendering.message_format)[1:]
        ]
        specs = [plain(tool) for tool in template_tools(tools) or ()] or None
        try:
            bridged = self.renderer.bridge_to_next_turn(done[:-last], done[-last:], messages, tools=specs)
        except Exception as error:
            return f"{self.name} fails to extend a turn: {type(error).__name__}: {error}"
        roles = [message["role"] for message in messages]
        if bridged is None:
            return f"{self.name} cannot extend a turn by messages with roles {roles}."
        found = list(getattr(bridged, "token_ids", bridged))
        return None if found == [*before, *ours] else self._difference(roles, before, ours, found)

    def _difference(self, roles: list[Any], before: list[int], ours: list[int], found: list[int]) -> str:
        if found[: len(before)] != before:
            return f"{self.name} changes the turn that it extends by messages with roles {roles}, which breaks law 1."
        theirs = found[len(before) :]
        pairs = enumerate(zip(ours, theirs, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
        window = slice(max(0, at - AROUND), at + AROUND)
        shown = [
            f"{ids[window]} {self.tokenizer.decode(ids[window], skip_special_tokens=False)!r}" for ids in (ours, theirs)
        ]
        return (
            f"{self.name} differs from the chat template at token {at} of a delta for messages with roles {roles}:\n"
            f"  template: {shown[0]}\n"
            f"  renderer: {shown[1]}"
        )


def _why(error: Exception) -> str:
    """Return in one line what kept a renderer from being made; of pydantic's reports the first problem."""
    from pydantic import ValidationError

    said = error.errors(include_url=False)[0]["msg"] if isinstance(error, ValidationError) else str(error)
    return " ".join(said.split())[:_LONGEST]


def _by_name(name: str, tokenizer: Any, arguments: Mapping[str, Any]) -> Renderer:
    from pydantic import TypeAdapter
    from renderers import RendererConfig, create_renderer
    from renderers.base import MODEL_RENDERER_MAP

    if name == "auto":
        model = str(tokenizer.name_or_path)
        if model not in MODEL_RENDERER_MAP:
            raise ValueError(f"the package has none for the name {model!r}. Give one: --against renderers:NAME.")
        name = MODEL_RENDERER_MAP[model]

    # Reasoning stays where it was sampled; the renderer would otherwise give up at a question that follows it.
    config = TypeAdapter(RendererConfig).validate_python({"name": name, "thinking_retention": "all"})
    made: Renderer = create_renderer(tokenizer, config, chat_template_kwargs=dict(arguments))
    return made


def plain(value: Any) -> Any:
    """Copy template messages or tools as plain values, without traces."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value
