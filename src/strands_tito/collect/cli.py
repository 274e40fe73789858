"""`tito collect`: rollouts of many tasks with one command."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strands_tito.collect.entry import MAX_SAMPLES
from strands_tito.collect.errors import AgentError
from strands_tito.terminal import VisibleConsole, stages_shown, visible
from tito_core.backend.registry import installed_backends
from tito_core.interrupt import Interrupts, StoppableRunner, leave

if TYPE_CHECKING:
    from strands_tito.collect.collecting import Tally
    from strands_tito.collect.connection import Connection
    from strands_tito.collect.workers import Workers
    from tito_core.settings import RolloutOptions

STATUSES: Mapping[int, int] = {signal.SIGINT: 130, signal.SIGTERM: 143}
"""Exit statuses after Ctrl-C and SIGTERM, with which schedulers end a job, as shells have them."""


def collect(
    tasks: Annotated[Path, typer.Argument(help="The tasks: one JSON object a line.", exists=True, dir_okay=False)],
    agent: Annotated[str, typer.Option(help="module:function: an async run(model, task), or a factory of agents.")],
    out: Annotated[Path, typer.Option(help="Folder for the rollouts; an earlier collection there is resumed.")],
    backend: Annotated[str, typer.Option(help=f"Name of the backend: {', '.join(installed_backends())}.")],
    base_url: Annotated[list[str], typer.Option(help="Address of the server; repeat it for several equal ones.")],
    tokenizer: Annotated[str, typer.Option(help="Name or folder of the model's tokenizer.")],
    n: Annotated[int, typer.Option("-n", min=1, max=MAX_SAMPLES, help="Rollouts of each task.")] = 1,
    concurrency: Annotated[int, typer.Option(min=1, help="Rollouts at once.")] = 256,
    sampling: Annotated[
        list[str] | None, typer.Option(help="A sampling parameter, such as temperature=0.7; repeatable.")
    ] = None,
    max_total_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens of a trajectory.")] = None,
    turn_timeout: Annotated[float | None, typer.Option(help="Longest wait for a turn's answer, in seconds.")] = None,
    verify_echo: Annotated[
        str, typer.Option(help="Check the prompt's echo always, or the first of a path.")
    ] = "always",
    model: Annotated[str, typer.Option(help="Name of the model on the server; its first one by default.")] = "",
    parser: Annotated[str, typer.Option(help="Tool-call format.")] = "auto",
    max_failures: Annotated[int, typer.Option(min=1, help="Failures one after the other before giving up.")] = 32,
    ray: Annotated[str, typer.Option(help='Run on a Ray cluster: its address, "auto", or "local".')] = "",
    ray_actors: Annotated[
        int | None, typer.Option(min=1, help="Actors, each on a CPU; all of them by default.")
    ] = None,
) -> None:
    """Collect rollouts of an agent: groups of them for each task, gone on with after any end.

    The exit status is 0 when every rollout is there, 1 when some are missing, 130 when it was interrupted.
    """
    told: list[Tally] = []
    with Interrupts(STATUSES, "Interrupted before anything was collected.", lambda: _summary(told)) as interrupts:
        from strands_tito.collect.connection import Connection
        from strands_tito.collect.progress import on_console

        # Strands logs an error for each malformed call, since no tool has its name.
        logging.getLogger("strands.tools").setLevel(logging.CRITICAL)
        options = {"model": model} if model else {}
        url = base_url[0] if len(base_url) == 1 else tuple(base_url)
        connection = Connection(backend, url, tokenizer, parser, options)
        rollout_options: Any = {"sampling": parameters(sampling or []), "verify_echo": verify_echo}
        rollout_options |= {"max_total_tokens": max_total_tokens, "turn_timeout_s": turn_timeout}
        check(rollout_options)
        about = {"agent": agent, "tokenizer": tokenizer, "sampling": rollout_options["sampling"]}
        console = VisibleConsole(stderr=True)
        try:
            with (
                stages_shown(console),
                on_console(console) as draw,
                StoppableRunner() as runner,
                interrupts.calling(runner.stop),
            ):

                def on_end(tally: Tally) -> None:
                    told[:] = [tally]
                    draw(tally)

                settings: Any = {
                    "n": n, "concurrency": concurrency, "max_failures": max_failures, "about": about, "on_end": on_end
                }  # fmt: skip
                work = _collect(tasks, out, connection, agent, rollout_options, ray, ray_actors, settings, interrupts)
                with contextlib.suppress(KeyboardInterrupt):
                    try:
                        runner.run(work)
                    except SystemExit as error:  # a task that the agent's code started, such as a tool of Strands'
                        raise AgentError(
                            f"The agent's code raised {error!r} in a task of its own, which ends the collection: raise "
                            "an error instead. What is finished is kept."
                        ) from error
        finally:
            if told:
                console.print(_summary(told), highlight=False, markup=False, soft_wrap=True)
        if interrupts.received is not None:
            leave(interrupts.status, "" if told else "Interrupted before anything was collected.")
    sys.exit(int(told[0].missing > 0))


def _summary(told: list[Tally]) -> str:
    from strands_tito.collect.progress import summary

    return visible(summary(told[0])) if told else ""


async def _collect(
    tasks: Path, out: Path, connection: Connection, agent: str, rollout_options: RolloutOptions, ray: str,
    actors: int | None, settings: dict[str, Any], interrupts: Interrupts,
) -> None:  # fmt: skip
    from strands_tito.collect.agent import AgentCode
    from strands_tito.collect.collecting import collect as collect_all
    from strands_tito.collect.folder import expect_usable
    from strands_tito.collect.on_ray import OnRay
    from strands_tito.collect.task import Tasks
    from strands_tito.collect.workers import InProcess, fewer_rounds

    folder = Path.cwd()
    code = AgentCode.of(agent, folder)
    known = Tasks.of(tasks, need_prompt=not code.is_run)  # before anything is asked
    expect_usable(out)
    workers: Workers
    if ray:
        workers = await OnRay.start(
            ray, connection, agent, actors=actors, concurrency=settings["concurrency"], folder=folder, **rollout_options
        )
        interrupts.take()  # from Ray, which has SIGTERM end the process where it is
    else:
        workers = InProcess(await connection.connect(), code, **rollout_options)
    fewer_rounds()
    try:
        await collect_all(known, workers, out, **settings)
    finally:
        await workers.aclose()


def check(rollout_options: RolloutOptions) -> None:
    """Check the options of each rollout's model, before any server is asked.

    Raises:
        typer.BadParameter: One has a bad value.
    """
    from tito_core.settings import Settings

    try:
        Settings.of(**rollout_options)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def parameters(given: list[str]) -> dict[str, Any]:
    """Read sampling parameters that were written as name=value.

    Raises:
        typer.BadParameter: One is not so written, unknown, or has a bad value.
    """
    import msgspec

    from tito_core.backend.sampling import SamplingParams
    from tito_core.store.records import UNREADABLE

    found: dict[str, Any] = {}
    for one in given:
        name, equals, text = one.partition("=")
        if not equals:
            raise typer.BadParameter(f"--sampling {one}: write name=value, such as temperature=0.7.")
        try:
            found[name] = msgspec.json.decode(text)
        except RecursionError as error:
            raise typer.BadParameter(f"--sampling {name}: its value is nested too deeply.") from error
        except UNREADABLE:
            found[name] = text
    try:
        SamplingParams(**found)
    except ValueError as error:
        raise typer.BadParameter(f"--sampling: {error}") from error
    return found
