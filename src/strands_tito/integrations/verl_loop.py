"""verl: an `AgentLoopBase` that runs Strands agents. verl imports this module, by its configuration; it imports verl.

```yaml
# the file that actor_rollout_ref.rollout.agent.agent_loop_config_path names
- name: strands
  _target_: strands_tito.integrations.verl_loop.StrandsAgentLoop
  agent: my_project.agents:make_agent
```
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

from strands_tito.export.sample import expect_one_of
from strands_tito.export.trainer import LogprobPolicy
from strands_tito.export.verl import output_of, outputs_of
from strands_tito.integrations.run_rollout import cleanup_agent, load_function, run_rollout
from strands_tito.integrations.verl_backend import VerlBackend
from tito_core.backend.sampling import SamplingParams
from tito_core.model import Policy
from tito_core.parsing.registry import AUTO
from tito_core.policy import Bound, bind

logger = logging.getLogger(__name__)

_bound: dict[tuple[int, str, str], tuple[Any, Bound]] = {}
"""Bound templates by the tokenizer's identity, parser and arguments, because verl makes a loop for every rollout."""


class StrandsAgentLoop(AgentLoopBase):  # type: ignore[misc]  # verl has no types
    """Runs an agent on verl's own servers and returns the tokens that they sampled.

    Args:
        *args: Arguments of verl's base class.
        agent: "module:function" of a `MakeAgent`; its row is the dataset's row, as a dict.
        branches: "list", one output per trajectory, for verl's v1 trainer; "error" or "last", see `sample_of`.
            None means "list" where verl's worker takes one, and "error" where a rollout must be one row.
        trained_agent: The agent whose paths are trained; see `agent` of `samples_of` and `sample_of`.
        max_paths: The most outputs of a rollout, for "list"; see `samples_of`.
        reward: "recorded" takes the ledger's rewards; a rollout without one is masked and has reward 0, with a
            warning. "verl" leaves all rewards to verl's own function. A batch of verl's cannot mix them: its scores
            come with fields that all rows must have. None means "verl" if verl's configuration has a reward function or
            a reward model, and "recorded" if not; with both a recorded and a configured reward it is an error.
        parser: Name of the tool-call format; "auto" detects it from the chat template.
        logprobs: See `LogprobPolicy`. Logprobs of validation rollouts are not checked, because they are not trained.
        **kwargs: Arguments of verl's base class.
    """

    _newest = 0
    """The newest weights that answered a loop of this process; verl begins with those of step 0."""

    def __init__(
        self,
        *args: Any,
        agent: str,
        branches: Literal["error", "last", "list"] | None = None,
        trained_agent: str | None = None,
        max_paths: int | None = None,
        reward: Literal["recorded", "verl"] | None = None,
        parser: str = AUTO,
        logprobs: LogprobPolicy = "checked",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._make_agent = load_function(agent)
        if branches is not None:
            expect_one_of("branches", branches, ("list", "last", "error"))
        if reward is not None:
            expect_one_of("reward", reward, ("recorded", "verl"))
        self._branches = branches
        self._trained_agent = trained_agent
        self._max_paths = max_paths
        self._reward = reward
        self._has_verls_reward = _has_reward(self.config)
        self._logprobs = logprobs
        bound = _bound_of(self.tokenizer, parser, dict(self.apply_chat_template_kwargs or {}))
        self._backend = VerlBackend(self.server_manager, self.rollout_config)
        self._policy = Policy(self._backend, self._backend.info, *bound)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Run one rollout.

        Args:
            sampling_params: verl's sampling parameters: temperature, top_p, top_k, repetition_penalty.
            **kwargs: The dataset's row, with `raw_prompt`.
        """
        config = self.rollout_config
        sampling = _sampling_of(sampling_params, int(config.response_length))
        model = self._policy.model(
            ledger=self._policy.ledger(user={"verl": {"index": str(kwargs.get("index", ""))}}), sampling=sampling
        )
        agent = self._make_agent(model, kwargs)
        try:
            result = await run_rollout(agent, model, list(kwargs["raw_prompt"]))
        finally:
            cleanup_agent(agent)
        options: dict[str, Any] = {
            "temperature": sampling.temperature or 1.0,
            "end_id": self.tokenizer.eos_token_id,
            "logprobs": self._logprobs if _is_trained(sampling_params, config) else _unchecked(self._logprobs),
            "prompt_length": int(config.prompt_length),
            "response_length": int(config.response_length),
            "messages": len(agent.messages),
            "processor": self.processor,
            "generating_s": sum(turn.draft.engine.latency_s for turn in result.ledger),
            "agent": self._trained_agent,
        }
        # Only the workers that take a list, those of the v1 trainer (in 0.8 main_ppo_sync), number their sessions.
        branches = self._branches or ("list" if isinstance(kwargs.get("session_id"), int) else "error")
        if branches == "list":
            estimator = (self.config.get("algorithm") or {}).get("adv_estimator")
            estimator = estimator if _is_trained(sampling_params, config) else "of a validation"
            outputs = outputs_of(result.ledger, adv_estimator=estimator, max_paths=self._max_paths, **options)
        else:
            outputs = [output_of(result.ledger, branches=branches, **options)]
        StrandsAgentLoop._newest = max(self._backend.steps, default=StrandsAgentLoop._newest)
        steps = _steps(self._backend.steps, kwargs, StrandsAgentLoop._newest)
        for output in outputs:
            output.extra_fields = steps | output.extra_fields
        outputs = [self._rewarded(output) for output in outputs]
        return outputs if len(outputs) > 1 else outputs[0]  # which workers of every version take

    def _rewarded(self, output: AgentLoopOutput) -> AgentLoopOutput:
        """Return an output with the reward that verl should see.

        Raises:
            ValueError: The rollout and verl's own function both have a reward, and none of the two was chosen.
        """
        fields = output.extra_fields
        recorded = any(output.response_mask) and output.reward_score is not None  # else the 0 is an exporter's
        if self._reward is None and self._has_verls_reward and recorded:
            raise ValueError(
                f"Rollout {fields['rollout_id']} recorded the reward {output.reward_score}, and verl's configuration "
                "has a reward function or model too. Set reward: recorded or reward: verl in the loop's configuration."
            )
        if self._reward == "verl" or (self._reward is None and self._has_verls_reward):
            output.leave_reward(None)
        elif output.reward_score is None:
            logger.warning(
                "rollout=<%s> | not trained: it has no reward. Record one, or set reward: verl in the loop's "
                "configuration to let verl compute all rewards.", fields["rollout_id"],
            )  # fmt: skip
            output.leave_reward(0.0)
            output.response_mask = [0] * len(output.response_mask)
        return output


def _has_reward(config: Any) -> bool:
    """Return whether verl's configuration has a custom reward function or a reward model."""
    for part in (config.get("reward") or {}, config):  # the second until verl 0.8
        function, model = part.get("custom_reward_function") or {}, part.get("reward_model") or {}
        if function.get("path") or model.get("enable"):
            return True
    return False


def _bound_of(tokenizer: Any, parser: str, arguments: dict[str, Any]) -> Bound:
    key = (id(tokenizer), parser, repr(arguments))
    known = _bound.get(key)
    if known is None or known[0] is not tokenizer:
        known = _bound[key] = (tokenizer, bind(tokenizer, parser, template_arguments=arguments))
    return known[1]


def _is_trained(sampling_params: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Return whether verl trains this rollout: validations and greedy baselines have other sampling parameters."""
    names = ("temperature", "top_p", "top_k")
    return all(sampling_params[name] == config.get(name) for name in names if name in sampling_params)


def _steps(answered: list[int], row: Mapping[str, Any], newest: int) -> dict[str, int]:
    """Return the first and the last weights of a rollout, for its rows that have no known ones of their own.

    verl's v1 and fully async trainers fail on a row without them. A rollout without an answer has those with which its
    step began: verl's v1 trainer samples for step n with the weights of step n - 1. Other trainers do not say their
    step, so it has the `newest` that answered this process.
    """
    steps = answered or [newest if row.get("global_steps") is None else int(row["global_steps"]) - 1]
    return {"min_global_steps": min(steps), "max_global_steps": max(steps)}


def _unchecked(logprobs: LogprobPolicy) -> LogprobPolicy:
    return "as-recorded" if logprobs == "checked" else logprobs


def _sampling_of(sampling_params: dict[str, Any], response_length: int) -> SamplingParams:
    params = {name: value for name, value in sampling_params.items() if name != "logprobs" and value is not None}
    params["max_new_tokens"] = params.pop("max_tokens", response_length)
    return SamplingParams.model_validate(params)
