"""agentcore-rl-toolkit: its rollout gateway, with a tree of messages (its default) or one line of tokens a session."""

import asyncio
from typing import Any

from agentcore_rl_toolkit.rollout_gateway import BaseTrace, HfTemplateRenderer, RolloutGateway, ThreadedGatewayServer
from agentcore_rl_toolkit.rollout_gateway.sampling_backends.sglang_http import SglangHttpBackend
from agentcore_rl_toolkit.rollout_gateway.sampling_backends.vllm_http import VllmHttpBackend
from transformers import AutoTokenizer

from tito_conformance.gateway.child import row

FACTS = {
    "name": "agentcore-rl-toolkit",
    "package": "agentcore-rl-toolkit",
    "pip": ["'agentcore-rl-toolkit[gateway]' 'transformers<5.13'"],
    "python": "3.11 to 3.13",
    "speaks": ["chat", "messages"],
    "wires": ["vllm", "sglang"],
    "variants": {"tree": {"token_in": False}, "linear": {"token_in": True}},
    "note": "with transformers before 5.13: with later ones its own parser reads no call",
}
given: dict[str, Any] = {}


def start(engine: str, wire: str, tokenizer: str, model: str, variant: str) -> None:
    """Start the gateway in a thread."""
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    backend = {"vllm": VllmHttpBackend, "sglang": SglangHttpBackend}[wire](engine)
    renderer = HfTemplateRenderer(loaded)
    gateway = RolloutGateway(backend=backend, renderer=renderer, tokenizer=loaded, history_mode=variant)
    given.update(gateway=gateway, server=ThreadedGatewayServer(gateway, host="127.0.0.1"))
    given["server"].start()


def session(name: str) -> dict[str, Any]:
    """Make a session, named by its key."""
    given["gateway"].create_session(name)
    return {"base_url": given["server"].base_url, "api_key": name}


def export(name: str) -> list[dict[str, Any]]:
    """End the session, and return its records; mask and logprobs begin after the first prompt."""
    base = BaseTrace(rollout_id=name)
    records = asyncio.run(given["gateway"].finish_session(name, base_sample=base, reward=1.0))
    rows = []
    for each in records:
        prompt = len(each.token_ids) - len(each.loss_mask)
        whole = row(each.token_ids[:prompt], each.token_ids[prompt:], each.logprobs)
        rows.append({**whole, "mask": [0] * prompt + [*each.loss_mask]})
    return rows


def stop() -> None:
    """Stop the server."""
    given["server"].shutdown()
