"""`tito engine`: install, start, stop and inspect engines on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from filelock import FileLock

from tito_engines import install as installation
from tito_engines import process
from tito_engines.cache import is_whole
from tito_engines.errors import EngineError, ModelUnavailable, StartFailed
from tito_engines.install import choose
from tito_engines.process import RunningEngine, bring_up, find_model
from tito_engines.spec import EngineSpec, find, installed, logs_dir, names, state_dir
from tito_engines.terminal import ProgressCallback, on_console, visible

app = typer.Typer(help="Install and run engines on this machine's CPU.", no_args_is_help=True)

Name = Annotated[
    str, typer.Argument(metavar="ENGINE", help=f"Name of the engine: {', '.join(names())}.", show_default=False)
]
Model = Annotated[
    str, typer.Option(help="Model: smollm2, qwen3-tiny, qwen3-moe-tiny, qwen3-vl-tiny, a folder or org/name.")
]
TorchIndex = Annotated[
    str | None,
    typer.Option(envvar=installation.TORCH_INDEX_VARIABLE, help="URL of a package index with CPU builds of torch."),
]


@contextmanager
def _progress() -> Iterator[ProgressCallback]:
    """Show progress; print expected errors without a traceback and exit with status 1."""
    try:
        with on_console() as report:
            yield report
    except (EngineError, ModelUnavailable) as error:
        typer.echo(visible(f"Error: {error}"), err=True)
        raise typer.Exit(1) from None


@app.command()
def install(
    name: Name,
    model: Annotated[str | None, typer.Option(help="Also download or build this model.", show_default=False)] = None,
    python: Annotated[Path | None, typer.Option(help="Python interpreter for the environment.")] = None,
    torch_index: TorchIndex = None,
) -> None:
    """Install an engine into its own environment in the cache directory."""
    with _progress() as report:
        env = installation.ensure(find(name), python=python, torch_index=torch_index, progress=report)
        if model is not None:
            find_model(model, env.python, report)
    typer.echo(f"{env.spec.title} is installed in {env.root}")


@app.command()
def start(
    name: Name,
    model: Model = "smollm2",
    port: Annotated[int | None, typer.Option(help="Port; default: a free one.", show_default=False)] = None,
    torch_index: TorchIndex = None,
    dev_mode: Annotated[
        bool, typer.Option("--dev-mode", help="Enable the endpoints that pause the server and load weights.")
    ] = False,
    timeout: Annotated[float | None, typer.Option(help="Seconds to wait until the server is healthy.")] = None,
    arg: Annotated[list[str] | None, typer.Option(help="Extra argument for the server; repeatable.")] = None,
) -> None:
    """Start a server in the background. Print its URL, and on standard error the line that connects a model to it."""
    with _progress() as report:
        spec = find(name)
        state_dir().mkdir(parents=True, exist_ok=True)
        with FileLock(state_dir() / f".{name}.lock"):
            engine = process.load(name)
            if engine is None:
                if (ended := process.ended(name)) is not None:
                    typer.echo(f"The last server {_how_it_ended(ended)}", err=True)
                engine = bring_up(
                    spec, model, port=port, torch_index=torch_index, timeout_s=timeout, dev_mode=dev_mode,
                    server_args=arg or (), detached=True, on_progress=report,
                )  # fmt: skip
                process.save(engine)
            elif differences := _differences(engine, model, port, dev_mode, arg):
                raise StartFailed(
                    f"{name} is already running with {engine.model} at {engine.url} (pid {engine.pid}), with "
                    f"{' and '.join(differences)}: run `tito engine stop {name}` first."
                )
    typer.echo(engine.url)
    typer.echo(f"{name} serves {engine.model}. In Python:\n    {_example(engine)}", err=True)


@app.command()
def stop(name: Name) -> None:
    """Stop a server and all its processes."""
    with _progress():
        find(name)
        engine = process.load(name)
        if engine is not None:
            process.stop(engine)
        ended = process.ended(name)
        process.forget(name)
    if engine is not None:
        typer.echo(f"{name} (pid {engine.pid}) is stopped.")
    else:
        typer.echo(f"{name} is not running{f': it {_how_it_ended(ended)}' if ended else '.'}")


@app.command()
def status(
    name: Annotated[
        str | None, typer.Argument(metavar="[ENGINE]", help="Show only this engine.", show_default=False)
    ] = None,
) -> None:
    """Show installed and running engines. With ENGINE, exit with status 1 if it is not running."""
    with _progress():
        specs = [find(name)] if name is not None else list(installed().values())
    for spec in specs:
        engine = process.load(spec.name)
        ended = process.ended(spec.name)
        typer.echo(f"{spec.name}: {_describe(engine) if engine else 'not running'}; {_installation(spec)}")
        if ended is not None:
            typer.echo(f"    The last server {_how_it_ended(ended)}")
        if engine:
            typer.echo(f"    {_example(engine)}")
    if name is not None and process.load(name) is None:
        raise typer.Exit(1)


@app.command()
def logs(
    name: Name,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the log.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", help="Number of lines from the end.")] = 40,
) -> None:
    """Show the log of the running server, or of the last one."""
    with _progress():
        find(name)
        engine = process.load(name)
        log = engine.log if engine else _latest_log(name)
    written = log.read_bytes()
    for line in written.decode(errors="replace").splitlines()[-lines:]:
        typer.echo(visible(line))
    if follow:
        _follow(log, len(written), lambda: engine is not None and process.is_running(engine))


def _differences(
    engine: RunningEngine, model: str, port: int | None, dev_mode: bool, arg: list[str] | None
) -> list[str]:
    """Return the options of a start that the running server does not have, each with both values."""
    found = []
    if engine.model not in (model, Path(model).name):
        found.append(f"--model {engine.model} and not {model}")
    if port not in (None, engine.port):
        found.append(f"--port {engine.port} and not {port}")
    if dev_mode and not engine.dev_mode:
        found.append("no --dev-mode")
    if arg is not None and tuple(arg) != engine.server_args:
        running = " ".join(f"--arg={each}" for each in engine.server_args) or "no --arg"
        found.append(f"{running} and not {' '.join(f'--arg={each}' for each in arg)}")
    return found


def _how_it_ended(engine: RunningEngine) -> str:
    last = process.tail(engine.log, 1).strip()
    return (
        f"({engine.model}, pid {engine.pid}) ended without `tito engine stop`: it crashed or was killed. The last line "
        f"of its log {engine.log}:\n    {visible(last)}"
    )


def _describe(engine: RunningEngine) -> str:
    minutes = (time.time() - engine.created) / 60
    return f"running {engine.model} at {engine.url} for {minutes:.0f} min (pid {engine.pid}, log {engine.log})"


def _example(engine: RunningEngine) -> str:
    """Return the Python line that connects a model to a server."""
    tokenizer = f'"{visible(engine.tokenizer)}"' if engine.tokenizer else "..."
    return f'model = TITOModel(backend="{engine.name}", base_url="{engine.url}", tokenizer={tokenizer})'


def _installation(spec: EngineSpec) -> str:
    try:
        root = installation.environment_dir(spec, choose(spec)[1])
    except EngineError as error:
        return str(error)
    return f"{spec.title} is installed in {root}" if is_whole(root) else f"{spec.title} is not installed"


def _latest_log(name: str) -> Path:
    found = sorted(logs_dir().glob(f"{name}-*.log"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise EngineError(f"No log of {name} in {logs_dir()}: run `tito engine start {name}` first.")
    return found[-1]


def _follow(log: Path, offset: int, alive: Callable[[], bool]) -> None:
    """Print new output until the server has ended and all output is printed."""
    with log.open("rb") as stream:
        stream.seek(offset)
        while True:
            running = alive()
            added = stream.read()
            if added:
                typer.echo(visible(added.decode(errors="replace")), nl=False)
            elif not running:
                return
            time.sleep(0.3)
