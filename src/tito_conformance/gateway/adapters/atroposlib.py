"""Atropos: its managed server, which keeps token ids, behind its OpenAI proxy."""

import json
import sys
import tempfile

from tito_conformance.gateway.child import free_port, request, spawn

FACTS = {
    "name": "atroposlib",
    "package": "atroposlib",
    "pip": ["--no-deps atroposlib", "fastapi uvicorn aiohttp openai transformers pydantic-cli tenacity jinja2 numpy"],
    "python": "3.10 and later",
    "wires": ["sglang"],
    "token_in": True,
    "streams": False,
    "tools": False,
    "note": "text turns only: its tool calls need the vllm package beside it",
}
URL = f"http://127.0.0.1:{free_port()}"
made: dict[str, str] = {}


def start(engine: str, wire: str, tokenizer: str, model: str, variant: str) -> None:
    """Start the proxy with one server."""
    server = {"base_url": f"{engine}/v1", "server_type": wire, "api_key": "EMPTY"}
    with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
        json.dump({"model_name": model, "tokenizer_name": tokenizer, "servers": [server]}, file)
    command = [sys.executable, "-m", "atroposlib.envs.server_handling.managed_server_proxy", "--config", file.name]
    spawn([*command, "--host", "127.0.0.1", "--port", URL.rpartition(":")[2]], f"{URL}/health")


def session(name: str) -> dict[str, object]:
    """Make a session; its name is the gateway's."""
    made[name] = request(f"{URL}/sessions/create", {})["uuid"]
    return {"base_url": f"{URL}/{made[name]}/v1", "api_key": "EMPTY"}


def export(name: str) -> list[dict[str, object]]:
    """Return a row for each node; -100 is off the mask."""
    rows = []
    for node in request(f"{URL}/{made[name]}/nodes")["nodes"]:
        mask = [int(token != -100) for token in node["masked_tokens"]]
        rows.append({"ids": node["tokens"], "mask": mask, "logprobs": node["logprobs"]})
    return rows
