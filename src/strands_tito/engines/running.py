"""Run a server for the duration of a `with` block."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TypedDict, TypeVar, Unpack

from strands_tito.engines import install, process
from strands_tito.engines.process import RunningEngine
from strands_tito.engines.progress import ProgressCallback, silent
from strands_tito.engines.spec import EngineSpec, find

_T = TypeVar("_T")


def bring_up(
    engine: str | EngineSpec,
    model: str | Path = "smollm2",
    *,
    port: int | None = None,
    torch_index: str | None = None,
    timeout_s: float | None = None,
    server_args: Sequence[str] = (),
    dev_mode: bool = False,
    detached: bool = False,
    on_progress: ProgressCallback | None = None,
    cancel: threading.Event | None = None,
) -> RunningEngine:
    """Install the engine and the model if necessary, and start the server. Blocks; options as `process.start`.

    Args:
        engine: The engine or its name.
        model: A name that `strands_tito.engines.models.ensure` takes, or a folder.

    Raises:
        EngineError: The engine cannot be installed or started.
        ModelUnavailable: The model cannot be fetched or built.
    """
    spec = engine if isinstance(engine, EngineSpec) else find(engine)
    report = on_progress or silent
    env = install.ensure(spec, torch_index=torch_index, progress=report, cancel=cancel)
    path, name = find_model(model, env.python, report)
    return process.start(
        env, path, model_name=name, port=port, server_args=server_args, dev_mode=dev_mode,
        timeout_s=timeout_s, detached=detached, progress=report, cancel=cancel,
    )  # fmt: skip


def find_model(model: str | Path, python: Path, report: ProgressCallback) -> tuple[Path, str]:
    """Return the model's folder and its name on the server."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve(), path.resolve().name
    from strands_tito.engines import models  # loads transformers, which a folder does not need

    return models.ensure(str(model), python, progress=report), str(model)


@asynccontextmanager
async def running(
    name: str | EngineSpec,
    *,
    model: str | Path = "smollm2",
    port: int | None = None,
    torch_index: str | None = None,
    timeout_s: float | None = None,
    server_args: Sequence[str] = (),
    dev_mode: bool = False,
    on_progress: ProgressCallback | None = None,
) -> AsyncIterator[str]:
    """Run a server on this machine during the block; yields its URL.

        async with engines.running("vllm", model="smollm2") as url:
            ...

    Options as `bring_up`. The engine and the model are installed at the first use. The server and its children end with
    the block, and also if this process dies. `timeout_s` limits the start, not the installation. `on_progress` is
    called from a worker thread.

    Raises:
        EngineError: The engine cannot be installed or started.
        ModelUnavailable: The model cannot be fetched or built.
    """
    cancel = threading.Event()

    def up() -> RunningEngine:
        return bring_up(
            name, model, port=port, torch_index=torch_index, timeout_s=timeout_s, server_args=server_args,
            dev_mode=dev_mode, on_progress=on_progress, cancel=cancel,
        )  # fmt: skip

    engine = await _in_thread(up, cancel)
    try:
        yield engine.url
    finally:
        await _in_thread(lambda: process.stop(engine))


class Options(TypedDict, total=False):
    """Options of `running_sync`; those of `running`."""

    port: int | None
    torch_index: str | None
    timeout_s: float | None
    server_args: Sequence[str]
    dev_mode: bool
    on_progress: ProgressCallback | None


@contextmanager
def running_sync(name: str | EngineSpec, *, model: str | Path = "smollm2", **options: Unpack[Options]) -> Iterator[str]:
    """Run a server during the block, as `running`, in code without an event loop."""
    engine = bring_up(name, model, **options)
    try:
        yield engine.url
    finally:
        process.stop(engine)


async def _in_thread(work: Callable[[], _T], cancel: threading.Event | None = None) -> _T:
    """Run blocking work in a thread. On cancellation, set `cancel` and wait for the work to end."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if cancel is not None:
            cancel.set()
        with contextlib.suppress(Exception):
            result = await task
            if isinstance(result, RunningEngine):  # the server was healthy before the work saw `cancel`
                await asyncio.to_thread(process.stop, result)
        raise
