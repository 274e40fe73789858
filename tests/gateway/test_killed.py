"""A gateway that is killed at any moment: what was committed stays, and the harness's retry goes on."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.scripted import Says, call, engine_of, ids_of, tokenizer
from tito_conformance.testing import ScriptedServer
from tito_core import store
from tito_core.ledger.laws import check_ledger

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
TURNS, KILLS = 12, 3


@pytest.mark.suite
async def test_a_kill_loses_no_committed_turn(tmp_path: Path) -> None:
    answers = [f"So {n}. " + call("add", json.dumps({"a": n})) for n in range(TURNS)]
    engine = engine_of("vllm", lambda request: _next(request, answers), latency=0.05)
    with socket.socket() as free, ScriptedServer(engine) as server:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        folder = str(tokenizer().name_or_path)
        command = [sys.executable, "-m", "strands_tito", "gateway", "--backend", "vllm", "--base-url", server.base_url]
        command += ["--tokenizer", folder, "--port", str(port), "--store", str(tmp_path / "rollouts.tito")]
        running = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
        kills, chosen = 0, random.Random(7)
        harness = asyncio.create_task(_harness(port))
        try:
            while not harness.done():
                await asyncio.wait((harness,), timeout=chosen.uniform(0.1, 0.6) if await _listens(port) else 0.1)
                if kills < KILLS and not harness.done() and await _listens(port):
                    running.kill()
                    await running.wait()
                    kills += 1
                    running = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
            seen = harness.result()
        finally:
            running.kill()
            await running.wait()
    assert kills > 0
    [ledger] = store.read(tmp_path / "rollouts.tito")
    check_ledger(ledger)
    decode = tokenizer().decode
    last = max(ledger.trajectories, key=lambda path: len(path.turns))
    assert [decode(turn.draft.output_ids).count(text) for turn, text in zip(last.path, seen, strict=True)] == [
        1
    ] * TURNS


def _next(request: Any, answers: list[str]) -> Any:
    """Answer by how many answers the prompt shows, so that a turn that is sampled again says the same."""
    if request.scoring:
        return Says("")(request)
    shown = tokenizer().decode(request.prompt_ids).count('"arguments": {"a": ')
    return Says(ids_of(answers[min(shown, TURNS - 1)] + "<|im_end|>"))(request)


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


async def _harness(port: int) -> list[str]:
    """Play a conversation, and send each request again until it is answered."""
    messages: list[Any] = [{"role": "user", "content": "Go."}]
    seen = []
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}/sessions/s", timeout=60) as client:
        while len(seen) < TURNS:
            try:
                body = {"model": "any", "messages": messages, "tools": TOOLS}
                answer = await client.post("/v1/chat/completions", json=body)
            except httpx.TransportError:
                await asyncio.sleep(0.05)
                continue
            assert answer.status_code == 200, answer.text
            message = answer.json()["choices"][0]["message"]
            seen.append(message["content"])
            messages += [message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "1"}]
    return seen
