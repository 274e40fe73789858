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
import time
from collections.abc import Mapping
from typing import Any, Literal, Protocol

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

from strands_tito.export.sample import OUTSIDE, LogprobPolicy
from strands_tito.export.verl import output_of, outputs_of
from strands_tito.integrations.run_rollout import cleanup_agent, load_function, run_rollout
from tito_core.backend.errors import BackendError, UnsupportedByServerError
from tito_core.backend.protocol import (
    MAY_BE_UNREPORTED,
    Capabilities,
    EngineInfo,
    OnChunk,
    RawResponse,
    RawScores,
    TokenRequest,
)
from tito_core.backend.sampling import SamplingParams
from tito_core.ledger.columns import TokenIds
from tito_core.model import Policy
from tito_core.parsing.registry import AUTO
from tito_core.policy import Bound, bind
from tito_engines.spec import EngineSpec, find, names

_COMMON = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    "ignore_eos",
)
"""Sampling parameters that all of verl's engines take by these names."""
_NO_OPTIONAL_OUTPUTS = Capabilities(
    top_logprobs=0, prompt_logprobs=False, routed_experts=False, sampling_mask=False, priority=False
)


class Client(Protocol):
    """The part of verl's `LLMServerClient` that is used here."""

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        """Sample an answer and return a `TokenOutput`."""


class VerlBackend:
    """The servers behind one agent loop. verl routes requests with one `request_id` to one server.

    verl's client does not report the prompt that a server saw, nor its length, so this part of law 4 is not checked.
    It cannot abort a single request or score text.

    Args:
        client: verl's client.
        rollout: verl's `actor_rollout_ref.rollout` configuration: `name`, `logprobs_mode`, `max_model_len`,
            `prompt_length`, `response_length`.
        model: The model's name, for the ledger.
    """

    name = "verl"

    def __init__(self, client: Client, rollout: Mapping[str, Any], model: str = "policy") -> None:
        self._client = client
        self.info = _info(rollout, model)
        spec = _spec(rollout)
        self._sampling_names = {} if spec is None else spec.sampling_names

    async def connect(self) -> EngineInfo:
        """Return what verl's configuration says; no server is contacted."""
        return self.info

    async def generate(self, request: TokenRequest, on_chunk: OnChunk | None = None) -> RawResponse:
        """Sample an answer, without streaming.

        Raises:
            UnsupportedByServerError: The request has a grammar.
            BackendError: verl's client raised, such as Ray's errors of a server that died.
        """
        began, sampling = time.perf_counter(), parameters(request.sampling, self._sampling_names)
        try:
            output = await self._client.generate(
                request.session_id or request.request_id,
                prompt_ids=request.input_ids.tolist(),
                sampling_params=sampling,
            )
        except Exception as error:  # whatever it is, the agent's own code did not cause it
            raise BackendError(
                f"verl's client raised {type(error).__name__}: {str(error)[:1000]}",
                backend=self.name,
                request_id=request.request_id,
            ) from error
        return _raw(output, request, time.perf_counter() - began)

    async def score(self, token_ids: TokenIds) -> RawScores:
        """Raise: verl's client cannot score.

        Raises:
            UnsupportedByServerError: Always.
        """
        raise UnsupportedByServerError("verl's client cannot score text; verl computes logprobs itself.")

    async def tokenize(self, text: str) -> None:
        """Return None: verl's client cannot encode text."""

    async def abort(self, request_id: str) -> None:
        """Do nothing: verl's client cannot abort a single request."""

    async def aclose(self) -> None:
        """Do nothing: verl owns the client."""


def parameters(sampling: SamplingParams, names: Mapping[str, str]) -> dict[str, Any]:
    """Return all sampling parameters as verl's servers take them, so that verl's configuration sets none of them.

    A seed of None is left out: verl's `full_determinism` sets one.

    Args:
        sampling: The parameters.
        names: The engine's names of those that engines name differently; see `EngineSpec.sampling_names`.

    Raises:
        UnsupportedByServerError: A parameter is set that these servers do not apply.
    """
    if sampling.grammar is not None:
        raise UnsupportedByServerError(
            "verl's servers take no grammar from an agent loop: do not force tool calls or structured output.",
            backend="verl",
        )
    sent: dict[str, Any] = {name: getattr(sampling, name) for name in _COMMON}
    sent |= {"logprobs": True, "max_tokens": sampling.max_new_tokens}
    sent |= {"stop_token_ids": list(sampling.stop_token_ids), **sampling.extra}
    others: dict[str, Any] = {
        "min_new_tokens": sampling.min_new_tokens or None,
        "stop": list(sampling.stop) or None,
        "stop_regex": sampling.stop_patterns or None,
        "seed": sampling.seed,
    }
    for name, value in others.items():
        if value is not None and name not in names:
            raise UnsupportedByServerError(
                f"verl's servers of this engine do not apply {name}={value!r}: leave it out, or choose another engine "
                "as rollout.name.",
                backend="verl",
            )
        if value is not None:
            sent[names[name]] = value
    return sent


def _spec(rollout: Mapping[str, Any]) -> EngineSpec | None:
    """Return the engine of verl's configuration if a package here knows it, else None."""
    name = rollout.get("name")
    return find(name) if name in names() else None


def _info(rollout: Mapping[str, Any], model: str) -> EngineInfo:
    mode = rollout.get("logprobs_mode")  # vLLM's option; SGLang has none
    spec = _spec(rollout)
    processed = None if spec is None else spec.processed_logprobs
    if processed is None and mode is not None:
        processed = str(mode).startswith("processed")
    limit = rollout.get("max_model_len")
    longest = int(limit) if limit else int(rollout["prompt_length"]) + int(rollout["response_length"])
    return EngineInfo(
        backend="verl",
        model=model,
        max_model_len=longest - 1,  # verl reserves one token on SGLang
        version=str(rollout.get("name") or "unknown"),
        processed_logprobs=processed,
        capabilities=_NO_OPTIONAL_OUTPUTS,
        unreported=MAY_BE_UNREPORTED,
    )


def _raw(output: Any, request: TokenRequest, latency_s: float) -> RawResponse:
    ids = list(output.token_ids)
    sampling = request.sampling
    ended = bool(ids) and ids[-1] in sampling.stop_token_ids and not sampling.ignore_eos
    if output.stop_reason in ("aborted", "abort"):
        finish = "abort"
    else:  # verl reports "completed" for truncated answers too
        finish = "length" if len(ids) == sampling.max_new_tokens and not ended else "stop"
    fields = output.extra_fields
    first, last = fields.get("min_global_steps"), fields.get("max_global_steps", fields.get("global_steps"))
    known = last is not None and first in (None, last)
    return RawResponse(
        finish=finish,
        stop=ids[-1] if ended else None,
        output_ids=ids,
        logprobs=[] if output.log_probs is None and not ids else output.log_probs,
        cached_tokens=fields.get("num_cached_tokens"),
        versions=[(0, len(ids), str(last))] if known else (),
        latency_s=latency_s,
    )


logger = logging.getLogger(__name__)

_bound: dict[tuple[int, str, str], tuple[Any, Bound]] = {}
"""Bound templates by the tokenizer's identity, parser and arguments, because verl makes a loop for every rollout."""


class StrandsAgentLoop(AgentLoopBase):  # type: ignore[misc]  # verl has no types
    """Runs an agent on verl's own servers and returns the tokens that they sampled.

    Args:
        *args: Arguments of verl's base class.
        agent: "module:function" of a `MakeAgent`; its row is the dataset's row, as a dict.
        branches: "error" or "last", see `sample_of`; or "list", one output per trajectory, for verl's v1 trainer.
        trained_agent: The agent whose paths are trained; see `agent` of `samples_of` and `sample_of`.
        reward: "recorded" takes the ledger's rewards; a rollout without one is masked and has reward 0, with a
            warning. "verl" leaves all rewards to verl's own function. A batch of verl's cannot mix them: its scores
            come with fields that all rows must have. None means "verl" if verl's configuration has a reward function or
            a reward model, and "recorded" if not; with both a recorded and a configured reward it is an error.
        parser: Name of the tool-call format; "auto" detects it from the chat template.
        logprobs: See `LogprobPolicy`. Logprobs of validation rollouts are not checked, because they are not trained.
        **kwargs: Arguments of verl's base class.
    """

    def __init__(
        self,
        *args: Any,
        agent: str,
        branches: Literal["error", "last", "list"] = "error",
        trained_agent: str | None = None,
        reward: Literal["recorded", "verl"] | None = None,
        parser: str = AUTO,
        logprobs: LogprobPolicy = "checked",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._make_agent = load_function(agent)
        if reward not in (None, "recorded", "verl"):
            raise ValueError(f"reward must be 'recorded' or 'verl', not {reward!r}.")
        self._branches = branches
        self._trained_agent = trained_agent
        self._reward = reward
        self._has_verls_reward = _has_reward(self.config)
        self._logprobs = logprobs
        bound = _bound_of(self.tokenizer, parser, dict(self.apply_chat_template_kwargs or {}))
        backend = VerlBackend(self.server_manager, self.rollout_config)
        self._policy = Policy(backend, backend.info, *bound)

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
        if self._branches == "list":
            return [self._rewarded(output) for output in outputs_of(result.ledger, **options)]
        return self._rewarded(output_of(result.ledger, branches=self._branches, **options))

    def _rewarded(self, output: AgentLoopOutput) -> AgentLoopOutput:
        """Return an output with the reward that verl should see.

        Raises:
            ValueError: The rollout and verl's own function both have a reward, and none of the two was chosen.
        """
        fields = output.extra_fields
        recorded = fields["termination"] not in (None, *OUTSIDE) and output.reward_score is not None
        if self._reward is None and self._has_verls_reward and recorded:
            raise ValueError(
                f"Rollout {fields['rollout_id']} recorded the reward {output.reward_score}, and verl's configuration "
                "has a reward function or model too. Set reward: recorded or reward: verl in the loop's configuration."
            )
        if self._reward == "verl" or (self._reward is None and self._has_verls_reward):
            output.reward_score = None
        elif output.reward_score is None:
            logger.warning(
                "rollout=<%s> | not trained: it has no reward. Record one, or set reward: verl in the loop's "
                "configuration to let verl compute all rewards.", fields["rollout_id"],
            )  # fmt: skip
            output.reward_score, output.response_mask = 0.0, [0] * len(output.response_mask)
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


def _unchecked(logprobs: LogprobPolicy) -> LogprobPolicy:
    return "as-recorded" if logprobs == "checked" else logprobs


def _sampling_of(sampling_params: dict[str, Any], response_length: int) -> SamplingParams:
    params = {name: value for name, value in sampling_params.items() if name != "logprobs" and value is not None}
    params["max_new_tokens"] = params.pop("max_tokens", response_length)
    return SamplingParams.model_validate(params)
