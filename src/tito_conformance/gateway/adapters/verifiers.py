"""verifiers: the interception server of its rollouts, with its train client."""

import os
from typing import Any

import verifiers.v1 as vf  # noqa: F401  (it must be imported first)
from renderers.configs import Qwen3RendererConfig
from verifiers.v1.clients.client import ModelContext
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.interception.server import InterceptionServer
from verifiers.v1.session import RolloutSession
from verifiers.v1.task import TaskData
from verifiers.v1.trace import AgentInfo, Trace, TraceTask
from verifiers.v1.types import Sampling

from tito_conformance.gateway.child import in_loop, request

FACTS = {
    "name": "verifiers",
    "package": "verifiers",
    "pip": ["verifiers"],
    "python": "3.11 to 3.14",
    "wires": ["vllm"],
    "token_in": True,
    "release": "0.31.0",
    "note": "reads answers of vLLM up to 0.31; thinking_retention='all', as the template has no reasoning; the "
    "rollout's sampling holds, not the harness's",
}
opened: dict[str, Any] = {}
given: dict[str, Any] = {}


def start(engine: str, wire: str, tokenizer: str, model: str, variant: str) -> None:
    """Start the server, and load the tokenizer, which the first request does."""
    os.environ["PRIME_API_KEY"] = "EMPTY"
    given.update(engine=engine, tokenizer=tokenizer, model=model, server=InterceptionServer())
    in_loop(given["server"].start())
    first = session("warm up")
    body = {"model": model, "messages": [{"role": "user", "content": "Warm up."}]}
    request(f"{first['base_url']}/chat/completions", body, first["api_key"])


async def register(session: Any) -> str:
    """Return the key of a new session; on the server's own loop."""
    key: str = given["server"].register(session)[0]
    return key


def session(name: str) -> dict[str, Any]:
    """Make a rollout's session; its key is its name on the wire."""
    agent = AgentInfo(config=AgentConfig())
    trace = Trace(task=TraceTask(type="Task", data=TaskData(prompt="")), agent=agent)
    client = TrainClientConfig(
        base_url=f"{given['engine']}/v1",
        api_key_var="NONE",
        renderer=Qwen3RendererConfig(thinking_retention="all"),
        renderer_model_name=given["tokenizer"],
    )
    context = ModelContext(model=given["model"], client=client, sampling=Sampling(max_tokens=256, temperature=1.0))
    opened[name] = RolloutSession(ctx=context, trace=trace)
    return {"base_url": f"{given['server'].base_url}/v1", "api_key": in_loop(register(opened[name]))}


def export(name: str) -> list[dict[str, Any]]:
    """Return a row for each trainable branch."""
    branches = [each for each in opened[name].trace.branches if each.trainable]
    return [
        {"ids": [*each.token_ids], "mask": [int(on) for on in each.sampled_mask], "logprobs": [*each.logprobs]}
        for each in branches
    ]


def stop() -> None:
    """Stop the server."""
    in_loop(given["server"].stop())
