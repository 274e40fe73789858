"""Ctrl-C while a program waits for an answer or for the connection, in a new process."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.interrupted import WITHIN_S
from support.scripted import Says, engine_of, tokenizer
from tito_conformance.testing import Fault, ScriptedRequest, ScriptedServer

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"
PROGRAM = """
import asyncio, signal, threading
from strands import Agent
from tito_core import TITOModel

model = TITOModel(backend="{backend}", base_url="{url}", tokenizer="tokenizer", stream={stream})
agent = Agent(model=model, callback_handler=None)
try:
    {code}
except KeyboardInterrupt:
    print("interrupted")
print(len(model.ledger), "turns")
"""


def interrupted(program: str, cwd: Path, works: Callable[[], bool]) -> tuple[int, str, str]:
    """Run a program, send SIGINT when it waits for a server, and return its exit status and output."""
    with subprocess.Popen(
        [sys.executable, "-u", "-c", program],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell may have it ignored
    ) as process:
        while not works():
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        try:
            out, errors = process.communicate(timeout=WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return process.returncode, out, errors


@pytest.mark.parametrize(
    ("kind", "stream", "way"), [("vllm", True, 0), ("sglang", False, 1)], ids=["asyncio", "synchronous"]
)
def test_ctrl_c_aborts_the_turn_as_the_page_shows(kind: str, stream: bool, way: int, tmp_path: Path) -> None:
    tokenizer().save_pretrained(tmp_path / "tokenizer")
    shown = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8").partition("## Ctrl-C")[2], re.DOTALL)
    held: list[ScriptedRequest] = []

    def fault(number: int, request: ScriptedRequest) -> Fault | None:
        if request.ignore_eos or request.scoring or not request.max_new_tokens:  # a request of connect
            return None
        held.append(request)
        return Fault(hang=True)

    with ScriptedServer(engine_of(kind, Says("Yes."), fault=fault)) as server:
        code = shown[way].strip().replace("\n", "\n    ")
        program = PROGRAM.format(backend=kind, url=server.base_url, stream=stream, code=code)
        status, out, errors = interrupted(program, tmp_path, lambda: bool(held))
        until = time.monotonic() + WITHIN_S
        while server.engine.running:
            assert time.monotonic() < until, "a request was left running"
            time.sleep(0.01)
    assert (status, errors) == (0, ""), errors
    assert out == ("interrupted", "cancelled")[way] + "\n0 turns\n"


CONNECTING = """
import sys, threading
from tito_core import Policy

try:
    Policy.connect(backend="vllm", base_url="{url}", tokenizer="tokenizer")
except KeyboardInterrupt:
    print([thread.name for thread in threading.enumerate()])
"""


def test_ctrl_c_ends_connecting_to_a_silent_server(tmp_path: Path) -> None:
    tokenizer().save_pretrained(tmp_path / "tokenizer")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        connections: list[socket.socket] = []

        def connected() -> bool:
            with contextlib.suppress(BlockingIOError):
                connections.append(server.accept()[0])
            return bool(connections)

        program = CONNECTING.format(url=f"http://127.0.0.1:{server.getsockname()[1]}")
        ended = interrupted(program, tmp_path, connected)
        for connection in connections:
            connection.close()
    assert ended == (0, "['MainThread']\n", ""), "no thread is left"
