"""`tito gateway`: serve a policy to any harness, and record every token."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from strands_tito.collect.cli import check_options, further_options, sampling_parameters
from tito_core.backend.registry import installed_backends
from tito_core.interrupt import Interrupts, StoppableRunner, leave
from tito_engines.terminal import VisibleConsole, stages_shown

STATUSES: Mapping[int, int] = {signal.SIGINT: 0, signal.SIGTERM: 0}
"""Exit statuses after Ctrl-C and SIGTERM, by which a gateway ends."""
KEY_VARIABLE = "TITO_GATEWAY_KEY"
_FILE = "rollouts.tito"


def gateway(
    backend: Annotated[str, typer.Option(help=f"Backend of the server: {', '.join(installed_backends())}.")],
    base_url: Annotated[str, typer.Option(help="Address of the server, or of a router before several.")],
    tokenizer: Annotated[str, typer.Option(help="Name or folder of the model's tokenizer.")],
    store: Annotated[
        Path | None, typer.Option(help="File, or folder for a file rollouts.tito, to which each turn is written.")
    ] = None,
    host: Annotated[
        str, typer.Option(help=f"Address to listen at; any but loopback needs a key in {KEY_VARIABLE}.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0: a free one.")] = 8100,
    sampling: Annotated[
        list[str] | None, typer.Option(help="Sampling parameter, such as temperature=0.7; repeatable.")
    ] = None,
    fixed_sampling: Annotated[
        bool, typer.Option("--fixed-sampling", help="The harness's sampling parameters have no effect.")
    ] = False,
    ignore: Annotated[
        list[str] | None,
        typer.Option(help="Key of requests that has no effect though it would be refused; repeatable."),
    ] = None,
    no_normaliser: Annotated[
        list[str] | None, typer.Option(help="Difference in spelling that makes a branch; repeatable.")
    ] = None,
    idle: Annotated[float, typer.Option(min=1, help="Seconds without a request after which a session ends.")] = 3600.0,
    option: Annotated[
        list[str] | None, typer.Option(help="Any other option of a rollout or policy, as name=value; repeatable.")
    ] = None,
) -> None:
    """Serve chat completions, messages and responses at /v1 and /sessions/NAME/v1, and record every token."""
    console = VisibleConsole(stderr=True)
    with Interrupts(STATUSES, "Stopped.") as interrupts:
        from strands_tito.gateway.normalise import NORMALISERS
        from tito_core.backend.sampling import refuse_unknown_option

        more, policy_options = further_options(option or [])
        rollout: Any = {"sampling": sampling_parameters(sampling or []), **more}  # names that were checked
        check_options(rollout)
        try:
            refuse_unknown_option("--no-normaliser", dict.fromkeys(no_normaliser or ()), NORMALISERS)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        given: dict[str, Any] = {
            "host": host,
            "port": port,
            "api_key": os.environ.get(KEY_VARIABLE),
            "fixed_sampling": fixed_sampling,
            "ignored": ignore or (),
            "normalisers": [name for name in NORMALISERS if name not in (no_normaliser or ())],
            "idle_s": idle,
            **rollout,
        }
        if store is not None and (store.is_dir() or not store.suffix):
            store.mkdir(parents=True, exist_ok=True)
            store = store / _FILE
        connection = {"backend": backend, "base_url": base_url, "tokenizer": tokenizer, "store": store}
        with stages_shown(console), StoppableRunner() as runner, interrupts.calling(runner.stop):
            try:
                runner.run(_serve({**connection, **policy_options}, given, console))
            except KeyboardInterrupt:
                leave(interrupts.status, "Stopped.")


async def _serve(connection: Mapping[str, Any], given: Mapping[str, Any], console: VisibleConsole) -> None:
    from strands_tito.gateway.gateway import Gateway
    from tito_core.model import Policy

    async with await Policy.connect_async(**connection) as policy, Gateway(policy, **given) as served:
        console.print(f"listening at {served.url}/v1 and {served.url}/sessions/NAME/v1", highlight=False, markup=False)
        if policy.store is not None:
            console.print(f"each turn is written to {policy.store.path}", highlight=False, markup=False)
        await asyncio.Event().wait()
