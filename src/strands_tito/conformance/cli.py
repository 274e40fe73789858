"""`tito conformance`: test a server with one command."""

from __future__ import annotations

import importlib.util
import math
import shlex
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from strands_tito.terminal import VisibleConsole, stages_shown
from tito_core.backend.registry import installed_backends
from tito_core.interrupt import Interrupts, in_thread, leave

if TYPE_CHECKING:
    from strands_tito.conformance.profiles import Profile
    from strands_tito.conformance.suite import Outcome
    from strands_tito.conformance.target import Target

console = VisibleConsole()
INTERRUPTED = 2
"""Exit status after Ctrl-C."""
NOTHING_PLAYED = "Interrupted before anything was played."


def conformance(
    backend: Annotated[str, typer.Option(help=f"Name of the backend: {', '.join(installed_backends())}.")],
    base_url: Annotated[str, typer.Option(help="Address of the server.")],
    tokenizer: Annotated[str, typer.Option(help="Name or folder of the model's tokenizer.")],
    profile: Annotated[str, typer.Option(help="quick, standard or deep.")] = "standard",
    seed: Annotated[int, typer.Option(help="What is drawn is drawn from it.")] = 0,
    report: Annotated[Path | None, typer.Option(help="Folder for an HTML and a JSON report.", file_okay=False)] = None,
    model: Annotated[str, typer.Option(help="Name of the model on the server; its first one by default.")] = "",
    parser: Annotated[str, typer.Option(help="Tool-call format.")] = "auto",
    tolerance: Annotated[
        float,
        typer.Option(
            help="Nats between a reported logprob and the server's own score: 0.001 in float32, 0.5 in bfloat16."
        ),
    ] = 0.05,
    seeds: Annotated[bool, typer.Option("--seeds", help="Hold the server to the seed of a request.")] = False,
    experts: Annotated[
        str, typer.Option(help="LAYERS,EXPERTS of a mixture, for a server that does not report them.")
    ] = "",
    weights: Annotated[
        str,
        typer.Option(help="Folder on the server whose weights it shall load, again and again. Changes the server!"),
    ] = "",
    against_backend: Annotated[str, typer.Option(help="Backend of a second server of the same weights.")] = "",
    against_url: Annotated[str, typer.Option(help="Its address: both play one script, and shall say the same.")] = "",
    replay: Annotated[Path | None, typer.Option(help="Play one conversation of a report.", dir_okay=False)] = None,
) -> None:
    """Hold a server to every law, by playing agents on it. It changes nothing on the server, unless by --weights.

    With --against-url a second server of the same weights plays the same script: the ledgers, and greedy tokens up to a
    near-tie, shall be equal.

    The exit status is 0 when every law that applies holds, 1 when one is broken, 2 when it was interrupted (130 where
    that was before it began, while Python loads it).
    """
    if importlib.util.find_spec("hypothesis") is None:
        raise typer.BadParameter("the suite needs Hypothesis: pip install 'strands-tito[conformance]'.")
    if not 0 <= tolerance < math.inf:
        raise typer.BadParameter(f"--tolerance must be a number of nats, at least 0, not {tolerance}.")
    with Interrupts({signal.SIGINT: INTERRUPTED}, NOTHING_PLAYED) as interrupts:
        from strands_tito.conformance.profiles import PROFILES
        from strands_tito.conformance.report import print_report, write_files
        from strands_tito.conformance.target import Target

        if profile not in PROFILES:
            raise typer.BadParameter(f"--profile must be one of {', '.join(PROFILES)}, not {profile!r}.")
        if report is not None:
            _expect_writable(report)
        target = Target(
            backend,
            base_url,
            tokenizer,
            parser,
            options={"model": model} if model else {},
            tolerance_nats=tolerance,
            seed=seed,
            seeds=seeds,
            experts=_experts(experts),
            weights=weights or None,
        )
        against = _second(target, against_backend, against_url)
        if weights and against is not None:
            raise typer.BadParameter("--weights changes one server: it cannot be held against another meanwhile.")
        outcome = _played(target, PROFILES[profile], against, replay, interrupts)
        folder = report or Path("conformance")
        files = write_files(outcome, folder) if report is not None or outcome.moves else []
        again = ["tito", "conformance", "--backend", backend, "--base-url", base_url, "--tokenizer", tokenizer]
        for option, value in (("experts", experts), ("weights", weights), ("against-url", against_url)):
            again += [f"--{option}", value] if value else []
        again += ["--against-backend", against_backend] if against_backend else []
        print_report(outcome, console, shlex.join([*again, "--replay", str(folder / "conversation.json")]))
        for file in files:
            console.print(f"Written: {file}", highlight=False)
        if outcome.interrupted:
            leave(INTERRUPTED)
    sys.exit(0 if outcome.sound else 1)


def _played(
    target: Target, profile: Profile, against: Target | None, replay: Path | None, interrupts: Interrupts
) -> Outcome:
    """Play all of a profile, or one conversation; return what is known once that is over or interrupted."""
    from strands_tito.conformance.player import TOKENS
    from strands_tito.conformance.suite import Run

    moves = None if replay is None else read_moves(replay)
    if moves is None:
        said = profile.sentence(TOKENS, weights=target.weights is not None, both=against is not None)
        console.print(said, highlight=False)
    with stages_shown(console), _progress() as bar:
        task = bar.add_task("conversations", total=profile.conversations if moves is None else 1)
        run = Run(target, profile, lambda count: bar.update(task, completed=count), against=against, moves=moves)
        try:
            outcome: Outcome | None = in_thread(run.play, run.stop, interrupts)
        except KeyboardInterrupt:
            outcome = run.interrupted()
    if outcome is None:
        leave(INTERRUPTED, NOTHING_PLAYED)
    return outcome


def _expect_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise typer.BadParameter(f"--report {folder}: nothing can be written there: {error.strerror}.") from error


def _experts(said: str) -> tuple[int, int] | None:
    if not said:
        return None
    parts = said.split(",")
    if len(parts) != 2 or not all(part.strip().isdecimal() and int(part) for part in parts):
        raise typer.BadParameter(f"--experts must be LAYERS,EXPERTS, such as 48,8, not {said!r}.")
    return int(parts[0]), int(parts[1])


def _second(target: Target, backend: str, url: str) -> Target | None:
    if not backend and not url:
        return None
    if not url:
        raise typer.BadParameter("--against-backend needs the second server's address: --against-url.")
    return replace(target, backend=backend or target.backend, base_url=url)


def read_moves(path: Path) -> list[Any]:
    """Read a conversation as a report writes it.

    Raises:
        typer.BadParameter: It is none.
    """
    import msgspec

    from strands_tito.testing.moves import AnyMove
    from tito_core.store.records import UNREADABLE

    try:
        return msgspec.json.decode(path.read_bytes(), type=list[AnyMove])
    except (OSError, *UNREADABLE) as error:
        raise typer.BadParameter(f"{path} holds no conversation of a report: {error}.") from error


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)
