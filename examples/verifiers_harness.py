"""A verifiers harness that runs an agent in the environment's process, on the servers that prime-rl trains.

Install it as a package, and name it as the harness of a taskset's agent: `--env.agent.harness.id my_package`. The task
scores the rollout. `endpoint` is not used: verifiers' own proxy would render the messages again.
"""

from __future__ import annotations

from typing import Any

import verifiers.v1 as vf
from strands import Agent

from strands_tito import Policy, SamplingParams
from strands_tito.export.verifiers import trace_of
from strands_tito.integrations.run_rollout import run_rollout

__all__ = ["StrandsHarness"]


class StrandsHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]  # verifiers is not installed here
    """Plays a task with a Strands agent."""

    APPENDS_SYSTEM_PROMPT, EXECUTES_CODE, NEEDS_CONTAINER = True, False, False
    policy: Policy | None = None

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: Any, secret: Any, mcp_urls: Any, data: Any
    ) -> Any:
        """Run the agent, and put its turns into `trace`."""
        if self.policy is None:
            url = ctx.client.base_url.removesuffix("/v1")
            self.policy = await Policy.connect_async(backend="vllm", base_url=url, tokenizer=ctx.model)
        temperature = 1.0 if ctx.sampling.temperature is None else ctx.sampling.temperature
        sampling = SamplingParams(temperature=temperature, max_new_tokens=ctx.sampling.max_tokens or 4096)
        model, tokenizer = self.policy.model(sampling=sampling), self.policy.tokenizer
        agent = Agent(model=model, system_prompt=data.system_prompt, callback_handler=None)
        result = await run_rollout(agent, model, data.prompt)
        made = trace_of(result.ledger, temperature=temperature, decode=lambda ids: str(tokenizer.decode(ids)))
        trace.nodes, trace.calls = made.nodes, made.calls
        trace.info.update(made.info)
        if not made.ok:
            raise vf.HarnessError(f"The rollout ended with {result.termination}: {result.error}")
        return vf.ProgramResult(0, "", "")
