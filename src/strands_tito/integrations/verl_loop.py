"""verl's `AgentLoopBase` that runs Strands agents. Importing this module imports verl: verl does, by its configuration.

```yaml
# the file that actor_rollout_ref.rollout.agent.agent_loop_config_path names
- name: strands
  _target_: strands_tito.integrations.verl_loop.StrandsAgentLoop
  agent: my_project.agents:make_agent
```
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

from strands_tito.export.logprobs import LogprobPolicy
from strands_tito.export.verl import output_of, outputs_of
from strands_tito.integrations.run_rollout import let_go, named, roll_out
from strands_tito.integrations.verl_backend import VerlBackend
from tito_core.backend.sampling import SamplingParams
from tito_core.model import Policy
from tito_core.parsing.registry import AUTO
from tito_core.policy import Bound, bind

_bound: dict[int, tuple[Any, Bound]] = {}
"""What was read off a tokenizer, by its identity: a loop is made for every rollout."""


class StrandsAgentLoop(AgentLoopBase):  # type: ignore[misc]  # verl has no types
    """Runs the agent that a function makes on verl's own servers, and gives the tokens that they sampled.

    Args:
        *args: verl's.
        agent: "module:function" of a `MakeAgent`; its row is the dataset's, as a dict.
        branches: "error" or "last", see `sample_of`; or "list", which verl's v1 trainer takes: an output a trajectory.
        parser: Name of the tool-call format; "auto" takes the one that the chat template shows.
        logprobs: See `LogprobPolicy`. What verl samples to validate is not checked: it is not trained.
        **kwargs: verl's.
    """

    def __init__(
        self,
        *args: Any,
        agent: str,
        branches: Literal["error", "last", "list"] = "error",
        parser: str = AUTO,
        logprobs: LogprobPolicy = "checked",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._make_agent = named(agent)
        self._branches = branches
        self._logprobs = logprobs
        bound = _bound_of(self.tokenizer, parser)
        backend = VerlBackend(self.server_manager, self.rollout_config)
        self._policy = Policy(backend, backend.info, *bound)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Run one rollout.

        Args:
            sampling_params: verl's: temperature, top_p, top_k, repetition_penalty.
            **kwargs: The dataset's row, `raw_prompt` among it.
        """
        config = self.rollout_config
        sampling = _sampling_of(sampling_params, int(config.response_length))
        model = self._policy.model(
            ledger=self._policy.ledger(user={"verl": {"index": str(kwargs.get("index", ""))}}), sampling=sampling
        )
        agent = self._make_agent(model, kwargs)
        try:
            rolled = await roll_out(agent, model, list(kwargs["raw_prompt"]))
        finally:
            let_go(agent)
        options: dict[str, Any] = {
            "temperature": sampling.temperature or 1.0,
            "end_id": self.tokenizer.eos_token_id,
            "logprobs": self._logprobs if _is_trained(sampling_params, config) else _unchecked(self._logprobs),
            "prompt_length": int(config.prompt_length),
            "response_length": int(config.response_length),
            "messages": len(agent.messages),
            "generating_s": sum(turn.draft.engine.latency_s for turn in rolled.ledger),
        }
        if self._branches == "list":
            return outputs_of(rolled.ledger, **options)
        return output_of(rolled.ledger, branches=self._branches, **options)


def _bound_of(tokenizer: Any, parser: str) -> Bound:
    known = _bound.get(id(tokenizer))
    if known is None or known[0] is not tokenizer:
        known = _bound[id(tokenizer)] = (tokenizer, bind(tokenizer, parser))
    return known[1]


def _is_trained(sampling_params: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Tell what verl trains by what it samples with: a validation and a greedy baseline have other parameters."""
    of_training = ("temperature", "top_p", "top_k")
    return all(sampling_params[name] == config.get(name) for name in of_training if name in sampling_params)


def _unchecked(logprobs: LogprobPolicy) -> LogprobPolicy:
    return "as-recorded" if logprobs == "checked" else logprobs


def _sampling_of(sampling_params: dict[str, Any], response_length: int) -> SamplingParams:
    given = {name: value for name, value in sampling_params.items() if name != "logprobs" and value is not None}
    given["max_new_tokens"] = given.pop("max_tokens", response_length)
    return SamplingParams.model_validate(given)
