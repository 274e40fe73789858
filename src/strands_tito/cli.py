"""The `tito` command."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from rich.console import Console
from rich.text import Text

from strands_tito.collect.cli import collect
from strands_tito.export.files import FORMATS, ExportOptions, write
from strands_tito.export.output_file import is_stdout, or_stdout
from strands_tito.export.trainer import Decode, LogprobPolicy, MissingPackageError
from strands_tito.gateway.cli import gateway
from strands_tito.inspect.score import TEACHER
from strands_tito.inspect.show import (
    Show,
    coloured,
    ids_only,
    laws_line,
    ledger_table,
    logprob_table,
    mismatch_lines,
    rescored_line,
    unordered_line,
)
from strands_tito.inspect.teacher import Teacher
from strands_tito.inspect.template_check import app as template_app
from strands_tito.inspect.verify import Rescored, connect_for_scoring, merge, rescore
from strands_tito.viewer.cli import Paths, view
from strands_tito.viewer.rollouts import Rollouts
from tito_core.chat.tokenizer import TokenizerError, load_tokenizer
from tito_core.entry_points import BrokenEntryPointError, load, offered
from tito_core.ledger.errors import TITOError, place_in_docs
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.trajectory import count
from tito_core.ledger.turn import as_reward
from tito_core.store.file import LedgerFile
from tito_engines.cli import app as engine_app
from tito_engines.terminal import VisibleConsole, progress_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
)
app.add_typer(engine_app, name="engine", help="Install and run engines on this machine's CPU.")
app.add_typer(template_app, name="template", help="Check and certify chat templates.")
app.command()(collect)
app.command()(gateway)
app.command()(view)
console: Console = VisibleConsole()
COMMANDS = "tito.commands"
"""Entry-point group of further commands, such as `tito conformance`."""


def _version(requested: bool) -> None:
    if requested:
        typer.echo(f"strands-tito {version('strands-tito')}")
        raise typer.Exit


@app.callback()
def tito(
    version: Annotated[  # the name of the option
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Collect, inspect and verify token-in, token-out rollouts of Strands agents."""


@app.command()
def inspect(
    paths: Paths,
    rollout: Annotated[
        int, typer.Option(min=0, help="Show the turns of one rollout, by its number from 1; 0: all.")
    ] = 0,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Show the rollout's tokens, coloured by provenance.")
    ] = False,
    logprobs: Annotated[bool, typer.Option("--logprobs", help="Show each sampled token with its logprob.")] = False,
    tokenizer: Annotated[
        str, typer.Option(help="Tokenizer for the tokens' text; default: the rollout's own, if it is on this machine.")
    ] = "",
) -> None:
    """Summarise rollouts, or show one of them turn by turn. "logprob" is the mean over the sampled tokens."""
    if (tokens or logprobs) and not rollout:
        raise typer.BadParameter("--tokens and --logprobs show one rollout: choose it with --rollout N.")
    with Rollouts(paths) as rollouts:
        if not rollout:
            console.print(ledger_table(_checked(rollouts)))
            _print_skipped(rollouts)
            return
        if rollout > len(rollouts):
            raise typer.BadParameter(f"--rollout {rollout}: {rollouts.title} has rollouts 1 to {len(rollouts)}.")
        ledger = rollouts.load(rollout, check=True)
    if not tokens and not logprobs:
        console.print(Text(ledger.tree()), soft_wrap=True)
        return
    show = _shown(ledger, tokenizer)
    if tokens:
        console.print(coloured(ledger, show))
    if logprobs:
        console.print(logprob_table(ledger, show))


def _checked(rollouts: Rollouts) -> Iterator[Ledger]:
    """Yield every rollout, one in memory at a time, and show the progress on a terminal.

    Raises:
        LawViolationError: A rollout breaks a law.
    """
    numbers = range(1, len(rollouts) + 1)
    return (rollouts.load(number, check=True) for number in progress_of(numbers, "checking", len(numbers)))


def _print_skipped(rollouts: Rollouts, console: Console = console) -> bool:
    """Print what was skipped, and return whether it may be a part of a rollout."""
    skipped = rollouts.skipped()
    for each in skipped:
        console.print(each.text, style="yellow", markup=False, highlight=False, soft_wrap=True)
    return any(each.may_be_lost for each in skipped)


def _tokenizer(ledger: Ledger, name: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer that the user names, or the rollout's own from this machine: a file must not cause a download.

    Raises:
        TokenizerError: It cannot be loaded.
    """
    if name:
        return load_tokenizer(name)
    if not ledger.header.tokenizer:
        raise TokenizerError(f"Rollout {ledger.uuid} names no tokenizer. Add --tokenizer NAME.")
    try:
        return load_tokenizer(ledger.header.tokenizer, local_files_only=True)
    except TokenizerError as error:
        named = f"The rollout names the tokenizer {ledger.header.tokenizer!r}, which is not on this machine."
        raise TokenizerError(f"{named} Add --tokenizer NAME: it may be downloaded.") from error


def _shown(ledger: Ledger, name: str) -> Show:
    """Return how to show a token: as text if its tokenizer can be loaded, else as its id."""
    if not name and not ledger.header.tokenizer:
        return ids_only
    try:
        loaded = _tokenizer(ledger, name)
    except TokenizerError as error:
        if name:
            raise
        console.print(f"Showing ids: {error}", style="yellow", markup=False)
        return ids_only
    return lambda token: str(loaded.decode([token], skip_special_tokens=False))


@app.command()
def export(
    paths: Paths,
    to: Annotated[str, typer.Option(help=f"Format: {', '.join(FORMATS)}.")],
    out: Annotated[
        Path,
        typer.Option(help="File or pipe to write, - for standard output.", dir_okay=False, callback=or_stdout),
    ],
    temperature: Annotated[float, typer.Option(min=0, help="The trainer's logit temperature.")] = 1.0,
    logprobs: Annotated[
        str, typer.Option(help="checked: refuse logprobs of another quantity than the trainer's; as-recorded; omit.")
    ] = "checked",
    branches: Annotated[
        str,
        typer.Option(help="Branched rollouts: list, a row a path; for verl, trl also last (a row a rollout) or error."),
    ] = "list",
    max_paths: Annotated[
        int | None, typer.Option(min=1, help="The most rows of a rollout: its last path, and those that train most.")
    ] = None,
    agent: Annotated[
        str, typer.Option(help="Write this agent's paths only; default: all, or the first's with --branches last.")
    ] = "",
    missing_reward: Annotated[
        str,
        typer.Option(
            help="Reward of rollouts without one: a number; null; or untrained, a masked row for slime, verl."
        ),
    ] = "untrained",
    train_constrained: Annotated[
        bool, typer.Option("--train-constrained", help="Train tokens that were sampled under a grammar.")
    ] = False,
    replays: Annotated[
        bool, typer.Option("--replays", help="slime replays kept sets: its --rollout-top-p is not 1.")
    ] = False,
    tokenizer: Annotated[
        str, typer.Option(help="Tokenizer for texts; default: the rollout's own, if it is on this machine.")
    ] = "",
) -> None:
    """Write rollouts to a file that a trainer reads: Parquet, or JSON lines with the trainer's field names."""
    _one_of("--to", to, FORMATS)
    _one_of("--logprobs", logprobs, get_args(LogprobPolicy))
    _one_of("--branches", branches, ("list", "last", "error"))
    if not out.absolute().parent.is_dir():
        raise typer.BadParameter(f"--out {out}: the folder {out.absolute().parent} does not exist. Create it first.")
    loaded: dict[str | None, PreTrainedTokenizerBase] = {}

    def decoder(ledger: Ledger) -> Decode:
        name = tokenizer or ledger.header.tokenizer
        if name not in loaded:
            loaded[name] = _tokenizer(ledger, tokenizer)
        return lambda ids: str(loaded[name].decode(list(ids), skip_special_tokens=False))

    options: Any = {"temperature": temperature, "logprobs": logprobs, "branches": branches, "agent": agent or None}
    options |= {"missing_reward": _missing_reward(missing_reward), "replays": replays, "max_paths": max_paths}
    with Rollouts(paths) as rollouts:
        try:
            written = write(
                _checked(rollouts), to, out, ExportOptions(decoder, train_constrained=train_constrained, **options)
            )
        except TokenizerError:
            raise
        except (ValueError, MissingPackageError, OSError) as error:
            print_error(error)
            raise typer.Exit(1) from error
        report = VisibleConsole(stderr=True) if is_stdout(out) else console
        for line in written.lines(str(out)):
            report.print(line, markup=False, soft_wrap=True)
        _print_skipped(rollouts, report)


def _missing_reward(text: str) -> float | str | None:
    if text in ("untrained", "null"):
        return text if text == "untrained" else None
    try:
        return as_reward(float(text))
    except ValueError as error:
        raise typer.BadParameter(f"--missing-reward {text!r}: a number, null or untrained.") from error


def _one_of(option: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise typer.BadParameter(f"{option} {value!r}: choose one of {', '.join(allowed)}.")


@app.command()
def verify(
    paths: Paths,
    backend: Annotated[str, typer.Option(help="Backend of the server; default: that of the rollouts.")] = "",
    base_url: Annotated[str, typer.Option(help="Address of a server with the same weights, for re-scoring.")] = "",
) -> None:
    """Check the laws on rollouts and, with --base-url, re-score their tokens.

    Exit status: 1 if a law is broken, or if a file ends inside a record.
    """
    with Rollouts(paths) as rollouts:
        ledgers = list(_checked(rollouts))
        turns = sum(len(ledger) for ledger in ledgers)
        console.print(laws_line(len(ledgers), turns))
        if unordered := unordered_line(ledgers):
            console.print(unordered, soft_wrap=True)
        is_whole = not _print_skipped(rollouts)
    if base_url:
        name = backend or _backend_of(ledgers)
        console.print(f"connecting to {base_url} and re-scoring", style="dim", markup=False, highlight=False)
        rescored = asyncio.run(_rescore(ledgers, name, base_url))
        console.print("\n".join([rescored_line(rescored), *mismatch_lines(rescored)]), soft_wrap=True)
    if not is_whole:
        raise typer.Exit(1)


@app.command()
def score(
    path: Annotated[
        Path,
        typer.Argument(help="Rollout file; the column is appended.", exists=True, dir_okay=False, metavar="FILE"),
    ],
    backend: Annotated[str, typer.Option(help="Backend of the teacher's server.")],
    base_url: Annotated[str, typer.Option(help="Address of the teacher's server.")],
    column: Annotated[str, typer.Option(help="Name of the column.")] = TEACHER,
    tokenizer: Annotated[
        str, typer.Option(help="Tokenizer of the rollouts; default: their own, if it is on this machine.")
    ] = "",
    concurrency: Annotated[int, typer.Option(min=1, help="Rollouts that are scored at the same time.")] = 16,
) -> None:
    """Score the recorded tokens by another model with the same vocabulary, and add its logprobs as a column.

    A second run scores what is missing. Exit status: 1 if a path cannot be scored.
    """
    with LedgerFile(path) as file:
        uuids = file.uuids
        if not uuids:
            raise typer.BadParameter(f"{path} holds no rollouts.")
        loaded = _tokenizer(file.load(uuids[0]), tokenizer)
    refused = asyncio.run(_score(path, len(uuids), column, concurrency, (backend, base_url, loaded)))
    done = f"read; paths without column {column!r}: {len(refused)}" if refused else f"scored, column {column!r}."
    console.print(f"{count(len(uuids), 'rollout')} {done}", markup=False, highlight=False)
    for line in refused:
        console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)
    if refused:
        raise typer.Exit(1)


async def _score(
    path: Path, rollouts: int, column: str, concurrency: int, server: tuple[str, str, PreTrainedTokenizerBase]
) -> list[str]:
    backend, base_url, tokenizer = server
    teacher = await Teacher.connect(backend=backend, base_url=base_url, tokenizer=tokenizer)
    shown = iter(progress_of(range(rollouts), "scoring", rollouts))
    try:
        return await teacher.annotate_file(path, column, concurrency=concurrency, on_rollout=lambda: next(shown, None))
    finally:
        await teacher.backend.aclose()


def _backend_of(ledgers: list[Ledger]) -> str:
    names = sorted({turn.draft.engine.server.backend for ledger in ledgers for turn in ledger})
    if len(names) != 1:
        raise typer.BadParameter(f"Give --backend: the file has turns of {', '.join(names) or 'no backend'}.")
    return names[0]


async def _rescore(ledgers: list[Ledger], backend: str, base_url: str) -> Rescored:
    engine = await connect_for_scoring(backend, base_url)
    shown = progress_of(ledgers, "re-scoring", len(ledgers))
    return merge([await rescore(ledger, engine) for ledger in shown])


@cache
def add_commands() -> None:
    """Add the commands of other packages, once. One that cannot be loaded is named, and the others work."""
    for name in offered(COMMANDS):
        try:
            app.command(name)(load(COMMANDS, name))
        except BrokenEntryPointError as error:
            print_error(error)


def main() -> None:
    """Run the command. An expected error is printed without a traceback, with exit status 1."""
    add_commands()
    try:
        app()
    except TITOError as error:
        print_error(error)
        sys.exit(1)


def print_error(error: Exception) -> None:
    """Print an error without a traceback, and where the documentation explains it."""
    console, name = VisibleConsole(stderr=True), type(error).__name__
    console.print(f"{name}: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
    if place := place_in_docs(error):
        console.print(place, style="dim", markup=False, highlight=False, soft_wrap=True)
