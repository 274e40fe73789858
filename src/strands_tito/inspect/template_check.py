"""`tito template`: certify a chat template without a server and print its certificate."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strands_tito.inspect.renderers import RendererComparison
from strands_tito.terminal import visible
from tito_core.chat.certificate import ContentTokens
from tito_core.chat.template import ChatTemplate
from tito_core.chat.template_arguments import checked_arguments
from tito_core.chat.tokenizer import load_tokenizer
from tito_core.parsing.detection import DetectionError
from tito_core.parsing.registry import AUTO, choose_tool_parser, control_strings, get_tool_parser

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
    if against:
        comparison = RendererComparison.of(name or "auto", loaded, certified)
        differences = list(comparison.differences())
        for difference in differences:
            typer.echo(visible(difference), err=True)
        typer.echo(f"renderer   {comparison.name}: {len(differences)} differences", err=True)
        raise typer.Exit(1 if differences else 0)


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
    from strands_tito.engines import models  # heavy, and needed here only

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
