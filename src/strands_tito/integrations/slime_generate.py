"""slime: a generate function for `--custom-generate-function-path`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from typing import Any

from strands import Agent, Snapshot

from strands_tito.export.slime import Branches, complete_aborted, fan_out, fill, normalizes, reset_reward
from strands_tito.export.trainer import LogprobPolicy
from strands_tito.integrations.run_rollout import (
    MakeAgent,
    cleanup_agent,
    expect_template_arguments,
    load_function,
    run_rollout,
)
from tito_core.backend.registry import installed_backends
from tito_core.backend.retries import PATIENCE_S
from tito_core.backend.sampling import SamplingParams
from tito_core.ledger.ledger import Ledger
from tito_core.model import Policy
from tito_core.store import from_record, to_record

Generate = Callable[..., Awaitable[Any]]
"""A coroutine function of slime's `args`, `sample`, `sampling_params`, and whether it is an `evaluation`."""
PARTIAL = "tito_partial"
"""Key of `sample.metadata` that keeps a rollout that slime aborted: its ledger's record, messages and agent."""

_DETOKENIZER_PARAMS = frozenset({"skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"})
"""Parameters of the server's detokenizer, which is not used: answers are token ids."""

_policies: dict[tuple[str, str, str, str], asyncio.Task[Policy]] = {}


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    """Run the agent that `args.tito_agent` names as "module:function"; see `generate_with`.

    Set `tito_agent`, and optionally `tito_branches`, `tito_max_paths`, `tito_trained_agent`, `tito_logprobs` and
    `tito_patience_s` (`BackendOptions`), in the file of slime's `--custom-config-path`.
    """
    where = getattr(args, "tito_agent", None)
    if where is None:
        raise ValueError("tito_agent is not set: add tito_agent: 'module:function' to slime's --custom-config-path.")
    run = generate_with(
        load_function(where),
        branches=getattr(args, "tito_branches", None),
        trained_agent=getattr(args, "tito_trained_agent", None),
        logprobs=getattr(args, "tito_logprobs", "checked"),
        max_paths=getattr(args, "tito_max_paths", None),
    )
    return await run(args, sample, sampling_params, evaluation=evaluation)


def generate_with(
    make_agent: MakeAgent,
    *,
    branches: Branches | None = None,
    trained_agent: str | None = None,
    policy: Policy | None = None,
    logprobs: LogprobPolicy = "checked",
    max_paths: int | None = None,
) -> Generate:
    """Make a `generate` for slime.

    Args:
        make_agent: Makes the agent of one rollout; its row is slime's sample.
        branches: "list" returns a list of samples for every rollout, one per trajectory; "last" and "error" return
            one sample, see `sample_of`. None means "list", or "last" with `--partial-rollout`, which takes no lists.
            An evaluation returns one sample without logprobs, the last path unless `branches` is "error". A list needs
            `--custom-reward-post-process-path strands_tito.export.slime.rewards_by_group`, or a function like it.
        trained_agent: The agent whose paths are trained; see `agent` of `samples_of` and `sample_of`.
        policy: The policy; when None, connect to slime's router and checkpoint once.
        logprobs: See `LogprobPolicy`; with "omit" slime computes its own.
        max_paths: The most samples of a list; see `samples_of`.

    Returns:
        A coroutine function of slime's `args`, `sample`, `sampling_params` and `evaluation`.
    """

    async def run(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
        partial = bool(getattr(args, "partial_rollout", False)) and not evaluation
        chosen = _branches(branches, partial, evaluation)
        if chosen == "list":
            _expect_groups(args)
        _expect_messages(args, sample, evaluation)
        reset_reward(sample)
        shared = policy or await _connected(args)
        expect_template_arguments(shared, _template_arguments(args), "--apply-chat-template-kwargs")
        before = (sample.metadata or {}).pop(PARTIAL, None) if partial else None
        model = shared.model(
            ledger=_ledger(shared, sample) if before is None else from_record(before["ledger"]),
            sampling=sampling_of(sampling_params),
            on_abort="discard",  # slime waits until its servers are idle, so an aborted answer cannot be resumed
            context_window_limit=_context_limit(args, evaluation),
            optional_outputs=_optional_outputs(args, sampling_params, evaluation),
        )
        earlier = len(model.ledger)
        agent = make_agent(model, sample)
        if before is not None:
            _restore(agent, before)
        try:
            rollout = (await run_rollout(agent, model, sample.prompt if before is None else None)).ledger
        finally:
            cleanup_agent(agent)
        logprob_policy: LogprobPolicy = "omit" if evaluation else logprobs
        temperature = float(sampling_params.get("temperature", 1.0))
        options = {
            "decode": _decode(shared),
            "temperature": temperature,
            "logprobs": logprob_policy,
            "processor": _processor(str(args.hf_checkpoint)) if rollout.images and not evaluation else None,
            "images": not evaluation,
            "top_p_replay": _replays(args),
            "agent": trained_agent,
        }
        aborted_options: dict[str, Any] = {
            "logprobs": logprob_policy,
            "reward_key": _reward_key(args, evaluation),
            "experts": _experts(args),
        }
        if chosen == "list":
            return [
                _completed(one, **aborted_options) for one in fan_out(sample, rollout, max_paths=max_paths, **options)
            ]
        done = fill(sample, rollout, branches=chosen, **options)
        if partial and done.tokens:
            _keep(done, agent, rollout)
            _mask_earlier(args, done, rollout, earlier, trained_agent)
        # Also with partial rollouts: slime runs a sample again only if slime itself aborted it.
        return _completed(done, **aborted_options)

    return run


def _completed(sample: Any, *, reward_key: str | None, **options: Any) -> Any:
    """Return a sample as slime reads it: with a reward key its reward is a dict, from which it takes that key."""
    complete_aborted(sample, **options)
    if reward_key and isinstance(sample.reward, float):
        sample.reward = {reward_key: sample.reward}
    return sample


def _expect_messages(args: Any, sample: Any, evaluation: bool) -> None:
    """Check that slime has not rendered the prompt, since the agent's template would wrap it in a user message again.

    Evaluations are not checked: each evaluation set has a flag of its own, which is not known here.

    Raises:
        ValueError: The prompt is rendered.
    """
    if getattr(args, "apply_chat_template", False) and isinstance(sample.prompt, str) and not evaluation:
        raise ValueError(
            f"slime's --apply-chat-template has already rendered the prompt {sample.prompt[:60]!r}. Remove the flag: "
            "the agent's messages are rendered here."
        )


def _expect_groups(args: Any) -> None:
    """Check that slime compares rewards within their group also where a rollout has several samples.

    Raises:
        ValueError: slime would compare the rewards of all prompts with each other as soon as one rollout branches.
    """
    if normalizes(args) and not getattr(args, "custom_reward_post_process_path", None):
        raise ValueError(
            "A list of samples for a rollout makes slime compare the rewards of different prompts. Add "
            "--custom-reward-post-process-path strands_tito.export.slime.rewards_by_group, or set tito_branches: last "
            "in slime's --custom-config-path."
        )


def _branches(branches: Branches | None, partial: bool, evaluation: bool) -> Branches:
    """Return the mode for rollouts with several trajectories.

    Raises:
        ValueError: "list" with partial rollouts.
    """
    if partial and branches == "list":
        raise ValueError("slime's --partial-rollout takes one sample per rollout: use branches='last' or 'error'.")
    if evaluation and branches != "error":
        return "last"  # slime would count the reward of each sample of a list
    return branches or ("last" if partial else "list")


def sampling_of(sampling_params: Mapping[str, Any]) -> SamplingParams:
    """Convert slime's sampling parameters, which are SGLang's.

    Raises:
        ValueError: A parameter is unknown, or `custom_params` has more than slime's own request for kept sets.
    """
    params = {
        name: value for name, value in sampling_params.items() if name not in _DETOKENIZER_PARAMS and value is not None
    }
    custom = params.pop("custom_params", None)
    if custom and custom != {"return_top_p_token_ids": True}:  # asked for by `_optional_outputs` instead
        raise ValueError(f"custom_params {custom} are not supported, since code of the server would read them.")
    if "sampling_seed" in params:
        params["seed"] = params.pop("sampling_seed")
    if isinstance(params.get("stop"), str):
        params["stop"] = (params["stop"],)
    return SamplingParams.model_validate(params)


async def _connected(args: Any) -> Policy:
    """Connect to slime's router once, also if many rollouts start at the same time."""
    backend, url = _server(args)
    arguments = _template_arguments(args)
    key = (backend, url, str(args.hf_checkpoint), repr(arguments))
    known = _policies.get(key)
    if known is None or (known.done() and (known.cancelled() or known.exception() is not None)):
        patience_s = float(getattr(args, "tito_patience_s", PATIENCE_S))
        connecting = Policy.connect_async(
            backend=backend, base_url=url, tokenizer=key[2], template_arguments=arguments, patience_s=patience_s
        )
        _policies[key] = asyncio.ensure_future(connecting)
    return await asyncio.shield(_policies[key])


def _server(args: Any) -> tuple[str, str]:
    """Return backend and address: `tito_backend` and `tito_base_url`, or those of slime's router.

    slime prefixes the router's arguments with the engine's name: `sglang_router_ip`, `sglang_router_port`.

    Raises:
        ValueError: slime's arguments have neither.
    """
    engine = next((name for name in installed_backends() if hasattr(args, f"{name}_router_ip")), None)
    backend = getattr(args, "tito_backend", None) or engine
    url = getattr(args, "tito_base_url", None)
    if engine is not None and not url:
        url = f"http://{getattr(args, f'{engine}_router_ip')}:{getattr(args, f'{engine}_router_port')}"
    if not backend or not url:
        raise ValueError(
            f"slime's arguments have no router of an installed backend ({', '.join(installed_backends())}): set "
            "tito_backend and tito_base_url in slime's --custom-config-path."
        )
    return backend, url


def _template_arguments(args: Any) -> dict[str, Any] | None:
    """Return slime's `--apply-chat-template-kwargs`: the agent's messages are rendered here, not by slime."""
    return getattr(args, "apply_chat_template_kwargs", None) or None


def _context_limit(args: Any, evaluation: bool) -> int | None:
    of_training: int | None = getattr(args, "rollout_max_context_len", None)
    return (getattr(args, "eval_max_context_len", None) or of_training) if evaluation else of_training


def _ledger(policy: Policy, sample: Any) -> Ledger:
    group = sample.group_index
    user = {"slime": {"index": sample.index}}
    return policy.ledger(group_id=None if group is None else str(group), user=user)


def _optional_outputs(args: Any, sampling_params: Mapping[str, Any], evaluation: bool) -> dict[str, Any] | None:
    """Return what slime replays: experts, and kept sets with the logprobs that show how much probability they have."""
    experts = _experts(args)
    wanted: dict[str, Any] = {} if experts is None else {"routed_experts": experts}
    if _replays(args) and not evaluation:
        wanted |= {"sampling_mask": True, "top_logprobs": max(int(sampling_params.get("top_k", -1)), 0)}
    return wanted or None


def _replays(args: Any) -> bool:
    """Return whether slime trains over kept sets (`get_rollout_top_p_logprob_kwargs` in its `loss.py`)."""
    return bool(getattr(args, "rollout_top_p", 1.0) != 1.0)


def _experts(args: Any) -> tuple[int, int] | None:
    """Return (layers, experts per token) if slime replays experts, else None."""
    if not getattr(args, "use_rollout_routing_replay", False):
        return None
    return int(args.num_layers), int(args.moe_router_topk)


def _reward_key(args: Any, evaluation: bool) -> str | None:
    of_training: str | None = getattr(args, "reward_key", None)
    return (getattr(args, "eval_reward_key", None) or of_training) if evaluation else of_training


def _decode(policy: Policy) -> Callable[[Any], str]:
    return lambda ids: str(policy.tokenizer.decode(ids, skip_special_tokens=False))


@cache
def _processor(checkpoint: str) -> Any:
    """Load the checkpoint's processor, whose tensors of images slime trains with."""
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(checkpoint)  # type: ignore[no-untyped-call]  # transformers has no types here


def _keep(sample: Any, agent: Agent, ledger: Ledger) -> None:
    """Keep what an aborted rollout continues from: its ledger, its messages and the agent's own key."""
    if sample.metadata is None or sample.status is not type(sample).Status["ABORTED"]:
        return
    sample.metadata[PARTIAL] = {
        "ledger": to_record(ledger),
        "messages": list(agent.messages),
        "agent": agent.take_snapshot(include=["model_state"]).to_dict(),
    }


def _restore(agent: Agent, kept: Mapping[str, Any]) -> None:
    """Give a new agent the messages and the key of an aborted one. By its key the ledger knows it as the same agent."""
    agent.messages[:] = kept["messages"]
    if "agent" in kept:  # a data buffer that was saved by an older version has none
        agent.load_snapshot(Snapshot.from_dict(kept["agent"]))


def _mask_earlier(args: Any, sample: Any, ledger: Ledger, earlier: int, agent: str | None) -> None:
    """Mask tokens that older weights sampled, if slime's `--mask-offpolicy-in-partial-rollout` is set."""
    if not getattr(args, "mask_offpolicy_in_partial_rollout", False) or not earlier:
        return
    start = len(sample.tokens) - sample.response_length
    for turn in ledger.path(ledger.last_turn(agent)):
        if turn.index < earlier:
            stop = max(turn.path_length - start, 0)  # a turn of another agent may be in the prompt, which has no mask
            first = max(stop - turn.own_length, 0)
            sample.loss_mask[first:stop] = [0] * (stop - first)
