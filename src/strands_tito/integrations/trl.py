"""A `rollout_func` for TRL's `GRPOTrainer`, which runs a Strands agent for each prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from strands_tito.export.flat import Flat, flat_of, nothing
from strands_tito.export.logprobs import LogprobPolicy
from strands_tito.export.sample import sample_of
from strands_tito.integrations.run_rollout import Chat, MakeAgent, let_go, roll_out
from tito_core.backend.sampling import SamplingParams
from tito_core.ledger.ledger import Ledger
from tito_core.model import Policy
from tito_core.policy import run_blocking

RolloutFunc = Callable[[list[Chat], Any], dict[str, Any]]


def rollout_func(
    make_agent: MakeAgent,
    policy: Policy,
    *,
    sampling: SamplingParams | Mapping[str, Any] | None = None,
    branches: Literal["error", "last"] = "error",
    logprobs: LogprobPolicy = "checked",
    train_constrained: bool = False,
    concurrency: int = 32,
    **choices: Any,
) -> RolloutFunc:
    """Make a function for `GRPOTrainer(rollout_func=...)`.

    TRL gives it each prompt as often as it wants completions of it, and takes one completion for each.

    Args:
        make_agent: Makes the agent of one rollout; its row is TRL's prompt.
        policy: The policy. Its server must have the trainer's weights: TRL does not know it.
        sampling: Sampling parameters; those of the trainer's arguments when None.
        branches: See `sample_of`.
        logprobs: See `LogprobPolicy`; with "omit" TRL computes its own.
        train_constrained: Whether tokens under a grammar are trained.
        concurrency: Rollouts at once.
        **choices: For the models, as `Policy.model` takes them.
    """

    def run(prompts: list[Chat], trainer: Any) -> dict[str, Any]:
        params = sampling_of(trainer) if sampling is None else _checked(sampling)
        ledgers = run_blocking(_rollouts(policy, make_agent, prompts, params, concurrency, choices))
        return columns_of(
            ledgers,
            temperature=float(trainer.temperature),
            end_id=int(policy.tokenizer.eos_token_id),
            branches=branches,
            logprobs=logprobs,
            train_constrained=train_constrained,
        )

    return run


def columns_of(
    rollouts: Sequence[Ledger],
    *,
    temperature: float,
    end_id: int,
    branches: Literal["error", "last"] = "error",
    logprobs: LogprobPolicy = "checked",
    train_constrained: bool = False,
) -> dict[str, Any]:
    """Give rollouts as what TRL takes from a `rollout_func`, an entry a rollout.

    Args:
        rollouts: Rollouts. One without a turn is an end token that is not trained.
        temperature: The trainer's, which it divides its logits by.
        end_id: The tokenizer's end of sequence.
        branches: See `sample_of`.
        logprobs: See `LogprobPolicy`.
        train_constrained: Whether tokens under a grammar are trained.

    Returns:
        `prompt_ids`, `completion_ids`, `logprobs` (None with "omit"), `env_mask`, 1 where a token is trained; and for
        reward functions `termination`, `rollout_id` and `rollout_reward`, the ledger's annotation "reward" or None.

    Raises:
        BranchedRolloutError, LogprobMismatchError, ValueError: As `sample_of` and `flat_of`.
    """
    flats: list[Flat] = []
    words: list[str | None] = []
    rewards: list[float | None] = []
    for rollout in rollouts:
        if not len(rollout):
            flats.append(nothing(end_id))
            words.append(rollout.annotation("termination"))
            rewards.append(None)
            continue
        sample = sample_of(rollout, branches=branches, train_constrained=train_constrained)
        flats.append(flat_of(sample, trainer="TRL", temperature=temperature, logprobs=logprobs))
        words.append(sample.termination.value)
        rewards.append(sample.reward)
    return {
        "prompt_ids": [flat.prompt_ids for flat in flats],
        "completion_ids": [flat.response_ids for flat in flats],
        "logprobs": None if logprobs == "omit" else [flat.logprobs for flat in flats],
        "env_mask": [flat.mask for flat in flats],
        "termination": words,
        "rollout_id": [rollout.uuid for rollout in rollouts],
        "rollout_reward": rewards,
    }


def recorded_reward(rollout_reward: Sequence[float | None], **_: Any) -> list[float | None]:
    """Return the rewards that rollouts recorded, as one of the trainer's `reward_funcs`."""
    return list(rollout_reward)


def sampling_of(trainer: Any) -> SamplingParams:
    """Read the trainer's sampling parameters off its arguments."""
    args = trainer.args
    given = {
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k or None,
        "min_p": args.min_p,
        "repetition_penalty": args.repetition_penalty,
        "max_new_tokens": args.max_completion_length,
    }
    return SamplingParams.model_validate({name: value for name, value in given.items() if value is not None})


def _checked(sampling: SamplingParams | Mapping[str, Any]) -> SamplingParams:
    return sampling if isinstance(sampling, SamplingParams) else SamplingParams.model_validate(dict(sampling))


async def _rollouts(
    policy: Policy,
    make_agent: MakeAgent,
    prompts: Sequence[Chat],
    sampling: SamplingParams,
    concurrency: int,
    choices: Mapping[str, Any],
) -> list[Ledger]:
    room = asyncio.Semaphore(concurrency)

    async def one(prompt: Chat) -> Ledger:
        async with room:
            model = policy.model(sampling=sampling, **choices)
            agent = make_agent(model, prompt)
            try:
                return (await roll_out(agent, model, prompt)).ledger
            finally:
                let_go(agent)

    try:
        return list(await asyncio.gather(*map(one, prompts)))
    finally:
        await policy.backend.aclose()  # this event loop ends here
