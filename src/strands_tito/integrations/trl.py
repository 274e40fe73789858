"""TRL: a `rollout_func` for `GRPOTrainer` that runs a Strands agent for each prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from strands_tito.export.trainer import LogprobPolicy
from strands_tito.export.trl import columns_of
from strands_tito.integrations.run_rollout import (
    Chat,
    MakeAgent,
    cleanup_agent,
    expect_template_arguments,
    run_rollout,
)
from tito_core.backend.sampling import SamplingParams
from tito_core.ledger.ledger import Ledger
from tito_core.model import Policy
from tito_core.policy import run_blocking
from tito_core.settings import sampling_params

__all__ = ["columns_of", "recorded_reward", "rollout_func", "sampling_of"]

_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "stop_strings": "stop"}
"""Names of vLLM and transformers in `generation_kwargs`, where they differ from ours."""
_NO_LIMIT = 2**31 - 1
"""Tokens of an answer that only the context limits."""
RolloutFunc = Callable[[list[Chat], Any], dict[str, Any]]


def rollout_func(
    make_agent: MakeAgent,
    policy: Policy,
    *,
    sampling: SamplingParams | Mapping[str, Any] | None = None,
    branches: Literal["error", "last"] = "error",
    agent: str | None = None,
    logprobs: LogprobPolicy = "checked",
    train_constrained: bool = False,
    concurrency: int = 32,
    **choices: Any,
) -> RolloutFunc:
    """Make a function for `GRPOTrainer(rollout_func=...)`.

    TRL repeats each prompt once per completion, and takes one completion for each.

    Args:
        make_agent: Makes the agent of one rollout; its row is TRL's prompt.
        policy: The policy. In server mode TRL loads its weights into the server; otherwise load them yourself.
        sampling: Sampling parameters; those of the trainer's arguments when None, `generation_kwargs` included.
        branches: See `sample_of`.
        agent: See `sample_of`.
        logprobs: See `LogprobPolicy`; with "omit" TRL computes its own.
        train_constrained: Whether to train tokens that were sampled under a grammar.
        concurrency: Rollouts at once.
        **choices: Options of the models; see `Policy.model`.
    """

    def run(prompts: list[Chat], trainer: Any) -> dict[str, Any]:
        params = sampling_of(trainer) if sampling is None else sampling_params(sampling)
        expect_template_arguments(policy, getattr(trainer.args, "chat_template_kwargs", None), "chat_template_kwargs")
        ledgers = run_blocking(_rollouts(policy, make_agent, prompts, params, concurrency, choices))
        return columns_of(
            ledgers,
            temperature=float(trainer.temperature),
            end_id=int(policy.tokenizer.eos_token_id),
            branches=branches,
            agent=agent,
            logprobs=logprobs,
            train_constrained=train_constrained,
        )

    return run


def recorded_reward(rollout_reward: Sequence[float | None], **_: Any) -> list[float | None]:
    """Return the rewards that rollouts recorded: a function for the trainer's `reward_funcs`."""
    return list(rollout_reward)


def sampling_of(trainer: Any) -> SamplingParams:
    """Return the sampling parameters of the trainer's arguments. As in TRL, its `generation_kwargs` come last.

    Raises:
        ValueError: An argument is unknown or would constrain the answers.
    """
    args = trainer.args
    given: dict[str, Any] = {
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "min_p": args.min_p,
        "repetition_penalty": args.repetition_penalty,
        "max_new_tokens": _NO_LIMIT if args.max_completion_length is None else args.max_completion_length,
    }
    more: dict[str, Any] = getattr(args, "generation_kwargs", None) or {}
    given |= {_NAMES.get(name, name): value for name, value in more.items()}
    given["top_k"] = given["top_k"] or None  # 0 means all tokens
    if regex := [name for name in vars(args) if name.endswith("structured_outputs_regex") and getattr(args, name)]:
        raise ValueError(
            f"{regex[0]} would constrain all answers, and constrained tokens are not trained. Leave it out, or pass "
            "rollout_func(sampling={'grammar': ...}, train_constrained=True)."
        )
    try:
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})
    except ValueError as error:
        raise ValueError(
            f"The trainer's sampling arguments, with generation_kwargs={more}, cannot be sent: {error} Change them, or "
            "pass rollout_func(sampling=...)."
        ) from error


async def _rollouts(
    policy: Policy,
    make_agent: MakeAgent,
    prompts: Sequence[Chat],
    sampling: SamplingParams,
    concurrency: int,
    choices: Mapping[str, Any],
) -> list[Ledger]:
    slots = asyncio.Semaphore(concurrency)

    async def one(prompt: Chat) -> Ledger:
        async with slots:
            model = policy.model(sampling=sampling, **choices)
            agent = make_agent(model, prompt)
            try:
                return (await run_rollout(agent, model, prompt)).ledger
            finally:
                cleanup_agent(agent)

    try:
        return list(await asyncio.gather(*map(one, prompts)))
    finally:
        await policy.aclose()  # this event loop ends here
