"""Start a server, wait until it is healthy, and stop it with everything it started."""

from __future__ import annotations

import contextlib
import functools
import random
import re
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import psutil

from strands_tito.engines import supervised
from strands_tito.engines.errors import Cancelled, StartFailed
from strands_tito.engines.install import EngineEnv
from strands_tito.engines.locations import logs_dir
from strands_tito.engines.progress import Say, silent
from strands_tito.engines.spec import Launch

HOST = "127.0.0.1"
PORTS = range(10_000, 21_000)
"""Ports that neither Linux hands out nor SGLang takes for its processes (from 22,000 on)."""
TAKEN = r"[Aa]ddress already in use"
KEPT_LOGS = 20
MARK = "TITO_ENGINE_MARK"
"""An environment variable, another for each start, that tells a server's processes where their parents are dead."""

HINTS = (
    (TAKEN, "The port is taken: choose another with --port, or none for a free one."),
    (r"No space left on device", "Free some disk space, then try again."),
    (r"MemoryError|Cannot allocate memory|DefaultCPUAllocator", "There is too little free memory: close something."),
    (r"unrecognized arguments|invalid choice", "One of the server arguments is not known to this version."),
    (
        r"config\.json|Repo id must be|not a valid model|Unrecognized model|no such file.*model",
        "The model was not read: --model takes a name of ours or a folder in Hugging Face layout.",
    ),
)


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """A healthy server. It holds itself and its children only through its supervisor: stop it with `stop`."""

    name: str
    url: str
    model: str
    """What the server calls the model."""
    port: int
    log: Path
    pid: int
    """Of the supervisor, the root of all its processes."""
    created: float
    """When that process started, in seconds since the epoch: with the pid, its identity."""
    grace_s: float
    """How long the server may take to end by itself."""
    mark: str
    """The value of `MARK` in the environment of each of its processes."""
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False, compare=False)


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
    progress: Say | None = None,
    cancel: threading.Event | None = None,
) -> RunningEngine:
    """Start the server on 127.0.0.1 and return when it answers its health check.

    `model_name` is what requests call the model (the folder's name by default), `port` a free one by default,
    `timeout_s` the engine's own limit by default. The server ends with this process, unless `detached`.
    Raises StartFailed with the last lines of the log, Cancelled when `cancel` is set; nothing is left running then.
    """
    begin = functools.partial(
        _start_on, env, model_path, model_name=model_name, server_args=server_args, dev_mode=dev_mode,
        timeout_s=timeout_s, detached=detached, say=progress or silent, cancel=cancel or threading.Event(),
    )  # fmt: skip
    if port is not None:
        return begin(_check_port(env.spec.name, port))
    try:
        return begin(free_port())
    except StartFailed as error:
        if re.search(TAKEN, str(error)) is None:
            raise
    return begin(free_port())  # somebody else took it, between our look and the server's


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
    say: Say,
    cancel: threading.Event,
) -> RunningEngine:
    spec = env.spec
    launch = Launch(env.python, model_path, model_name or model_path.name, HOST, port, tuple(server_args), dev_mode)
    log, mark = _new_log(spec.name, launch), uuid.uuid4().hex
    with log.open("wb") as out:
        variables = supervised.environment(env.python, {**spec.env(launch), MARK: mark})
        process = supervised.popen(spec.command(launch), variables, out, detached=detached, grace_s=spec.grace_s)
    engine = RunningEngine(
        spec.name, f"http://{HOST}:{port}", launch.model_name, port, log,
        process.pid, psutil.Process(process.pid).create_time(), spec.grace_s, mark, process,
    )  # fmt: skip
    try:
        warm_up = spec.warm_up(launch) if spec.warm_up else None
        _wait_until_ready(engine, spec.health_path, warm_up, timeout_s or spec.ready_timeout_s, say, cancel)
    except BaseException:
        stop(engine)
        raise
    if detached:
        process.returncode = 0  # it outlives this object, which need not warn of it
        return replace(engine, _process=None)
    return engine


def stop(engine: RunningEngine) -> bool:
    """End the server and all its processes; returns when none is left. False where it had ended before."""
    root = find_process(engine.pid, engine.created)
    if root is not None:
        with contextlib.suppress(psutil.NoSuchProcess):
            root.terminate()  # the supervisor ends the rest, politely first
    _, hung = psutil.wait_procs([root] if root else [], timeout=engine.grace_s + 6)
    left = hung + _marked(engine.mark)  # none, unless the supervisor was killed or hangs
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


def _marked(mark: str) -> list[psutil.Process]:
    """The live processes of one start, wherever they are in the process tree."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark:
                found.append(process)
    return found


def is_running(engine: RunningEngine) -> bool:
    """Whether its supervisor is alive."""
    return find_process(engine.pid, engine.created) is not None


def find_process(pid: int, created: float) -> psutil.Process | None:
    """The live process of that pid, if it is the same one: pids are used again."""
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - created) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return None
    return process if same else None


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nothing listens on now, and that nobody is given who asks for any port.

    SGLang listens on its own only once its processes have taken a dozen ports each of those that the system hands out.
    """
    for port in random.SystemRandom().sample(PORTS, 64):
        if _is_free(port):
            return port
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        given: int = probe.getsockname()[1]
        return given


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def tail(log: Path, lines: int = 30) -> str:
    """The log's last lines, indented, or a note that it is empty."""
    try:
        found = log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]
    except FileNotFoundError:
        found = []
    return "\n".join(f"  {line}" for line in found) or "  (nothing)"


def _check_port(name: str, port: int) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise StartFailed(
                f"{name} cannot listen on {HOST}:{port} ({error.strerror}): "
                "choose another port, or none for a free one."
            ) from None
    return port


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
    except FileNotFoundError:  # another start was first to remove it
        return 0.0


def _wait_until_ready(
    engine: RunningEngine,
    health_path: str,
    warm_up: tuple[str, Mapping[str, object]] | None,
    limit: float,
    say: Say,
    cancel: threading.Event,
) -> None:
    began = time.monotonic()
    assert engine._process is not None
    with httpx.Client(trust_env=False, timeout=2.0) as client:  # a proxy has no part in reaching this machine
        while True:
            elapsed = time.monotonic() - began
            status = engine._process.poll()
            if status is not None:
                raise StartFailed(_explain(engine, f"its process ended with {_status(status)} after {elapsed:.0f} s"))
            if cancel.is_set():
                raise Cancelled(f"The start of {engine.name} was cancelled after {elapsed:.0f} s.")
            if elapsed > limit:
                raise StartFailed(_explain(engine, f"it was not healthy within {limit:.0f} s and was stopped"))
            if _answers(client, "GET", engine.url + health_path, None, 2.0):
                break
            say(f"{engine.name}: starting with {engine.model}, {elapsed:.0f} s (limit {limit:.0f} s)", elapsed / limit)
            cancel.wait(0.3)
        if warm_up is not None:
            _answers(client, "POST", engine.url + warm_up[0], warm_up[1], max(limit - elapsed, 10.0))
    say(f"{engine.name}: ready after {time.monotonic() - began:.0f} s at {engine.url}", 1.0)


def _answers(client: httpx.Client, method: str, url: str, body: Mapping[str, object] | None, timeout_s: float) -> bool:
    try:
        return client.request(method, url, json=body, timeout=timeout_s).status_code == 200
    except httpx.HTTPError:
        return False


def _status(status: int) -> str:
    if status <= 128:
        return f"status {status}"
    return f"signal {status - 128}" + (" (killed, which is what a machine out of memory does)" if status == 137 else "")


def _explain(engine: RunningEngine, what: str) -> str:
    shown = tail(engine.log)
    general = "Read the whole log, or try another model; a damaged environment is made anew once it is removed."
    hint = next((hint for pattern, hint in HINTS if re.search(pattern, shown)), general)
    return f"{engine.name} did not start: {what}. {hint} The last lines of {engine.log}:\n{shown}"
