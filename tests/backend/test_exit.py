"""A process that ends during a generation leaves nothing running on the engine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.backends import EOS, VOCAB, Kind, engine_name, hash_policy
from tito_conformance.testing import scripted_server

SCRIPT = Path(__file__).parents[1] / "support" / "exits.py"
SOON_S = 10.0


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("vllm", "thread"),
        ("sglang", "loop"),
        ("vllm", "exit"),
        ("sglang", "error"),
        ("vllm", "closed"),
        ("sglang", "closed"),
    ],
)
def test_running_generations_are_aborted_at_exit(kind: Kind, way: str) -> None:
    with scripted_server(engine_name(kind), hash_policy(), vocab_size=VOCAB, eos_ids=[EOS], latency=300.0) as server:
        path = os.pathsep.join([str(SCRIPT.parents[1]), *sys.path])
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), kind, server.base_url, way],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with process:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stdout.readline() == "started\n"
            until = time.monotonic() + SOON_S
            while not server.engine.running and time.monotonic() < until:
                time.sleep(0.01)
            assert server.engine.running == 1
            process.stdin.write("go\n")
            process.stdin.flush()
            if way == "closed":  # the process goes on, and nothing ever cancels or collects the task
                until = time.monotonic() + SOON_S
                while server.engine.running and time.monotonic() < until:
                    time.sleep(0.01)
                assert (server.engine.running, process.poll()) == (0, None)
                process.stdin.write("go\n")
                process.stdin.flush()
            process.wait(SOON_S * 3)
        until = time.monotonic() + SOON_S
        while server.engine.running and time.monotonic() < until:
            time.sleep(0.01)
        assert server.engine.running == 0
        paths = [exchange.path for exchange in server.engine.exchanges]
        assert {"vllm": "/inference/v1/abort_requests", "sglang": "/abort_request"}[engine_name(kind)] in paths
        ended = {"vllm": "generate-tokens-left", "sglang": "left"}[engine_name(kind)]
        assert set(server.engine.aborted + server.engine.disconnected) == {ended}


def test_an_unreachable_server_does_not_delay_the_exit() -> None:
    with scripted_server("sglang", hash_policy(), vocab_size=VOCAB, eos_ids=[EOS], latency=300.0) as server:
        path = os.pathsep.join([str(SCRIPT.parents[1]), *sys.path])
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), "sglang", server.base_url, "thread"],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
    with process:
        process.stdin.write("go\n")
        process.stdin.flush()
        assert process.wait(SOON_S * 2) == 0
