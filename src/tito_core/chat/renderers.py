"""Deltas by Prime Intellect's package `renderers` (extra `renderers`), held to the template's own rendering (law 7).

A renderer is hand-written for a family. Its `bridge_to_next_turn` takes the ids of a prompt and of a completion, and
gives them back with those of the new messages after them. Here it bridges from a small stand-in, so that its cost does
not grow with the context, and what it gives is compared with our own delta: at construction on every probe and on
strings that spell control tokens, and on every turn after that. A difference is an error, never a prompt.

Source of these facts: renderers 0.1.12, `base.py` (Renderer, Tokenizer, create_renderer) and `configs.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Protocol

from tito_core.chat.cutting import cut
from tito_core.chat.delta import Tail
from tito_core.chat.encoder import ContentSafeEncoder, EncodedText
from tito_core.chat.form import TemplateMessage
from tito_core.chat.rendering import TemplateError
from tito_core.chat.traced import Traced

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LONGEST = 600
"""Characters of another package's error that ours repeats."""
AROUND = 6
"""Tokens that an error shows around the first difference."""


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
        """Give all ids, or an object that has them as `token_ids`; None where the turn cannot be extended."""


MakeRenderer = Callable[[Any], Renderer]
"""Makes a renderer for a tokenizer."""


class InertTokenizer:
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
            raise NotImplementedError("This tokenizer gives ids only.")
        return {"input_ids": self.encode(text)}


@dataclass(frozen=True, slots=True)
class RendererSource:
    """A renderer at work beside our own delta.

    Attributes:
        name: What the certificate calls it.
    """

    name: str
    renderer: Renderer
    encoder: ContentSafeEncoder
    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def of(
        cls,
        chosen: str | MakeRenderer,
        tokenizer: PreTrainedTokenizerBase,
        encoder: ContentSafeEncoder,
        arguments: Mapping[str, Any],
        *,
        inert: bool,
    ) -> RendererSource:
        """Make a renderer.

        Args:
            chosen: The name of one of the package's, such as "qwen3", or a function that makes one for a tokenizer.
            tokenizer: The tokenizer; the renderer gets one that cannot spell control tokens, where content may not.
            encoder: Makes it so.
            arguments: Template arguments, for one by name.
            inert: Whether content may not.

        Raises:
            TemplateError: The package is not installed, has no such renderer, or that one does not fit the tokenizer.
        """
        given = InertTokenizer(tokenizer, encoder) if inert else tokenizer
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
        return cls(f"{package}{type(made).__name__}", made, encoder, tokenizer)

    def check(
        self,
        tail: Tail,
        ours: EncodedText,
        new: Sequence[TemplateMessage],
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> None:
        """Bridge the new messages and compare.

        Args:
            tail: Our own rendering, whose stand-in turn is bridged from.
            ours: The ids of what comes after that turn.
            new: The new messages, as templates read them.
            tools: The tools likewise.

        Raises:
            TemplateError: The renderer gives up, fails or writes something else.
        """
        before = self.encoder.encode(cut(tail.text, 0, tail.start)).ids.tolist()
        # The turn ended by itself: in what closes it, or where nothing does in the token that opens the next message.
        last = len(tail.ending.closing)
        done = [*before, *ours.ids[:1].tolist()] if not last else before
        last = max(1, last)
        messages, specs = [plain(message) for message in new], [plain(tool) for tool in tools or ()] or None
        try:
            bridged = self.renderer.bridge_to_next_turn(done[:-last], done[-last:], messages, tools=specs)
        except Exception as error:
            raise TemplateError(f"{self.name} fails to extend a turn: {type(error).__name__}: {error}") from error
        roles = [message["role"] for message in new]
        if bridged is None:
            raise TemplateError(f"{self.name} cannot extend a turn by messages with roles {roles}.")
        found = list(getattr(bridged, "token_ids", bridged))
        if found != [*before, *ours.ids.tolist()]:
            raise TemplateError(self._difference(roles, before, ours.ids.tolist(), found))

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
            f"  renderer: {shown[1]}\n"
            "Leave out renderer=... to have the template's own deltas."
        )


def _why(error: Exception) -> str:
    """Return in one line what kept a renderer from being made; of pydantic's reports the first problem."""
    from pydantic import ValidationError

    said = error.errors(include_url=False)[0]["msg"] if isinstance(error, ValidationError) else str(error)
    return " ".join(said.split())[:_LONGEST]


def _by_name(name: str, tokenizer: Any, arguments: Mapping[str, Any]) -> Renderer:
    from pydantic import TypeAdapter
    from renderers import RendererConfig, create_renderer

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
