from __future__ import annotations

import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import httpx
import psutil
import pytest

from support.fake_engine import processes_of, wait_until_gone
from tito_engines import EngineEnv, StartFailed, process, start, stop
from tito_engines.process import find_process, is_running, tail


def test_a_server_is_healthy_when_start_returns_and_gone_when_stop_does(
    fake_env: EngineEnv, model: Path, cache: Path
) -> None:
    reported: list[str] = []
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    engine = start(
        fake_env,
        model,
        port=port,
        model_name="smol/model",
        server_args=("--stubborn",),
        progress=lambda text, fraction=None: reported.append(text),
    )
    assert engine.url == f"http://127.0.0.1:{port}"
    assert httpx.get(engine.url + "/health").status_code == 200
    assert engine.model == "smol/model"
    assert engine.log.parent == cache / "logs"
    assert "warmed up with {'model': 'smol/model'}" in engine.log.read_text()
    assert len(processes_of(cache)) == 3  # the server, its child in another session, and the orphan
    assert "ready" in reported[-1]
    assert stop(engine)
    assert processes_of(cache) == []
    assert not is_running(engine)
    assert not stop(engine)


def test_a_taken_port_is_said_before_anything_starts(fake_env: EngineEnv, model: Path, cache: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StartFailed, match=rf"127\.0\.0\.1:{port} .*choose another port"):
            start(fake_env, model, port=port)
    assert not (cache / "logs").exists()


def test_a_free_port_is_one_that_no_process_is_handed_by_chance() -> None:
    """SGLang listens 20 s after its start; by then its own processes have taken a dozen ports of those handed out."""
    ports = {process.free_port() for _ in range(50)}
    assert len(ports) > 40
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert max(ports) < low
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", ports.pop()))


def test_where_every_port_is_taken_the_system_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_is_free", lambda port: False)
    assert process.free_port() not in process.PORTS


def test_a_port_that_somebody_else_took_meanwhile_is_another(
    fake_env: EngineEnv, model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = [taken.getsockname()[1], process.free_port()]
        monkeypatch.setattr(process, "free_port", iter(ports).__next__)
        engine = start(fake_env, model)
        try:
            assert engine.port == ports[1]
        finally:
            stop(engine)
    assert processes_of(cache) == []


def test_logs_that_another_start_removes_meanwhile_are_no_error(cache: Path) -> None:
    assert process._written_at(cache / "none.log") == 0.0


def test_an_early_end_is_noticed_at_once_with_its_last_lines(fake_env: EngineEnv, model: Path, cache: Path) -> None:
    with pytest.raises(StartFailed) as caught:  # long before the hour that it may take, twice
        start(fake_env, model, timeout_s=3600, server_args=("--fail", "OSError: [Errno 98] Address already in use"))
    message = str(caught.value)
    assert "status 1 after" in message
    assert "  OSError: [Errno 98] Address already in use" in message
    assert "--port" in message
    assert processes_of(cache) == []


def test_a_command_that_does_not_exist(fake_env: EngineEnv, model: Path) -> None:
    spec = replace(fake_env.spec, command=lambda launch: ["/nonexistent/engine"])
    with pytest.raises(StartFailed, match=r"(?s)status 127.*/nonexistent/engine"):
        start(replace(fake_env, spec=spec), model)


def test_a_server_that_is_killed_while_it_starts_says_which_signal(fake_env: EngineEnv, model: Path) -> None:
    script = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    spec = replace(fake_env.spec, command=lambda launch: [str(launch.python), "-c", script])
    with pytest.raises(StartFailed, match=r"signal 9 .*out of memory"):
        start(replace(fake_env, spec=spec), model)


def test_a_server_that_is_never_healthy_is_stopped_at_the_deadline(
    fake_env: EngineEnv, model: Path, cache: Path
) -> None:
    with pytest.raises(StartFailed, match=r"(?s)not healthy after 2 s.*serving tiny-model"):
        start(fake_env, model, server_args=("--deaf",), timeout_s=2)
    assert processes_of(cache) == []


PARENT = """
import sys, time
from pathlib import Path
from support.fake_engine import FAKE
from tito_engines import ensure, start
engine = start(ensure(FAKE), Path(sys.argv[1]), server_args=["--stubborn"], detached=sys.argv[2] == "detached")
print(engine.pid, engine.created, flush=True)
time.sleep(600)
"""


def parent(model: Path, how: str) -> tuple[subprocess.Popen[str], int, float]:
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(model), how],
        stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1],
    )  # fmt: skip
    assert process.stdout is not None
    pid, created = process.stdout.readline().split()
    process.stdout.close()
    return process, int(pid), float(created)


def test_a_server_ends_with_the_process_that_started_it(fake_env: EngineEnv, cache: Path, model: Path) -> None:
    process, pid, created = parent(model, "attached")
    assert len(processes_of(cache)) == 3
    process.kill()
    process.wait()
    wait_until_gone(cache)
    supervisor = find_process(pid, created)
    if supervisor is not None:
        supervisor.wait(timeout=60)


def test_a_detached_server_outlives_it_and_can_still_be_stopped(fake_env: EngineEnv, cache: Path, model: Path) -> None:
    process, pid, created = parent(model, "detached")
    process.kill()
    process.wait()
    time.sleep(0.5)  # twice the time in which a supervisor notices
    assert len(processes_of(cache)) == 3
    supervisor = find_process(pid, created)
    assert supervisor is not None
    supervisor.terminate()
    wait_until_gone(cache)


def test_a_killed_supervisor_takes_the_server_along_and_stop_finds_the_rest(
    fake_env: EngineEnv, model: Path, cache: Path
) -> None:
    engine = start(fake_env, model, server_args=("--stubborn",))
    server = psutil.Process(engine.pid).children()[0]
    psutil.Process(engine.pid).kill()
    server.wait(timeout=60)
    assert len(processes_of(cache)) == 2  # only the supervisor knew them
    assert not is_running(engine)
    assert stop(engine)
    assert processes_of(cache) == []


def test_another_process_with_the_same_pid_is_not_taken_for_the_server() -> None:
    me = psutil.Process()
    assert find_process(me.pid, me.create_time()) is not None
    assert find_process(me.pid, me.create_time() - 60) is None


def test_the_tail_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    assert tail(log) == "  (nothing)"
    log.write_text("".join(f"line {n}\n" for n in range(100)))
    assert tail(log, 2) == "  line 98\n  line 99"
