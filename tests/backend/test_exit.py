"""A process that ends during a generation leaves nothing running on the engine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.backends import EOS, VOCAB, Kind, engine_name, hash_policy, soon
from tito_conformance.testing import ScriptedServer, scripted_server

SCRIPT = Path(__file__).parents[1] / "support" / "exits.py"


@contextmanager
def leaving(server: ScriptedServer, kind: Kind, way: str) -> Iterator[subprocess.Popen[str]]:
    path = os.pathsep.join([str(SCRIPT.parents[1]), *sys.path])
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), kind, server.base_url, way],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as process:
        yield process


@pytest.mark.parametrize(("kind", "way"), [("vllm", "run"), ("sglang", "fork")])
async def test_a_generation_ends_with_its_loop_and_its_process(kind: Kind, way: str) -> None:
    """By an abort where `asyncio.run` ends; by its connection where the process dies, though a fork of it lives on."""
    with scripted_server(engine_name(kind), hash_policy(), vocab_size=VOCAB, eos_ids=[EOS], latency=300.0) as server:
        engine = server.engine
        with leaving(server, kind, way) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stdout.readline() == "started\n"
            assert await soon(lambda: engine.running == 1)
            process.stdin.write("go\n")
            if way == "fork":
                assert process.stdout.readline() == "forked\n"
                assert await soon(lambda: engine.running == 0), "the fork holds the connection"
            process.stdin.close()
        assert await soon(lambda: engine.running == 0)
        by_id = {"vllm": "/inference/v1/abort_requests", "sglang": "/abort_request"}[engine_name(kind)]
        assert (by_id in [exchange.path for exchange in engine.exchanges]) is (way == "run")
