"""`tito engine`: install, start, stop and look at the servers of this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from filelock import FileLock

from strands_tito.engines import install as installation
from strands_tito.engines import process, state
from strands_tito.engines.errors import EngineError, StartFailed
from strands_tito.engines.interpreters import choose
from strands_tito.engines.locations import logs_dir, state_dir
from strands_tito.engines.process import RunningEngine
from strands_tito.engines.progress import Say, on_console
from strands_tito.engines.running import bring_up, find_model
from strands_tito.engines.spec import EngineSpec, find, installed, names
from strands_tito.terminal import visible

app = typer.Typer(help="Real engines on this machine's CPU.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="ENGINE", help=f"One of {', '.join(names())}.", show_default=False)]
Model = Annotated[str, typer.Option(help="A model's name (smollm2, qwen3-tiny, qwen3-moe-tiny) or a folder.")]
TorchIndex = Annotated[
    str | None,
    typer.Option(envvar=installation.TORCH_INDEX_VARIABLE, help="Address of a package index with CPU builds of torch."),
]


@contextmanager
def _sentences() -> Iterator[Say]:
    """Progress on the terminal, and errors as what they say, with exit status 1."""
    try:
        with on_console() as say:
            yield say
    except RuntimeError as error:
        from strands_tito.engines.errors import ModelUnavailable  # loads transformers: two seconds, so only here

        if not isinstance(error, EngineError | ModelUnavailable):
            raise
        typer.echo(visible(f"Error: {error}"), err=True)
        raise typer.Exit(1) from None


@app.command()
def install(
    name: Name,
    model: Annotated[str | None, typer.Option(help="Also get this model.", show_default=False)] = None,
    python: Annotated[Path | None, typer.Option(help="The Python to make the environment with.")] = None,
    torch_index: TorchIndex = None,
) -> None:
    """Install an engine into an environment of its own, in the cache directory."""
    with _sentences() as say:
        env = installation.ensure(find(name), python=python, torch_index=torch_index, progress=say)
        if model is not None:
            find_model(model, env.python, say)
    typer.echo(f"{env.spec.title} is in {env.root}")


@app.command()
def start(
    name: Name,
    model: Model = "smollm2",
    port: Annotated[int | None, typer.Option(help="A free one by default.", show_default=False)] = None,
    torch_index: TorchIndex = None,
    dev_mode: Annotated[
        bool, typer.Option("--dev-mode", help="Open the endpoints that pause and load weights, where they are shut.")
    ] = False,
    timeout: Annotated[float | None, typer.Option(help="Seconds that it may take to be healthy.")] = None,
    arg: Annotated[list[str] | None, typer.Option(help="One more argument for the server; repeatable.")] = None,
) -> None:
    """Start a server that stays until `tito engine stop`. Prints its URL."""
    with _sentences() as say:
        spec = find(name)
        state_dir().mkdir(parents=True, exist_ok=True)
        with FileLock(state_dir() / f".{name}.lock"):
            engine = state.load(name)
            if engine is None:
                engine = bring_up(
                    spec, model, port=port, torch_index=torch_index, timeout_s=timeout, dev_mode=dev_mode,
                    server_args=arg or (), detached=True, on_progress=say,
                )  # fmt: skip
                state.save(engine)
            elif engine.model not in (model, Path(model).name) or port not in (None, engine.port):
                raise StartFailed(
                    f"{name} runs already, with {engine.model} at {engine.url} (pid {engine.pid}): "
                    f"`tito engine stop {name}` first."
                )
    typer.echo(engine.url)


@app.command()
def stop(name: Name) -> None:
    """Stop the server that `tito engine start` started, with all its processes."""
    with _sentences():
        find(name)
        engine = state.load(name)
        if engine is not None:
            process.stop(engine)
            state.forget(name)
    typer.echo(f"{name} is not running." if engine is None else f"{name} is stopped (it was pid {engine.pid}).")


@app.command()
def status(
    name: Annotated[str | None, typer.Argument(metavar="[ENGINE]", help="One engine only.", show_default=False)] = None,
) -> None:
    """Say what is installed and what runs. With an engine's name, exit status 1 says that it does not run."""
    with _sentences():
        specs = [find(name)] if name is not None else list(installed().values())
    for spec in specs:
        engine = state.load(spec.name)
        typer.echo(f"{spec.name}: {_describe(engine) if engine else 'not running'}; {_installation(spec)}")
    if name is not None and state.load(name) is None:
        raise typer.Exit(1)


@app.command()
def logs(
    name: Name,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as the server writes.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", help="How many of the last lines.")] = 40,
) -> None:
    """Show what the running server printed, or the last one of its kind."""
    with _sentences():
        find(name)
        engine = state.load(name)
        log = engine.log if engine else _latest_log(name)
    written = log.read_bytes()
    for line in written.decode(errors="replace").splitlines()[-lines:]:
        typer.echo(visible(line))
    if follow:
        _follow(log, len(written), lambda: engine is not None and process.is_running(engine))


def _describe(engine: RunningEngine) -> str:
    minutes = (time.time() - engine.created) / 60
    return f"running {engine.model} at {engine.url} for {minutes:.0f} min (pid {engine.pid}, log {engine.log})"


def _installation(spec: EngineSpec) -> str:
    try:
        root = installation.environment_dir(spec, choose(spec).minor)
    except EngineError as error:
        return str(error)
    return f"{spec.title} is in {root}" if installation.is_complete(root) else f"{spec.title} is not installed"


def _latest_log(name: str) -> Path:
    found = sorted(logs_dir().glob(f"{name}-*.log"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise EngineError(f"{name} has not been started yet: there is no log in {logs_dir()}.")
    return found[-1]


def _follow(log: Path, offset: int, alive: Callable[[], bool]) -> None:
    """Print what is added, until the server has ended and all of it is printed."""
    with log.open("rb") as stream:
        stream.seek(offset)
        while True:
            goes_on = alive()
            added = stream.read()
            if added:
                typer.echo(visible(added.decode(errors="replace")), nl=False)
            elif not goes_on:
                return
            time.sleep(0.3)
