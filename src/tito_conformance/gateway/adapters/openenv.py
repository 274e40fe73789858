"""OpenEnv: the capture server of its harnesses."""

import sys

from tito_conformance.gateway.child import free_port, request, spawn

FACTS = {
    "name": "openenv",
    "package": "openenv",
    "pip": ["openenv"],
    "python": "3.10 and later",
    "speaks": ["chat", "messages", "responses"],
    "wires": ["vllm"],
    "token_in": False,
    "renders": "engine",
    "note": "its capture server; rows that it calls trainable",
}
URL = f"http://127.0.0.1:{free_port()}"
ADMIN = "admin"


def start(engine: str, wire: str, tokenizer: str, model: str, variant: str) -> None:
    """Start the server."""
    command = [sys.executable, "-m", "openenv.core.harness.capture.server", "--llm-url", engine, "--model", model]
    command += ["--engine", wire, "--port", URL.rpartition(":")[2], "--capture-level", "tokens", "--admin-key", ADMIN]
    spawn(command, f"{URL}/health")


def session(name: str) -> dict[str, object]:
    """Make a session; its id is its key."""
    made = request(f"{URL}/sessions", {"session_id": name}, ADMIN)
    return {"base_url": f"{URL}/v1", "api_key": made.get("api_key") or made["session_id"]}


def export(name: str) -> list[dict[str, object]]:
    """Return its stitched sequences that are trainable."""
    found = request(f"{URL}/sessions/{name}/rollout", key=ADMIN)["sequences"]
    return [
        {"ids": each["input_ids"], "mask": each["loss_mask"], "logprobs": each["logprobs"]}
        for each in found
        if each["trainable"]
    ]
