"""Agent Lightning: the proxy of its server, which records each call."""

import os
import sys
import tempfile

from tito_conformance.gateway.child import free_port, request, row, spawn

FACTS = {
    "name": "agentlightning",
    "package": "agentlightning",
    "pip": ["agentlightning"],
    "python": "3.12 and later",
    "wires": ["vllm"],
    "token_in": False,
    "renders": "engine",
    "streams": False,
    "note": "events in its `triplet` form, which its trainers read",
}
URL = f"http://127.0.0.1:{free_port()}"


def start(engine: str, wire: str, tokenizer: str, model: str, variant: str) -> None:
    """Start the server, and register the engine."""
    folder = tempfile.mkdtemp()
    command = [os.path.join(os.path.dirname(sys.executable), "agl-server"), "host=127.0.0.1", "key=''"]
    command += [f"port={URL.rpartition(':')[2]}", f"default_proxy.model_name={model}", f"hydra.run.dir={folder}"]
    command += ["default_proxy.train.temperature=1.0", "default_proxy.val.temperature=0.0", "hydra.output_subdir=null"]
    spawn(command, f"{URL}/healthz")
    request(f"{URL}/api/models", [{"model": model, "endpoint": f"{engine}/v1"}])


def session(name: str) -> dict[str, object]:
    """Make a rollout; its address is its name."""
    request(f"{URL}/api/rollouts", [{"input": {}, "rollout_id": name}])
    return {"base_url": f"{URL}/proxy/rollout/{name}/attempt/0/mode/train/openai/v1", "api_key": "EMPTY"}


def export(name: str) -> list[dict[str, object]]:
    """Return a row for each call that succeeded."""
    events = request(f"{URL}/api/rollouts/{name}/events?format=triplet")
    calls = [event["data"] for event in events if event["event_type"] == "model_request"]
    return [
        row(call["prompt_token_ids"], call["response_token_ids"], call.get("response_log_probs"))
        for call in calls
        if call.get("response_token_ids")
    ]
