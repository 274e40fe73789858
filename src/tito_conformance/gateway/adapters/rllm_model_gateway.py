"""rllm-model-gateway: a proxy of vLLM's chat route that records each call."""

import os
import sys

from tito_conformance.gateway.child import free_port, request, row, settled, spawn

FACTS = {
    "name": "rllm-model-gateway",
    "package": "rllm-model-gateway",
    "pip": ["rllm-model-gateway openai"],
    "python": "3.10 and later",
    "wires": ["vllm"],
    "token_in": False,
    "renders": "engine",
}
URL = f"http://127.0.0.1:{free_port()}"


def start(engine: str, wire: str, tokenizer: str, model: str, variant: str) -> None:
    """Start the server with its store in memory."""
    command = [os.path.join(os.path.dirname(sys.executable), "rllm-model-gateway"), "--host", "127.0.0.1"]
    command += ["--port", URL.rpartition(":")[2], "--worker", f"{engine}/v1", "--store", "memory"]
    spawn([*command, "--log-level", "warning"], f"{URL}/health")


def session(name: str) -> dict[str, object]:
    """Return the session's address; the gateway makes the session at its first call."""
    return {"base_url": f"{URL}/sessions/{name}/v1", "api_key": "EMPTY"}


def export(name: str) -> list[dict[str, object]]:
    """Return a row for each call. Calls are written by a task after the answer."""
    traces = settled(lambda: request(f"{URL}/sessions/{name}/traces"))
    return [row(trace["prompt_token_ids"], trace["completion_token_ids"], trace["logprobs"]) for trace in traces]
