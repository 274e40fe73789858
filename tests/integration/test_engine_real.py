"""Real vLLM and SGLang, installed and run by `tito_engines`: they answer and leave no process behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence

import httpx
import psutil
import pytest

import tito_engines as engines

pytestmark = pytest.mark.engine
PROMPT = [9707, 11, 1879, 0]
MODEL = "qwen3-tiny"

either = pytest.mark.parametrize("name", ["vllm", "sglang"])


def tree(url: str) -> list[psutil.Process]:
    """Return the supervisor of the server at an address, and all its descendants."""
    port = httpx.URL(url).port
    for process in psutil.Process().children(recursive=True):
        if any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in process.net_connections()):
            supervisor = process.parent()
            assert supervisor is not None
            return [supervisor, *supervisor.children(recursive=True)]
    raise AssertionError(f"no process below this one listens on {port}")


def completion(name: str, url: str) -> tuple[Sequence[int], Sequence[int]]:
    """Return the echoed prompt ids and eight greedy ids after them."""
    if name == "vllm":
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
        choice = httpx.post(url + "/v1/completions", json=body, timeout=60).raise_for_status().json()["choices"][0]
        return choice["prompt_token_ids"], choice["token_ids"]
    sampling = {"max_new_tokens": 8, "temperature": 0}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_prompt_token_ids": True}
    answer = httpx.post(url + "/generate", json=body, timeout=60).raise_for_status().json()
    return answer["prompt_token_ids"], answer["output_ids"]


@either
async def test_it_answers_in_token_ids_and_leaves_no_process(name: str) -> None:
    async with engines.running(name, model=MODEL) as url:
        processes = tree(url)
        echoed, sampled = completion(name, url)
    assert echoed == PROMPT
    assert len(sampled) == 8
    assert len(processes) >= 3
    assert not [process for process in processes if process.is_running()]


@pytest.mark.long
@either
def test_it_stops_when_its_parent_is_killed(name: str) -> None:
    script = (
        "import time; from strands_tito import engines\n"
        f"up = engines.bring_up({name!r}, {MODEL!r}); print(up.pid, flush=True); time.sleep(900)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent, parent.stdout:
        supervisor = psutil.Process(int(parent.stdout.readline()))
        processes = [supervisor, *supervisor.children(recursive=True)]
        parent.send_signal(signal.SIGKILL)
    assert len(processes) >= 3
    assert psutil.wait_procs(processes, timeout=15)[1] == []
