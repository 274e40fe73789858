"""`tito collect`: its options, its progress and its result."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from strands_tito.collect.folder import MAX_SAMPLES
from strands_tito.collect.rollout import exit_error
from strands_tito.collect.run import OnEnd, Tally
from tito_core.backend.registry import installed_backends
from tito_core.backend.retries import PATIENCE_S
from tito_core.interrupt import Interrupts, StoppableRunner, leave
from tito_core.ledger.turn import as_reward
from tito_engines.terminal import VisibleConsole, stages_shown, visible

if TYPE_CHECKING:
    from strands_tito.collect.actors import Connection
    from strands_tito.collect.run import Workers
    from tito_core.settings import RolloutOptions

STATUSES: Mapping[int, int] = {signal.SIGINT: 130, signal.SIGTERM: 143}
"""Exit statuses after Ctrl-C, and after SIGTERM, which job schedulers send; those of a shell."""
OWN_FLAGS = {
    "sampling": "--sampling",
    "max_total_tokens": "--max-total-tokens",
    "turn_timeout_s": "--turn-timeout",
    "verify_echo": "--verify-echo",
    "model": "--model",
    "parser": "--parser",
    "api_key": "the environment variable TITO_API_KEY, which other users of this machine cannot see",
    "store": "--out",
}
"""Options that `--option` refuses, and what sets them."""
QUIET_S = 5.0
"""Seconds between two lines without a terminal."""


def collect(
    tasks: Annotated[
        Path, typer.Argument(help="File of tasks, one JSON object per line.", exists=True, dir_okay=False)
    ],
    agent: Annotated[str, typer.Option(help="module:function; an async run(model, task) or a factory of agents.")],
    out: Annotated[Path, typer.Option(help="Folder for the rollouts; resumes an earlier collection.")],
    backend: Annotated[str, typer.Option(help=f"Backend of the server: {', '.join(installed_backends())}.")],
    base_url: Annotated[str, typer.Option(help="Address of the server, or of a router before several.")],
    tokenizer: Annotated[str, typer.Option(help="Name or folder of the model's tokenizer.")],
    n: Annotated[int, typer.Option("-n", min=1, max=MAX_SAMPLES, help="Rollouts per task.")] = 1,
    concurrency: Annotated[int, typer.Option(min=1, help="Rollouts at once.")] = 256,
    sampling: Annotated[
        list[str] | None, typer.Option(help="Sampling parameter, such as temperature=0.7; repeatable.")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            help="Any other option of a rollout or policy, as name=value, such as thinking=as-template, "
            "tool_calls=lenient or 'optional_outputs={\"top_logprobs\": 5}'; repeatable."
        ),
    ] = None,
    max_total_tokens: Annotated[int | None, typer.Option(min=1, help="Limit on the tokens of a trajectory.")] = None,
    turn_timeout: Annotated[float | None, typer.Option(help="Timeout for one turn, in seconds.")] = None,
    patience: Annotated[
        float, typer.Option(min=0, help="Seconds that a request waits for a server that is away or busy.")
    ] = PATIENCE_S,
    verify_echo: Annotated[
        str, typer.Option(help='Check the echoed prompt on every turn ("always") or a path\'s first ("first").')
    ] = "always",
    model: Annotated[str, typer.Option(help="Model name on the server; default: its first model.")] = "",
    parser: Annotated[str, typer.Option(help='Tool-call format; "auto" detects it from the chat template.')] = "auto",
    max_failures: Annotated[int, typer.Option(min=1, help="Stop after this many failures in a row.")] = 32,
    truncated_reward: Annotated[
        float | None, typer.Option(help="Reward of rollouts that a limit ended before they got one; default: none.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes that run the rollouts, up to one CPU each.")] = 1,
    ray: Annotated[str, typer.Option(help='Run on a Ray cluster: its address, "auto" or "local".')] = "",
    ray_actors: Annotated[
        int | None, typer.Option(min=1, help="Number of actors, one CPU each; default: all CPUs.")
    ] = None,
) -> None:
    """Collect groups of rollouts for each task; resumable.

    Exit status: 0 if all rollouts are finished, 1 if some are missing, 130 after Ctrl-C, 143 after SIGTERM.
    """
    latest: list[Tally] = []
    console = VisibleConsole(stderr=True)
    console.print("reading the tasks and the agent", style="dim", highlight=False)  # the imports below take seconds
    with Interrupts(STATUSES, "Interrupted before anything was collected.", lambda: _summary(latest)) as interrupts:
        from strands_tito.collect.actors import Connection, quiet_strands

        if ray and workers > 1:
            raise typer.BadParameter("--workers is for this machine: with --ray use --ray-actors.")
        quiet_strands()
        more, policy_options = further_options(option or [])
        options: dict[str, Any] = {"patience_s": patience, **({"model": model} if model else {}), **policy_options}
        connection = Connection(backend, base_url, tokenizer, parser, options)
        rollout_options: Any = {"sampling": sampling_parameters(sampling or []), "verify_echo": verify_echo}
        rollout_options |= {"max_total_tokens": max_total_tokens, "turn_timeout_s": turn_timeout, **more}
        check_options(rollout_options)
        about = {"agent": agent, "tokenizer": tokenizer, "sampling": rollout_options["sampling"]}
        if recorded := recorded_options(more | policy_options):
            about["options"] = recorded
        if truncated_reward is not None:
            about["truncated_reward"] = as_reward(truncated_reward)
        try:
            with (
                stages_shown(console),
                on_console(console) as draw,
                StoppableRunner() as runner,
                interrupts.calling(runner.stop),
            ):

                def on_end(tally: Tally) -> None:
                    latest[:] = [tally]
                    draw(tally)

                settings: Any = {
                    "n": n, "concurrency": concurrency, "max_failures": max_failures, "about": about, "on_end": on_end,
                    "truncated_reward": truncated_reward,
                }  # fmt: skip
                pool = ray, ray_actors, workers
                work = _collect(tasks, out, connection, agent, rollout_options, pool, settings, interrupts)
                with contextlib.suppress(KeyboardInterrupt):
                    try:
                        runner.run(work)
                    except SystemExit as error:  # raised in a task that the agent's code started, such as a tool
                        raise exit_error(error) from error
        finally:
            if latest:
                console.print(_summary(latest), highlight=False, markup=False, soft_wrap=True)
        if interrupts.received is not None:
            leave(interrupts.status, "" if latest else "Interrupted before anything was collected.")
    sys.exit(int(latest[0].missing > 0))


async def _collect(
    tasks: Path, out: Path, connection: Connection, agent: str, rollout_options: RolloutOptions,
    pool: tuple[str, int | None, int], settings: dict[str, Any], interrupts: Interrupts,
) -> None:  # fmt: skip
    from strands_tito.collect.folder import expect_usable
    from strands_tito.collect.rollout import AgentCode, FolderError, Tasks
    from strands_tito.collect.run import InProcess, tune_gc
    from strands_tito.collect.run import collect as collect_all

    folder = Path.cwd()
    code = AgentCode.of(agent, folder)
    checked = Tasks.of(tasks, need_prompt=not code.is_run)  # before the server is contacted
    expect_usable(out)
    workers: Workers
    ray, actors, processes = pool
    if ray:
        from strands_tito.collect.on_ray import OnRay

        workers = await OnRay.start(
            ray, connection, agent, actors=actors, concurrency=settings["concurrency"], folder=folder, **rollout_options
        )
        interrupts.take()  # Ray's own SIGTERM handler would end the process at once
    elif processes > 1:
        from strands_tito.collect.processes import Processes

        workers = await Processes.start(connection, agent, workers=processes, folder=folder, **rollout_options)
    else:
        workers = InProcess(await connection.connect(), code, **rollout_options)
    tune_gc()
    try:
        await collect_all(checked, workers, out, **settings)
    except OSError as error:  # a rollout's own errors are failures
        raise FolderError(
            f"{out} could not be written: {error}. Free disk space or fix the folder, and run the same command again; "
            "finished rollouts are kept."
        ) from error
    finally:
        await workers.aclose()


def check_options(rollout_options: RolloutOptions) -> None:
    """Check the options of the rollouts' models before the server is contacted.

    Raises:
        typer.BadParameter: An option has an invalid value.
    """
    from tito_core.settings import Settings

    try:
        Settings.of(**rollout_options)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def sampling_parameters(assignments: list[str]) -> dict[str, Any]:
    """Parse sampling parameters of the form name=value.

    Raises:
        typer.BadParameter: An assignment has another form, an unknown name or an invalid value.
    """
    from tito_core.backend.sampling import SamplingParams

    parameters = _assignments("--sampling", assignments, "temperature=0.7")
    try:
        SamplingParams(**parameters)
    except ValueError as error:
        raise typer.BadParameter(f"--sampling: {error}") from error
    return parameters


def further_options(assignments: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parse `--option`, and return the options of rollouts and those of the policy.

    Raises:
        typer.BadParameter: An assignment has another form, an unknown name, or a name with a flag of its own.
    """
    from tito_core.backend.sampling import refuse_unknown_option
    from tito_core.policy import PolicyOptions
    from tito_core.settings import RolloutOptions

    given = _assignments("--option", assignments, "thinking=as-template")
    for name in given:
        if name in OWN_FLAGS:
            raise typer.BadParameter(f"--option {name}: use {OWN_FLAGS[name]} instead.")
    rollout, policy = RolloutOptions.__annotations__, PolicyOptions.__annotations__
    try:
        refuse_unknown_option("option", given, [name for name in (*rollout, *policy) if name not in OWN_FLAGS])
    except ValueError as error:
        raise typer.BadParameter(f"--option: {error}") from error
    return (
        {name: value for name, value in given.items() if name in rollout},
        {name: value for name, value in given.items() if name in policy},
    )


def recorded_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that change what is collected: a resumed collection must have the same ones."""
    from tito_core.backend.registry import BackendOptions

    return {name: value for name, value in options.items() if name not in BackendOptions.__annotations__}


def _assignments(flag: str, assignments: list[str], example: str) -> dict[str, Any]:
    """Parse assignments of the form name=value. A value is JSON, or else a string.

    Raises:
        typer.BadParameter: An assignment has another form.
    """
    import msgspec

    from tito_core.store.records import UNREADABLE

    found: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals:
            raise typer.BadParameter(f"{flag} {assignment}: write name=value, such as {example}.")
        try:
            found[name] = msgspec.json.decode(text)
        except RecursionError as error:
            raise typer.BadParameter(f"{flag} {name}: the value is nested too deeply.") from error
        except UNREADABLE:
            found[name] = text
    return found


@contextmanager
def on_console(console: Console) -> Iterator[OnEnd]:
    """Yield a callback that displays a tally; it may be called any number of times."""
    if not console.is_terminal:
        yield _Lines(console)
        return
    shape = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    columns = (
        *(TextColumn("rollouts"), BarColumn(bar_width=24), MofNCompleteColumn()),
        *(TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.description}", table_column=shape)),
    )
    with Progress(*columns, console=console, expand=True, refresh_per_second=4) as bar:
        task = bar.add_task("", total=None)

        def draw(tally: Tally) -> None:
            bar.update(task, completed=tally.before + tally.finished, total=tally.total, description=status(tally))

        yield draw


class _Lines:
    """Prints at most one line every few seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = time.monotonic()

    def __call__(self, tally: Tally) -> None:
        now = time.monotonic()
        if now - self._last >= QUIET_S:
            self._last = now
            count = f"{tally.before + tally.finished:,} of {tally.total:,} rollouts"
            self._console.print(f"{count} · {status(tally)}", highlight=False, markup=False, soft_wrap=True)


def status(tally: Tally) -> str:
    """Return speed and failures in one line."""
    return " · ".join([f"{tally.tokens_per_s:,.0f} tokens/s", *_counted("failed", tally)])


def summary(tally: Tally) -> str:
    """Return the result of a collection, in two to four lines."""
    count = tally.before + tally.finished
    first = f"{count:,} of {tally.total:,} rollouts are finished"
    if tally.before:
        first += f", {tally.before:,} of them by an earlier run"
    endings = ", ".join(f"{reason.value} {count:,}" for reason, count in tally.endings.most_common())
    speed = f"{tally.finished:,} in {tally.seconds:,.1f} s, {tally.turns:,} turns, {tally.tokens_per_s:,.0f} tokens/s"
    lines = [f"{first}.", f"This run: {speed}{': ' + endings if endings else ''}."]
    if tally.finished:
        lines[-1] += f" {tally.rewarded:,} of {tally.finished:,} rewarded."
    if tally.failed:
        lines.append(f"{', '.join(_counted('failed', tally))}, the last with: {tally.last_error}")
    if tally.missing:
        lines.append(f"{tally.missing:,} are missing: run the same command again to collect them.")
    return "\n".join(lines)


def _counted(word: str, tally: Tally) -> list[str]:
    if not tally.failed:
        return []
    reasons = ", ".join(f"{reason.value} {count:,}" for reason, count in tally.failures.most_common())
    return [f"{tally.failed:,} {word} ({reasons})"]


def _summary(latest: list[Tally]) -> str:
    return visible(summary(latest[0])) if latest else ""
