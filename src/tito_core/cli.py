"""The `tito` command."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tito_core import store
from tito_core.engine.cli import app as engine_app
from tito_core.ledger.invariants import check_ledger
from tito_core.ledger.ledger import Ledger
from tito_core.report import EXPECTED_ERRORS, Rollout, rescored_line, rollout_table
from tito_core.verify import connect_for_scoring, merge, rescore

app = typer.Typer(help="Token-in, token-out rollouts of Strands agents.", no_args_is_help=True, add_completion=False)
app.add_typer(engine_app, name="engine", help="Install and run real engines on this machine's CPU.")
console = Console()

File = Annotated[Path, typer.Argument(help="A file of rollouts, as the demo writes it.", exists=True, dir_okay=False)]


@app.command()
def inspect(file: File) -> None:
    """Summarise the rollouts in a file."""
    ledgers = store.read(file)
    console.print(rollout_table([Rollout(ledger.uuid, "", "", ledger) for ledger in ledgers]))


@app.command()
def verify(
    file: File,
    backend: Annotated[str, typer.Option(help="Backend of the server that re-scores.")] = "vllm",
    base_url: Annotated[str, typer.Option(help="A server with the same weights, to re-score.")] = "",
) -> None:
    """Check every law on the rollouts in a file and, with a server, re-score their tokens."""
    ledgers = store.read(file)
    for ledger in ledgers:
        check_ledger(ledger)
    turns = sum(len(ledger) for ledger in ledgers)
    console.print(f"laws        1 to 4 and 10 hold on {len(ledgers)} ledgers, {turns} turns")
    if base_url:
        console.print(asyncio.run(_rescore(ledgers, backend, base_url)))


async def _rescore(ledgers: list[Ledger], backend: str, base_url: str) -> str:
    engine = await connect_for_scoring(backend, base_url)
    return rescored_line(merge([await rescore(ledger, engine) for ledger in ledgers]))


def main() -> None:
    """Run the command; errors for people are one sentence and exit status 1."""
    try:
        app()
    except (*EXPECTED_ERRORS, store.SchemaError) as error:
        Console(stderr=True).print(f"{type(error).__name__}: {error}", style="red", markup=False, highlight=False)
        sys.exit(1)
