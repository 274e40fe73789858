"""strands-tito: `tito gateway`, which continues the sampled tokens on both engines' own wires."""

import os
import sys

from tito_conformance.gateway.child import free_port, request, spawn

FACTS = {
    "name": "strands-tito",
    "package": "strands-tito",
    "pip": [],
    "python": "3.11 to 3.14",
    "speaks": ["chat", "messages", "responses"],
    "wires": ["vllm", "sglang"],
    "token_in": True,
    "renders": "gateway",
}
URL = f"http://127.0.0.1:{free_port()}"


def start(engine: str, wire: str, tokenizer: str, model: str, variant: str) -> None:
    """Start the command."""
    command = [os.path.join(os.path.dirname(sys.executable), "tito"), "gateway", "--backend", wire]
    spawn([*command, "--base-url", engine, "--tokenizer", tokenizer, "--port", URL.rpartition(":")[2]], f"{URL}/health")


def session(name: str) -> dict[str, object]:
    """Return the session's address; the gateway makes the session at its first call."""
    return {"base_url": f"{URL}/sessions/{name}/v1", "api_key": "EMPTY"}


def export(name: str) -> list[dict[str, object]]:
    """Return a row for each path, each sampled token trained in one of them."""
    rows = request(f"{URL}/sessions/{name}/trajectories")["trajectories"]
    return [{"ids": row["token_ids"], "mask": row["loss_mask"], "logprobs": row["logprobs"]} for row in rows]
