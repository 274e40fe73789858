"""`tito conformance`: test a server with one command."""

from __future__ import annotations

import importlib.util
import math
import shlex
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from strands_tito.cli import print_error
from tito_core.backend.errors import BackendError, ProtocolViolationError, ServerChangedError
from tito_core.backend.registry import installed_backends
from tito_core.interrupt import Interrupts, in_thread, leave
from tito_core.ledger.errors import how_to_install
from tito_engines.terminal import VisibleConsole, stages_shown

if TYPE_CHECKING:
    from tito_conformance.checks import Profile
    from tito_conformance.suite import Outcome
    from tito_conformance.target import Target

console = VisibleConsole()
STATUSES: Mapping[int, int] = {signal.SIGINT: 2, signal.SIGTERM: 143}
"""Exit statuses after Ctrl-C, and after SIGTERM, which job schedulers send."""
NO_SERVER = 4
"""Exit status if no server answers at the address, or if it cannot be connected to."""
NOT_CHECKED = 3
"""Exit status if no law is broken, but a required check did not run."""
NOTHING_PLAYED = "Interrupted before the first conversation."


def conformance(
    backend: Annotated[
        str, typer.Option(help=f"Name of the backend: {', '.join(installed_backends())}. Required without --gateway.")
    ] = "",
    base_url: Annotated[str, typer.Option(help="Address of the server. Required without --gateway.")] = "",
    tokenizer: Annotated[
        str, typer.Option(help="Name or folder of the model's tokenizer. Required without --gateway.")
    ] = "",
    profile: Annotated[str, typer.Option(help="quick, standard, deep or production.")] = "standard",
    seed: Annotated[int, typer.Option(help="Seed of the random conversations.")] = 0,
    report: Annotated[
        Path | None, typer.Option(help="Write an HTML and a JSON report to this folder.", file_okay=False)
    ] = None,
    model: Annotated[str, typer.Option(help="Name of the model on the server; its first model by default.")] = "",
    parser: Annotated[str, typer.Option(help="Tool-call format.")] = "auto",
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="Largest difference between a logprob and the server's own score, in nats. By default 0.001 for "
            "float32, 0.1 for float16, 0.5 for bfloat16, and 0.05 if the dtype is unknown."
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Dtype of the server's logits: float32, float16, bfloat16; measured by default.")
    ] = "auto",
    seeds: Annotated[
        bool, typer.Option("--seeds", help="Require that the server obeys the seed of a request.")
    ] = False,
    experts: Annotated[
        str, typer.Option(help="LAYERS,EXPERTS of a mixture-of-experts model, for a server that does not report them.")
    ] = "",
    weights: Annotated[
        list[str] | None,
        typer.Option(
            help="Folder on the server with weights to load repeatedly; give a second one to load both in turn. This "
            "changes the server."
        ),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(help="Name of a LoRA adapter that the server has loaded; give several, each of other weights."),
    ] = None,
    against_backend: Annotated[str, typer.Option(help="Backend of a second server with the same weights.")] = "",
    against_url: Annotated[str, typer.Option(help="Address of a second server to compare with.")] = "",
    require: Annotated[
        list[str] | None,
        typer.Option(
            help="Name of a check that must have run, besides the default ones (with --against-url or --replay, none)."
        ),
    ] = None,
    not_require: Annotated[
        list[str] | None, typer.Option(help="Name of a default check that need not have run.")
    ] = None,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Go on after a broken law, and report every one that is found.")
    ] = False,
    replay: Annotated[
        Path | None, typer.Option(help="Play only this conversation of a report.", dir_okay=False)
    ] = None,
    gateway: Annotated[
        str,
        typer.Option(help="Judge a gateway instead of a server: the name of a shipped adapter, a file, or an address."),
    ] = "",
    python: Annotated[str, typer.Option(help="With --gateway: Python of the gateway's own environment.")] = "",
    api_key: Annotated[str, typer.Option(help="With --gateway and an address: its API key.")] = "EMPTY",
    wire: Annotated[str, typer.Option(help="With --gateway: the scripted engine, vllm or sglang.")] = "",
    speaks: Annotated[
        str, typer.Option(help="With --gateway: what the harness speaks: chat, messages or responses.")
    ] = "chat",
    engine_port: Annotated[int, typer.Option(help="With --gateway: the scripted engine's port; any by default.")] = 0,
    check: Annotated[list[str] | None, typer.Option(help="With --gateway: run only this check; give several.")] = None,
) -> None:
    """Test whether a server gives token-exact rollouts. It changes nothing on the server, except with --weights.

    With --against-url, two servers with the same weights play the same conversations, and their ledgers are compared.

    With --gateway, a gateway is judged before a scripted engine instead; of the other options, --tokenizer, --seed and
    --report apply.

    Exit status: 0 if every law that applies holds and the required checks ran, 1 if a law is broken or an error ended
    the run, 3 if a required check did not run, 4 if no server could be connected to, 2 after an interrupt (130 while
    Python is still loading), 143 after SIGTERM.
    """
    if gateway:
        from tito_conformance.gateway.command import EngineOptions, judge_gateway

        engine = EngineOptions(wire, engine_port, tokenizer, seed)
        sys.exit(judge_gateway(gateway, console, engine, speaks, python, api_key, check or (), report))
    needed = {"--backend": backend, "--base-url": base_url, "--tokenizer": tokenizer}
    if missing := [name for name, given in needed.items() if not given]:
        raise typer.BadParameter(f"Missing option '{missing[0]}'.")
    if importlib.util.find_spec("hypothesis") is None:
        raise typer.BadParameter(f"The suite needs Hypothesis: {how_to_install('conformance')}.")
    folders = tuple(weights or ())
    if len(folders) > 2 or "" in folders:
        raise typer.BadParameter(f"--weights takes one or two folders, not {list(folders)}.")
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise typer.BadParameter(f"--tolerance must be a finite number of nats >= 0, not {tolerance}.")
    with Interrupts(STATUSES, NOTHING_PLAYED) as interrupts:
        from tito_conformance.checks import PRODUCTION, PROFILES, REQUIRED
        from tito_conformance.report import print_report, write_files
        from tito_conformance.target import AUTO, TOLERANCES, Target

        if profile not in PROFILES:
            raise typer.BadParameter(f"--profile must be one of {', '.join(PROFILES)}, not {profile!r}.")
        if profile == PRODUCTION and folders:
            raise typer.BadParameter(f"--profile {PRODUCTION} changes nothing on the server. Omit --weights.")
        if dtype not in (AUTO, *TOLERANCES):
            raise typer.BadParameter(f"--dtype must be one of {', '.join((AUTO, *TOLERANCES))}, not {dtype!r}.")
        if report is not None:
            _expect_writable(report)
        target = Target(
            backend,
            base_url,
            tokenizer,
            parser,
            options={"model": model} if model else {},
            tolerance_nats=tolerance,
            dtype=dtype,
            seed=seed,
            seeds=seeds,
            experts=_parse_experts(experts),
            weights=folders,
            adapters=tuple(adapter or ()),
        )
        against = _second_target(target, against_backend, against_url)
        if folders and against is not None:
            raise typer.BadParameter("--weights and --against-url cannot be combined. Omit one of them.")
        default = REQUIRED if against is None and replay is None else ()
        required = _required(default, require or [], not_require or [])
        try:
            outcome = _play(target, PROFILES[profile], against, replay, required, interrupts, keep_going=keep_going)
        except BackendError as error:
            if isinstance(error, ProtocolViolationError | ServerChangedError):  # it answered, and broke a law
                raise
            print_error(error)
            sys.exit(NO_SERVER)
        folder = report or Path("conformance")
        files = write_files(outcome, folder) if report is not None or outcome.moves else []
        again = ["tito", "conformance", "--backend", backend, "--base-url", base_url, "--tokenizer", tokenizer]
        given = {"model": model, "parser": parser, "dtype": dtype, "tolerance": tolerance, "experts": experts}
        for option, value in {**given, "against-backend": against_backend, "against-url": against_url}.items():
            again += [f"--{option}", str(value)] if value not in ("", None, AUTO) else []
        again += ["--seeds"] if seeds else []
        again += [part for each in folders for part in ("--weights", each)]
        again += [part for each in adapter or () for part in ("--adapter", each)]
        print_report(outcome, console, shlex.join([*again, "--replay", str(folder / "conversation.json")]))
        for file in files:
            console.print(f"Written: {file}", highlight=False)
        if outcome.interrupted:
            leave(interrupts.status)
    if not outcome.sound:
        sys.exit(1)
    sys.exit(NOT_CHECKED if outcome.not_reached else 0)


def _required(default: Sequence[str], more: list[str], fewer: list[str]) -> tuple[str, ...]:
    """Return the names of the checks that must run.

    Raises:
        typer.BadParameter: A name is unknown.
    """
    from tito_conformance.checks import CHECKS

    if unknown := sorted({*more, *fewer} - CHECKS.keys()):
        raise typer.BadParameter(f"Unknown check {unknown[0]!r}. Available: {', '.join(CHECKS)}.")
    return tuple(name for name in CHECKS if name in {*default, *more} - set(fewer))


def _play(
    target: Target,
    profile: Profile,
    against: Target | None,
    replay: Path | None,
    required: Sequence[str],
    interrupts: Interrupts,
    *,
    keep_going: bool,
) -> Outcome:
    """Play a whole profile, or one conversation. Return the result, also after an interrupt."""
    from tito_conformance.player import MAX_TOKENS
    from tito_conformance.suite import Run

    moves = None if replay is None else read_moves(replay)
    given: dict[str, Any] = {
        "weights": bool(target.weights),
        "both": against is not None,
        "adapters": len(target.adapters),
    }
    most = profile.most_requests(**given)
    if moves is None:
        console.print(profile.describe(MAX_TOKENS, **given), highlight=False)
    with stages_shown(console), _progress() as bar:
        task = bar.add_task("requests", total=most if moves is None else None)

        def show(conversations: int, requests: int) -> None:
            bar.update(task, completed=requests, description=f"{conversations} conversations, requests")

        run = Run(target, profile, show, against=against, moves=moves, required=required, keep_going=keep_going)
        try:
            outcome: Outcome | None = in_thread(run.play, run.stop, interrupts)
        except KeyboardInterrupt:
            outcome = run.interrupted()
    if outcome is None:
        leave(interrupts.status, NOTHING_PLAYED)
    return outcome


def _expect_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise typer.BadParameter(f"--report: cannot write to {folder}: {error.strerror}.") from error


def _parse_experts(value: str) -> tuple[int, int] | None:
    if not value:
        return None
    parts = value.split(",")
    if len(parts) != 2 or not all(part.strip().isdecimal() and int(part) for part in parts):
        raise typer.BadParameter(f"--experts must be LAYERS,EXPERTS, such as 48,8, not {value!r}.")
    return int(parts[0]), int(parts[1])


def _second_target(target: Target, backend: str, url: str) -> Target | None:
    if not backend and not url:
        return None
    if not url:
        raise typer.BadParameter("--against-backend needs an address. Pass --against-url too.")
    return replace(target, backend=backend or target.backend, base_url=url)


def read_moves(path: Path) -> list[Any]:
    """Read a conversation from a report's JSON file.

    Raises:
        typer.BadParameter: The file does not hold a conversation.
    """
    import msgspec

    from tito_conformance.testing.moves import AnyMove
    from tito_core.store.records import UNREADABLE

    try:
        return msgspec.json.decode(path.read_bytes(), type=list[AnyMove])
    except (OSError, *UNREADABLE) as error:
        raise typer.BadParameter(f"--replay: {path} is not a conversation.json of a report: {error}.") from error


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)
