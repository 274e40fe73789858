"""`tito template`: certify a chat template, without a server, and show what was found."""

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
    """Keep `check` a command of its own: Typer would make the only one the group itself."""


@app.command()
def check(
    template: Annotated[
        str,
        typer.Argument(metavar="NAME_OR_PATH", help="A model's name, a tokenizer's folder, or a .jinja file."),
    ],
    tokenizer: Annotated[str, typer.Option(help="The tokenizer of a .jinja file: a name or a folder.")] = "",
    argument: Annotated[
        list[str] | None, typer.Option(metavar="KEY=JSON", help="A template argument, such as enable_thinking=false.")
    ] = None,
    parser: Annotated[
        str,
        typer.Option(
            help="A tool parser, whose control tokens content may not write either; auto: what the template has."
        ),
    ] = AUTO,
    as_template: Annotated[bool, typer.Option("--as-template", help="Let content spell control tokens.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the certificate as JSON, every probe named.")] = False,
    against: Annotated[
        str,
        typer.Option(
            metavar="renderers[:NAME]",
            help="Compare every probe's delta with another package's: renderers, or renderers:qwen3 for one by name.",
        ),
    ] = "",
) -> None:
    """Print what a chat template's certificate says; a template that is refused prints why, with exit status 1.

    With --against, each difference from the other package is printed, and the exit status is 1 where there is one.
    """
    package, _, name = against.partition(":")
    if package not in ("", "renderers"):
        raise typer.BadParameter(f"--against {against!r}: only renderers or renderers:NAME can be compared.")
    given = loaded(template, tokenizer)
    found = certify(
        given,
        parser=parser,
        content_tokens="as-template" if as_template else "inert",
        arguments=template_arguments(argument or []),
    )
    certificate = found.certificate
    typer.echo(certificate.to_json() if as_json else visible("\n".join(certificate.lines())))
    if against:
        comparison = RendererComparison.of(name or "auto", given, found)
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
        TemplateError: It is refused.
        UnknownParserError: No parser has the name.
    """
    try:
        markup = control_strings(get_tool_parser(choose_tool_parser(parser, tokenizer).name, tokenizer))
    except DetectionError:  # it shows no calls, or those of no format that is known: its own control tokens are left
        markup = frozenset()
    markup = markup.union([tokenizer.eos_token] if tokenizer.eos_token else [])
    checked = checked_arguments(arguments)
    return ChatTemplate.of(tokenizer, content_tokens=content_tokens, markup=markup, **checked)


def loaded(template: str, tokenizer: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer with the template that is to be checked.

    Args:
        template: A name as `load_tokenizer` takes it, the name of one of our small models, a folder, or a .jinja file.
        tokenizer: The same, for a .jinja file; otherwise empty.

    Raises:
        TokenizerError: Nothing loads under the name.
    """
    path = Path(template).expanduser()
    if path.suffix not in (".jinja", ".jinja2", ".j2") and not path.is_file():
        if tokenizer:
            raise typer.BadParameter(f"--tokenizer is for a .jinja file, and {template!r} is none.")
        return _named(template)
    if not path.is_file():
        raise typer.BadParameter(f"There is no file {template!r}: check the path.")
    if not tokenizer:
        raise typer.BadParameter(
            "A template's file needs the tokenizer that it is for: give --tokenizer NAME_OR_FOLDER."
        )
    made = _named(tokenizer)
    made.chat_template = path.read_text(encoding="utf-8")
    return made


def _named(name: str) -> PreTrainedTokenizerBase:
    from strands_tito.engines import models  # with its catalogue, which only this needs

    return models.load_tokenizer(name) if name in models.MODELS else load_tokenizer(os.path.expanduser(name))


def template_arguments(given: list[str]) -> dict[str, Any]:
    """Read KEY=JSON; what is no JSON is a string."""
    arguments: dict[str, Any] = {}
    for each in given:
        key, equals, value = each.partition("=")
        if not equals or not key:
            raise typer.BadParameter(f"--argument {each!r} is not KEY=JSON, such as enable_thinking=false.")
        try:
            arguments[key] = json.loads(value)
        except json.JSONDecodeError:
            arguments[key] = value
    return arguments
