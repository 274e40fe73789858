"""`tito template`: certify a chat template without a server, print its certificate, and compare it with a renderer."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer
from strands.types.content import Message, Messages
from strands.types.tools import ToolSpec

from tito_core.chat.certify import ContentTokens
from tito_core.chat.encoder import ContentSafeEncoder
from tito_core.chat.ending import cut
from tito_core.chat.messages import template_messages, template_tools
from tito_core.chat.probes import TOOLS, assistant_message, call_message, cases, result_message, user_message
from tito_core.chat.rendering import TemplateError
from tito_core.chat.template import ChatTemplate, checked_arguments
from tito_core.chat.tokenizer import load_tokenizer
from tito_core.chat.traced import Traced
from tito_core.ledger.errors import how_to_install
from tito_core.parsing.registry import AUTO, DetectionError, choose_tool_parser, control_strings, get_tool_parser
from tito_engines.terminal import visible

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

app = typer.Typer(help="Certify chat templates.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keep `check` a subcommand: without a callback Typer would make a single command the group itself."""


@app.command()
def check(
    template: Annotated[
        str,
        typer.Argument(metavar="NAME_OR_PATH", help="A model name, a tokenizer folder, or a .jinja file."),
    ],
    tokenizer: Annotated[str, typer.Option(help="Tokenizer for a .jinja file: a name or a folder.")] = "",
    argument: Annotated[
        list[str] | None, typer.Option(metavar="KEY=JSON", help="A template argument, such as enable_thinking=false.")
    ] = None,
    parser: Annotated[
        str,
        typer.Option(
            help="Tool parser. Message content cannot produce its control tokens. auto: detect it from the template."
        ),
    ] = AUTO,
    as_template: Annotated[
        bool, typer.Option("--as-template", help="Allow message content to produce control tokens.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the certificate as JSON, with the name of every probe.")
    ] = False,
    against: Annotated[
        str,
        typer.Option(
            metavar="renderers[:NAME]",
            help="Compare the delta of every probe with the package renderers; renderers:qwen3 chooses one by name.",
        ),
    ] = "",
) -> None:
    """Print the certificate of a chat template. If the template is refused, print why and exit with status 1.

    With --against, print each difference from the other package, and exit with status 1 if there is any.
    """
    package, _, name = against.partition(":")
    if package not in ("", "renderers"):
        raise typer.BadParameter(f"--against {against!r}: give renderers or renderers:NAME.")
    loaded = load_with_template(template, tokenizer)
    certified = certify(
        loaded,
        parser=parser,
        content_tokens="as-template" if as_template else "inert",
        arguments=template_arguments(argument or []),
    )
    certificate = certified.certificate
    typer.echo(certificate.to_json() if as_json else visible("\n".join(certificate.lines())))
    if getattr(loaded, "response_template", None) is not None:
        typer.echo(visible(f"response   {_compare_response(loaded, parser, certified)}"), err=True)
    if against:
        comparison = RendererComparison.of(name or "auto", loaded, certified)
        differences = list(comparison.differences())
        for difference in differences:
            typer.echo(visible(difference), err=True)
        typer.echo(f"renderer   {comparison.name}: {len(differences)} differences", err=True)
        raise typer.Exit(1 if differences else 0)


def _compare_response(tokenizer: PreTrainedTokenizerBase, parser: str, certified: ChatTemplate) -> str:
    """Say whether transformers' `parse_response`, with the tokenizer's template of responses, reads a call as we do."""
    question = [user_message("Hi.")]
    try:
        reader = get_tool_parser(choose_tool_parser(parser, tokenizer).name, tokenizer)
        prompt = str.__str__(certified.rendering.of_messages(question, None, TOOLS))
        called = [*question, call_message(("look", {"at": "it"}))]
        whole = str.__str__(certified.rendering.of_messages(called, None, TOOLS, generation_prompt=False))
        answer = whole.removeprefix(prompt)
        message: Any = tokenizer.parse_response(answer, prefix=prompt)
        found = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    except Exception as error:  # whatever a template or its parser raises
        return f"not compared: {_reason(error)}"
    session = reader.start(tools={spec["name"]: spec["inputSchema"]["json"] for spec in TOOLS})
    session.feed(tokenizer.encode(answer, add_special_tokens=False))
    ours = [(call.name, call.arguments) for call in session.finish(truncated=False).calls]
    return "transformers reads the same call" if ours == found else f"transformers reads {found}, {parser} {ours}"


def certify(
    tokenizer: PreTrainedTokenizerBase, *, parser: str, content_tokens: ContentTokens, arguments: dict[str, Any]
) -> ChatTemplate:
    """Certify a tokenizer's template as `Policy.connect` does.

    Raises:
        TemplateError: The template is refused.
        UnknownParserError: Unknown parser.
    """
    try:
        markup = control_strings(get_tool_parser(choose_tool_parser(parser, tokenizer).name, tokenizer))
    except DetectionError:  # the template shows no known format of calls; its own control tokens remain
        markup = frozenset()
    markup = markup.union([tokenizer.eos_token] if tokenizer.eos_token else [])
    checked = checked_arguments(arguments)
    return ChatTemplate.of(tokenizer, content_tokens=content_tokens, markup=markup, **checked)


def load_with_template(template: str, tokenizer: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer together with the chat template to check.

    Args:
        template: A model name, the name of one of our small models, a folder, or a .jinja file.
        tokenizer: Tokenizer of a .jinja file: a name or a folder. Empty in all other cases.

    Raises:
        TokenizerError: The tokenizer cannot be loaded.
        typer.BadParameter: The arguments cannot be combined, or the file does not exist.
    """
    path = Path(template).expanduser()
    if path.suffix not in (".jinja", ".jinja2", ".j2") and not path.is_file():
        if tokenizer:
            raise typer.BadParameter(f"--tokenizer is for .jinja files, and {template!r} is not one. Leave it out.")
        return _load(template)
    if not path.is_file():
        raise typer.BadParameter(f"File not found: {template!r}. Check the path.")
    if not tokenizer:
        raise typer.BadParameter("A .jinja file needs its tokenizer: add --tokenizer NAME_OR_FOLDER.")
    loaded = _load(tokenizer)
    loaded.chat_template = path.read_text(encoding="utf-8")
    return loaded


def _load(name: str) -> PreTrainedTokenizerBase:
    from tito_engines import models  # heavy, and needed here only

    return models.load_tokenizer(name) if name in models.MODELS else load_tokenizer(os.path.expanduser(name))


def template_arguments(options: list[str]) -> dict[str, Any]:
    """Parse KEY=JSON options; a value that is not JSON is taken as a string."""
    arguments: dict[str, Any] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals or not key:
            raise typer.BadParameter(f"--argument {option!r} is not KEY=JSON, such as enable_thinking=false.")
        try:
            arguments[key] = json.loads(value)
        except json.JSONDecodeError:
            arguments[key] = value
    return arguments


WINDOW = 6
"""Tokens shown on each side of the first difference."""
SEAMS = ("\nhi", " hi ", "\n\n", "\t", "e\u0301", "日本", "0", "'s", "<", ">")
"""Content that tends to merge with the template text around it."""
ANSWER_WITH_CALL = call_message(("look", {"at": "the door"}))
_MAX_REASON = 600
"""Longest part of the package's own error that our error quotes, in characters."""


class Renderer(Protocol):
    """The part of a renderer that is used here."""

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Any],
        *,
        tools: list[Any] | None = None,
    ) -> Any:
        """Return the ids of prompt, completion and new messages, one after the other, or an object with `token_ids`.

        None if the turn cannot be extended.
        """


MakeRenderer = Callable[[Any], Renderer]
"""Make a renderer for a tokenizer."""


@dataclass(frozen=True, slots=True)
class RendererComparison:
    """A comparison of a renderer with a chat template. Build it with `RendererComparison.of`.

    A renderer of Prime Intellect's package `renderers` is written by hand for one model family. The interface used here
    is that of renderers 0.1.12: `base.py` (Renderer, Tokenizer, create_renderer) and `configs.py`.

    Attributes:
        name: The renderer's class, with the package's version if the package made it.
        renderer: The renderer.
        template: The certified template.
        tokenizer: The tokenizer that both use.
    """

    name: str
    renderer: Renderer
    template: ChatTemplate
    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def of(
        cls, renderer: str | MakeRenderer, tokenizer: PreTrainedTokenizerBase, template: ChatTemplate
    ) -> RendererComparison:
        """Make a renderer.

        Args:
            renderer: The name of one of the package's renderers, such as "qwen3"; "auto" to choose by the tokenizer's
                name; or a function that makes a renderer for a tokenizer.
            tokenizer: The template's tokenizer. If the template's content is inert, the renderer gets a
                `RendererTokenizer`.
            template: The template to compare with.

        Raises:
            TemplateError: The package is not installed, has no such renderer, or cannot make it for this tokenizer.
        """
        encoding = RendererTokenizer(tokenizer, template.encoder) if template.encoder.inert else tokenizer
        arguments = {
            name: value for name, value in template.arguments.items() if name not in tokenizer.special_tokens_map
        }
        try:
            made = _by_name(renderer, encoding, arguments) if isinstance(renderer, str) else renderer(encoding)
        except ImportError as error:
            raise TemplateError(
                f"The renderer {renderer!r} needs a package ({error}): {how_to_install('renderers')}."
            ) from error
        except Exception as error:  # a renderer may fail with any error
            raise TemplateError(
                f"The renderer {renderer!r} cannot be made for this tokenizer: {_reason(error)}"
            ) from error
        package = f"renderers {version('renderers')}, " if isinstance(renderer, str) else ""
        return cls(f"{package}{type(made).__name__}", made, template, tokenizer)

    def differences(self) -> Iterator[str]:
        """Yield the differences on every certified probe and on content that spells control tokens."""
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
            if found := self.difference(ANSWER_WITH_CALL, [result_message([{"text": text}])], TOOLS):
                yield f"a result {text[:40]!r}: {found}"

    def difference(
        self, answered: Message, new: Messages, tools: Sequence[ToolSpec] | None = None, history: Messages | None = None
    ) -> str | None:
        """Extend an answer by new messages; return how the renderer's ids differ from the template's, or None."""
        encoder = self.template.encoder
        tail = self.template.deltas.tail(answered, new, tools or (), history or [])
        ours = encoder.encode(tail.text, tail.start, tail.controls).ids.tolist()
        before = encoder.encode(cut(tail.text, 0, tail.start)).ids.tolist()
        # The completion ends in the closer, or if the template has none in the token that opens the next message.
        closing = len(tail.ending.closing)
        ended = before if closing else [*before, *ours[:1]]
        closing = max(1, closing)
        messages = [
            plain(each)
            for each in template_messages([answered, *new], message_format=self.template.rendering.message_format)[1:]
        ]
        specs = [plain(tool) for tool in template_tools(tools) or ()] or None
        try:
            bridged = self.renderer.bridge_to_next_turn(ended[:-closing], ended[-closing:], messages, tools=specs)
        except Exception as error:
            return f"{self.name} fails to extend a turn: {type(error).__name__}: {error}"
        roles = [message["role"] for message in messages]
        if bridged is None:
            return f"{self.name} cannot extend a turn by messages with roles {roles}."
        ids = list(getattr(bridged, "token_ids", bridged))
        return None if ids == [*before, *ours] else self._difference(roles, before, ours, ids)

    def _difference(self, roles: list[Any], before: list[int], ours: list[int], ids: list[int]) -> str:
        if ids[: len(before)] != before:
            return f"{self.name} changes the turn that it extends by messages with roles {roles}, which breaks law 1."
        theirs = ids[len(before) :]
        pairs = enumerate(zip(ours, theirs, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
        window = slice(max(0, at - WINDOW), at + WINDOW)
        rows = [
            f"{side[window]} {self.tokenizer.decode(side[window], skip_special_tokens=False)!r}"
            for side in (ours, theirs)
        ]
        return (
            f"{self.name} differs from the chat template at token {at} of a delta for messages with roles {roles}:\n"
            f"  template: {rows[0]}\n"
            f"  renderer: {rows[1]}"
        )


def _by_name(name: str, tokenizer: Any, arguments: Mapping[str, Any]) -> Renderer:
    from pydantic import TypeAdapter
    from renderers import RendererConfig, create_renderer
    from renderers.base import MODEL_RENDERER_MAP

    if name == "auto":
        model = str(tokenizer.name_or_path)
        if model not in MODEL_RENDERER_MAP:
            raise ValueError(f"the package has none for the name {model!r}. Choose one with --against renderers:NAME.")
        name = MODEL_RENDERER_MAP[model]

    # Keep sampled reasoning in the history; without this a renderer cannot extend a turn by a question.
    config = TypeAdapter(RendererConfig).validate_python({"name": name, "thinking_retention": "all"})
    made: Renderer = create_renderer(tokenizer, config, chat_template_kwargs=dict(arguments))
    return made


def _reason(error: Exception) -> str:
    """Return an error's message in one line; of a pydantic error only the first problem."""
    from pydantic import ValidationError

    message = error.errors(include_url=False)[0]["msg"] if isinstance(error, ValidationError) else str(error)
    return " ".join(message.split())[:_MAX_REASON]


class RendererTokenizer:
    """A tokenizer whose `encode` never returns control tokens, so that a renderer can write them by id only.

    All other attributes are those of the wrapped tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, encoder: ContentSafeEncoder) -> None:
        self._tokenizer = tokenizer
        self._encoder = encoder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        """Encode text as ordinary text, without control tokens."""
        ids: list[int] = self._encoder.encode(Traced.content(str.__str__(text), 0)).ids.tolist()
        return ids

    def __call__(self, text: str, *_: Any, **options: Any) -> Any:
        """Encode text; offsets are not supported."""
        if options.get("return_offsets_mapping"):
            raise NotImplementedError("This tokenizer returns ids only.")  # renderers catch this error
        return {"input_ids": self.encode(text)}


def plain(value: Any) -> Any:
    """Copy template messages or tools as plain strings, dicts and lists."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value
