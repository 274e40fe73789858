"""The `tito` command."""

from __future__ import annotations

import asyncio
import sys
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from strands_tito.collect.cli import collect
from strands_tito.collect.errors import CollectError
from strands_tito.engines.cli import app as engine_app
from strands_tito.inspect.summary import EXPECTED_ERRORS, laws_line, ledger_table, rescored_line
from strands_tito.inspect.template_check import app as template_app
from strands_tito.inspect.tokens import Show, coloured, ids_only
from strands_tito.inspect.verify import connect_for_scoring, merge, rescore
from strands_tito.terminal import VisibleConsole
from strands_tito.viewer.cli import view
from tito_core import store
from tito_core.chat.tokenizer import TokenizerError, load_tokenizer
from tito_core.ledger.ledger import Ledger

app = typer.Typer(
    help="Collect, inspect and verify token-in, token-out rollouts of Strands agents.",
    no_args_is_help=True,
    add_completion=False,
)
app.add_typer(engine_app, name="engine", help="Install and run engines on this machine's CPU.")
app.add_typer(template_app, name="template", help="Check and certify chat templates.")
app.command()(collect)
app.command()(view)
console: Console = VisibleConsole()
COMMANDS = "tito.commands"
"""Entry-point group of further commands, such as `tito conformance`."""

File = Annotated[Path, typer.Argument(help="File of rollouts (.tito).", exists=True, dir_okay=False)]


@app.command()
def inspect(
    file: File,
    rollout: Annotated[int, typer.Option(min=0, help="Show the turns of one rollout, by its number from 1.")] = 0,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Show the rollout's tokens, coloured by provenance.")
    ] = False,
    tokenizer: Annotated[str, typer.Option(help="Tokenizer for the tokens' text; default: the rollout's own.")] = "",
) -> None:
    """Summarise the rollouts in a file, or show one of them turn by turn."""
    if tokens and not rollout:
        raise typer.BadParameter("--tokens shows one rollout: choose it with --rollout N.")
    with store.LedgerFile(file) as ledgers:
        if not rollout:
            console.print(ledger_table(ledgers))
            return
        if rollout > len(ledgers):
            raise typer.BadParameter(f"--rollout {rollout}: {file} has rollouts 1 to {len(ledgers)}.")
        ledger = ledgers.load(ledgers.uuids[rollout - 1])
    console.print(coloured(ledger, _shown(ledger, tokenizer)) if tokens else Text(ledger.tree()), soft_wrap=not tokens)


def _shown(ledger: Ledger, name: str) -> Show:
    """Return how to show a token: as text if its tokenizer can be loaded, else as its id."""
    tokenizer = name or ledger.header.tokenizer
    if not tokenizer:
        return ids_only
    try:
        loaded = load_tokenizer(tokenizer)
    except TokenizerError as error:
        if name:
            raise
        console.print(f"Showing ids: {error}", style="yellow", markup=False)
        return ids_only
    return lambda token: str(loaded.decode([token], skip_special_tokens=False))


@app.command()
def verify(
    file: File,
    backend: Annotated[str, typer.Option(help="Backend of the server; default: that of the rollouts.")] = "",
    base_url: Annotated[str, typer.Option(help="Address of a server with the same weights, for re-scoring.")] = "",
) -> None:
    """Check the laws on a file's rollouts and, with --base-url, re-score their tokens."""
    ledgers = store.read(file)  # checks every law that needs only the ledger
    turns = sum(len(ledger) for ledger in ledgers)
    console.print(laws_line(len(ledgers), turns))
    if base_url:
        console.print(asyncio.run(_rescore(ledgers, backend or _backend_of(ledgers), base_url)))


def _backend_of(ledgers: list[Ledger]) -> str:
    names = sorted({turn.draft.engine.server.backend for ledger in ledgers for turn in ledger})
    if len(names) != 1:
        raise typer.BadParameter(f"Give --backend: the file has turns of {', '.join(names) or 'no backend'}.")
    return names[0]


async def _rescore(ledgers: list[Ledger], backend: str, base_url: str) -> str:
    engine = await connect_for_scoring(backend, base_url)
    return rescored_line(merge([await rescore(ledger, engine) for ledger in ledgers]))


@cache
def add_commands() -> None:
    """Add the commands of other packages, once."""
    for point in entry_points(group=COMMANDS):
        app.command(point.name)(point.load())


def main() -> None:
    """Run the command. An expected error is printed without a traceback, with exit status 1."""
    add_commands()
    try:
        app()
    except (*EXPECTED_ERRORS, CollectError, store.SchemaError) as error:
        VisibleConsole(stderr=True).print(
            f"{type(error).__name__}: {error}", style="red", markup=False, highlight=False, soft_wrap=True
        )
        sys.exit(1)
