"""Start a server, wait until it is healthy, and stop it with everything it started; and remember it in a file."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http.client
import json
import os
import random
import re
import socket
import subprocess
import threading
import time
import urllib.request
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypedDict, TypeVar, Unpack

from tito_engines import child_process, install
from tito_engines.errors import Cancelled, StartFailed
from tito_engines.install import EngineEnv
from tito_engines.spec import EngineSpec, Launch, find, logs_dir, state_dir
from tito_engines.terminal import ProgressCallback, silent

with contextlib.suppress(ModuleNotFoundError):  # `check_psutil` names the extra
    import psutil

_T = TypeVar("_T")
HOST = "127.0.0.1"
PORTS = range(10_000, 21_000)
"""Below Linux's ephemeral ports and below those that SGLang uses for its processes (22,000 and up)."""
KEPT_LOGS = 20
MARK = "TITO_ENGINE_MARK"
"""Environment variable with a value unique to each start. Identifies a server's processes after their parents died."""


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """A healthy server under a supervisor process. Stop it with `stop`."""

    name: str
    url: str
    model: str
    """The model's name on the server."""
    port: int
    log: Path
    pid: int
    """The supervisor's process id; the supervisor is the root of the server's process tree."""
    created: float
    """The supervisor's start time in seconds since the epoch; with the pid it identifies the process."""
    grace_s: float
    """Seconds that the server may take to end after SIGTERM."""
    mark: str
    """The value of `MARK` in the environment of each of its processes."""
    tokenizer: str = ""
    """Name or folder of the model's tokenizer; empty for a server that an older version started."""
    server_args: tuple[str, ...] = ()
    """Extra arguments for the server."""
    dev_mode: bool = False
    """Whether the endpoints that pause the server and load weights are enabled."""
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False, compare=False)


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
        await _in_thread(lambda: stop(engine))


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
        stop(engine)


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
    """Install the engine and the model if necessary, and start the server. Blocks; options as `start`.

    Args:
        engine: The engine or its name.
        model: A name that `tito_engines.models.ensure` takes, or a folder.

    Raises:
        EngineError: The engine cannot be installed or started.
        ModelUnavailable: The model cannot be fetched or built.
    """
    spec = engine if isinstance(engine, EngineSpec) else find(engine)
    report = on_progress or silent
    env = install.ensure(spec, torch_index=torch_index, progress=report, cancel=cancel)
    path, name = find_model(model, env.python, report)
    return start(
        env, path, model_name=name, port=port, server_args=server_args, dev_mode=dev_mode,
        timeout_s=timeout_s, detached=detached, progress=report, cancel=cancel,
    )  # fmt: skip


def find_model(model: str | Path, python: Path, report: ProgressCallback) -> tuple[Path, str]:
    """Return the model's folder and its name on the server."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve(), path.resolve().name
    from tito_engines import models  # loads transformers, which a folder does not need

    return models.ensure(str(model), python, progress=report), str(model)


def start(
    env: EngineEnv,
    model_path: Path,
    *,
    model_name: str | None = None,
    port: int | None = None,
    server_args: Sequence[str] = (),
    dev_mode: bool = False,
    timeout_s: float | None = None,
    detached: bool = False,
    progress: ProgressCallback | None = None,
    cancel: threading.Event | None = None,
) -> RunningEngine:
    """Start the server on 127.0.0.1 and return when its health check succeeds.

    Args:
        env: The engine's environment.
        model_path: The model's folder.
        model_name: The model's name on the server; the folder's name when None.
        port: The port; a free one when None.
        server_args: Extra arguments for the server.
        dev_mode: Enable the endpoints that pause the server and load weights.
        timeout_s: Seconds to wait until the server is healthy; the engine's own limit when None.
        detached: Keep the server running when this process ends.
        progress: Called with the current step.
        cancel: Set it from another thread to cancel the start.

    Raises:
        StartFailed: The server did not become healthy; has the last lines of its log. No process is left.
        Cancelled: `cancel` was set. No process is left.
    """
    begin = functools.partial(
        _start_on, env, model_path, model_name=model_name, server_args=server_args, dev_mode=dev_mode,
        timeout_s=timeout_s, detached=detached, report=progress or silent, cancel=cancel or threading.Event(),
    )  # fmt: skip
    if port is not None:
        return begin(_check_port(env.spec.name, port))
    try:
        return begin(free_port())
    except StartFailed as error:
        if re.search(TAKEN, str(error)) is None:
            raise
    return begin(free_port())  # another process took the port before the server did


def stop(engine: RunningEngine) -> bool:
    """Stop the server and wait until none of its processes is left. Return False if it had already ended."""
    root = find_process(engine.pid, engine.created)
    if root is not None:
        with contextlib.suppress(psutil.NoSuchProcess):
            root.terminate()  # the supervisor stops the rest: SIGTERM first, then SIGKILL
    _, hung = psutil.wait_procs([root] if root else [], timeout=engine.grace_s + 6)
    left = hung + _marked(engine.mark)  # empty unless the supervisor was killed or hangs
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=5)
    if engine._process is not None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            engine._process.wait(timeout=5)
        if engine._process.stdin is not None:
            engine._process.stdin.close()
    return root is not None or bool(left)


def is_running(engine: RunningEngine) -> bool:
    """Return whether the server's supervisor is alive."""
    return find_process(engine.pid, engine.created) is not None


def find_process(pid: int, created: float) -> psutil.Process | None:
    """Return the live process with this pid if its start time matches, since pids are reused; else None."""
    child_process.check_psutil()
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - created) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return None
    return process if same else None


def save(engine: RunningEngine) -> None:
    """Save a server under its engine's name; there is one server for each engine."""
    _write(engine, has_ended=False)


def load(name: str) -> RunningEngine | None:
    """Return an engine's running server, or None. If its supervisor has ended, stop the rest and remember that."""
    engine, has_ended = _read(name)
    if engine is None or has_ended:
        return None
    if is_running(engine):
        return engine
    stop(engine)
    _write(engine, has_ended=True)
    return None


def ended(name: str) -> RunningEngine | None:
    """Return an engine's last server if it was killed or crashed, and `forget` was not called; call `load` before."""
    engine, has_ended = _read(name)
    return engine if has_ended else None


def forget(name: str) -> None:
    """Delete an engine's state file."""
    _path(name).unlink(missing_ok=True)


def tail(log: Path, lines: int = 30) -> str:
    """Return the log's last lines, indented, or "(nothing)"."""
    try:
        found = log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]
    except FileNotFoundError:
        found = []
    return "\n".join(f"  {line}" for line in found) or "  (nothing)"


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
                await asyncio.to_thread(stop, result)
        raise


def _start_on(
    env: EngineEnv,
    model_path: Path,
    port: int,
    *,
    model_name: str | None,
    server_args: Sequence[str],
    dev_mode: bool,
    timeout_s: float | None,
    detached: bool,
    report: ProgressCallback,
    cancel: threading.Event,
) -> RunningEngine:
    spec = env.spec
    launch = Launch(env.python, model_path, model_name or model_path.name, HOST, port, tuple(server_args), dev_mode)
    log, mark = _new_log(spec.name, launch), uuid.uuid4().hex
    with log.open("wb") as out:
        variables = child_process.environment(env.python, {**spec.env(launch), MARK: mark})
        process = child_process.popen(spec.command(launch), variables, out, detached=detached, grace_s=spec.grace_s)
    engine = RunningEngine(
        spec.name, f"http://{HOST}:{port}", launch.model_name, port, log,
        process.pid, psutil.Process(process.pid).create_time(), spec.grace_s, mark,
        str(model_path) if launch.model_name == model_path.name else launch.model_name, tuple(server_args), dev_mode,
        process,
    )  # fmt: skip
    try:
        warm_up = spec.warm_up(launch) if spec.warm_up else None
        _wait_until_ready(engine, spec.health_path, warm_up, timeout_s or spec.ready_timeout_s, report, cancel)
    except BaseException:
        stop(engine)
        raise
    if detached:
        process.returncode = 0  # the process outlives this object; suppresses Popen's ResourceWarning
        return replace(engine, _process=None)
    return engine


def _wait_until_ready(
    engine: RunningEngine,
    health_path: str,
    warm_up: tuple[str, Mapping[str, object]] | None,
    limit: float,
    report: ProgressCallback,
    cancel: threading.Event,
) -> None:
    began = time.monotonic()
    assert engine._process is not None
    while True:
        elapsed = time.monotonic() - began
        status = engine._process.poll()
        if status is not None:
            raise StartFailed(_explain(engine, f"its process ended with {_status(status)} after {elapsed:.0f} s"))
        if cancel.is_set():
            raise Cancelled(f"Starting {engine.name} was cancelled after {elapsed:.0f} s.")
        if elapsed > limit:
            raise StartFailed(_explain(engine, f"it was not healthy after {limit:.0f} s and was stopped"))
        if _answers(engine.url + health_path, None, 2.0):
            break
        report(f"{engine.name}: starting with {engine.model}, {elapsed:.0f} s (limit {limit:.0f} s)", elapsed / limit)
        cancel.wait(0.3)
    if warm_up is not None:
        _answers(engine.url + warm_up[0], warm_up[1], max(limit - elapsed, 10.0))
    report(f"{engine.name}: ready after {time.monotonic() - began:.0f} s at {engine.url}", 1.0)


_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy for this machine


def _answers(url: str, body: Mapping[str, object] | None, timeout_s: float) -> bool:
    """Return whether a GET, or a POST of `body`, is answered with status 200."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with _OPENER.open(request, timeout=timeout_s) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException):  # among them HTTPError, URLError and timeouts
        return False


TAKEN = r"[Aa]ddress already in use"
HINTS = (
    (TAKEN, "The port is in use: choose another with --port, or leave it out for a free one."),
    (r"No space left on device", "Free some disk space, then try again."),
    (r"MemoryError|Cannot allocate memory|DefaultCPUAllocator", "Too little free memory: stop other programs."),
    (r"unrecognized arguments|invalid choice", "This version does not know one of the server arguments: check --arg."),
    (
        r"config\.json|Repo id must be|not a valid model|Unrecognized model|no such file.*model",
        "The model could not be loaded: --model takes a built-in name or a folder in Hugging Face layout.",
    ),
)


def _explain(engine: RunningEngine, what: str) -> str:
    shown = tail(engine.log)
    general = "Read the whole log. If the environment is damaged, remove it to have it installed again."
    hint = next((hint for pattern, hint in HINTS if re.search(pattern, shown)), general)
    return f"{engine.name} did not start: {what}. {hint} Last lines of {engine.log}:\n{shown}"


def _status(status: int) -> str:
    if status <= 128:
        return f"status {status}"
    return f"signal {status - 128}" + (
        " (killed, perhaps because the machine is out of memory)" if status == 137 else ""
    )


def _new_log(name: str, launch: Launch) -> Path:
    folder = logs_dir()
    folder.mkdir(parents=True, exist_ok=True)
    for old in sorted(folder.glob(f"{name}-*.log"), key=_written_at)[:-KEPT_LOGS]:
        old.unlink(missing_ok=True)
    model = re.sub(r"[^\w.-]+", "-", launch.model_name)
    return folder / f"{name}-{model}-{launch.port}-{time.strftime('%Y%m%d-%H%M%S')}.log"


def _written_at(log: Path) -> float:
    try:
        return log.stat().st_mtime
    except FileNotFoundError:  # another start has removed it
        return 0.0


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 on which nothing listens, outside the system's ephemeral ports if possible.

    SGLang binds its port about 20 s after its start; by then its own processes have taken many ephemeral ports.
    """
    for port in random.SystemRandom().sample(PORTS, 64):
        if _is_free(port):
            return port
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = int(probe.getsockname()[1])
        return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def _check_port(name: str, port: int) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise StartFailed(
                f"{name} cannot listen on {HOST}:{port} ({error.strerror}): choose another port, or leave it out for "
                "a free one."
            ) from None
    return port


def _marked(mark: str) -> list[psutil.Process]:
    """Return the live processes of one start, wherever they are in the process tree."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark:
                found.append(process)
    return found


_FIELDS = ("name", "url", "model", "port", "pid", "created", "grace_s", "mark", "tokenizer", "server_args", "dev_mode")


def _write(engine: RunningEngine, *, has_ended: bool) -> None:
    path = _path(engine.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {name: getattr(engine, name) for name in _FIELDS} | {"log": str(engine.log), "ended": has_ended}
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(record) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def _read(name: str) -> tuple[RunningEngine | None, bool]:
    try:
        record = json.loads(_path(name).read_text(encoding="utf-8"))
        has_ended = record.pop("ended", False)
        record |= {"log": Path(record["log"]), "server_args": tuple(record.get("server_args", ()))}
        return RunningEngine(**record), has_ended
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # absent, or of another version of this package
        return None, False


def _path(name: str) -> Path:
    return state_dir() / f"{name}.json"
