"""A server for the length of a `with` block: installed if need be, started, stopped at the end."""

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
from strands_tito.engines.progress import Say, silent
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
    on_progress: Say | None = None,
    cancel: threading.Event | None = None,
) -> RunningEngine:
    """Install the engine, get the model, start the server: what `running` does before its block. Blocks.

    `model` is a name of `strands_tito.engines.models` or a folder. Raises EngineError or ModelUnavailable.
    """
    spec = engine if isinstance(engine, EngineSpec) else find(engine)
    say = on_progress or silent
    env = install.ensure(spec, torch_index=torch_index, progress=say, cancel=cancel)
    path, name = find_model(model, env.python, say)
    return process.start(
        env, path, model_name=name, port=port, server_args=server_args, dev_mode=dev_mode,
        timeout_s=timeout_s, detached=detached, progress=say, cancel=cancel,
    )  # fmt: skip


def find_model(model: str | Path, python: Path, say: Say) -> tuple[Path, str]:
    """The model's folder and the plain name that requests call it by."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve(), path.resolve().name
    from strands_tito.engines import models  # not for those who bring their own folder

    return models.ensure(str(model), python, progress=say), str(model)


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
    on_progress: Say | None = None,
) -> AsyncIterator[str]:
    """A real server on this machine; the block gets its URL.

        async with engine.running("vllm", model="smollm2") as url:
            ...

    The engine and the model are installed at the first use. The server has a process group of its own, and ends with
    the block, with its children, and also when this process dies. `timeout_s` limits the start, not the installation.
    `on_progress` is called from a worker thread. Raises EngineError or ModelUnavailable.
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
    """What `running_sync` takes besides the engine and the model; `running` and `bring_up` take the same."""

    port: int | None
    torch_index: str | None
    timeout_s: float | None
    server_args: Sequence[str]
    dev_mode: bool
    on_progress: Say | None


@contextmanager
def running_sync(name: str | EngineSpec, *, model: str | Path = "smollm2", **options: Unpack[Options]) -> Iterator[str]:
    """`running` for code without an event loop; takes the same options."""
    engine = bring_up(name, model, **options)
    try:
        yield engine.url
    finally:
        process.stop(engine)


async def _in_thread(work: Callable[[], _T], cancel: threading.Event | None = None) -> _T:
    """Run blocking work without blocking the loop. When we are cancelled the work is told, and waited for."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if cancel is not None:
            cancel.set()
        with contextlib.suppress(Exception):
            result = await task
            if isinstance(result, RunningEngine):  # it was up just before it could be told
                await asyncio.to_thread(process.stop, result)
        raise
