"""A `generate(args, sample, sampling_params)` for slime's `--custom-generate-function-path`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from strands import Agent

from strands_tito.export.logprobs import LogprobPolicy
from strands_tito.export.slime import Branches, begun_again, completed, fan_out, fill
from strands_tito.integrations.run_rollout import MakeAgent, let_go, named, roll_out
from tito_core.backend.registry import installed_backends
from tito_core.backend.sampling import SamplingParams
from tito_core.ledger.ledger import Ledger
from tito_core.model import Policy
from tito_core.store import from_record, to_record

Generate = Callable[..., Awaitable[Any]]
"""A coroutine function of slime's `args`, `sample`, `sampling_params`, and whether it is an `evaluation`."""
PARTIAL = "tito_partial"
"""Where `sample.metadata` keeps a rollout that slime aborted: its ledger's record and its messages."""

_SHOWN_ONLY = frozenset({"skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"})
"""How text is shown; with token ids there is nothing to show."""

_policies: dict[tuple[str, str, str], asyncio.Task[Policy]] = {}


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    """Run the agent that `args.tito_agent` names as "module:function"; see `generate_with`.

    slime's `--custom-config-path` sets `tito_agent`, and `tito_branches` and `tito_logprobs` where their defaults will
    not do.
    """
    where = getattr(args, "tito_agent", None)
    if where is None:
        raise ValueError("Say which agent to run: tito_agent: 'module:function' in slime's --custom-config-path.")
    run = generate_with(
        named(where),
        branches=getattr(args, "tito_branches", None),
        logprobs=getattr(args, "tito_logprobs", "checked"),
    )
    return await run(args, sample, sampling_params, evaluation=evaluation)


def generate_with(
    make_agent: MakeAgent,
    *,
    branches: Branches | None = None,
    policy: Policy | None = None,
    logprobs: LogprobPolicy = "checked",
) -> Generate:
    """Make a `generate` for slime.

    Args:
        make_agent: Makes the agent of one rollout; its row is slime's sample.
        branches: "list" returns a list of samples, one a trajectory, for every rollout; "last" and "error" return one,
            see `sample_of`. None is "list", and with `--partial-rollout`, which takes no lists, "last". An evaluation,
            which counts rewards and trains nothing, gets one sample where it is not "error", without logprobs.
        policy: The policy; when None, slime's router and checkpoint are connected to once.
        logprobs: See `LogprobPolicy`; with "omit" slime computes its own.

    Returns:
        A coroutine function of slime's `args`, `sample`, `sampling_params` and `evaluation`.
    """

    async def run(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
        partial = bool(getattr(args, "partial_rollout", False)) and not evaluation
        chosen = _branches(branches, partial, evaluation)
        _expect_messages(args, sample, evaluation)
        begun_again(sample)
        shared = policy or await _connected(args)
        before = (sample.metadata or {}).pop(PARTIAL, None) if partial else None
        model = shared.model(
            ledger=_ledger(shared, sample) if before is None else from_record(before["ledger"]),
            sampling=sampling_of(sampling_params),
            on_abort="discard",  # slime waits until its servers are idle, so an answer cannot go on now
            context_window_limit=getattr(args, "rollout_max_context_len", None),
            optional_outputs=_wanted(args),
        )
        earlier = len(model.ledger)
        agent = make_agent(model, sample)
        if before is not None:
            agent.messages[:] = before["messages"]
        try:
            await roll_out(agent, model, sample.prompt if before is None else None)
        finally:
            let_go(agent)
        wish: LogprobPolicy = "omit" if evaluation else logprobs
        temperature = float(sampling_params.get("temperature", 1.0))
        options = {"decode": _decode(shared), "temperature": temperature, "logprobs": wish}
        needs: dict[str, Any] = {
            "logprobs": wish,
            "reward_key": _reward_key(args, evaluation),
            "experts": _experts(args),
        }
        if chosen == "list":
            return [completed(one, **needs) for one in fan_out(sample, model.ledger, **options)]
        done = fill(sample, model.ledger, branches=chosen, **options)
        if partial:
            _keep(done, agent, model.ledger)
            _mask_earlier(args, done, model.ledger, earlier)
        return completed(done, **needs)  # also of partial rollouts: not every abort is slime's own, which runs it again

    return run


def _expect_messages(args: Any, sample: Any, evaluation: bool) -> None:
    """Refuse a prompt that slime has rendered: the agent's own template would go around it as around a user's words.

    Of an evaluation slime does not say which of its data sets a sample is from, and each may be rendered or not.

    Raises:
        ValueError: It is rendered.
    """
    if getattr(args, "apply_chat_template", False) and isinstance(sample.prompt, str) and not evaluation:
        raise ValueError(
            f"slime's --apply-chat-template has rendered the prompt {sample.prompt[:60]!r} already, and an agent's "
            "messages are rendered here: leave the flag out, so that the prompt comes as text or messages."
        )


def _branches(asked: Branches | None, partial: bool, evaluation: bool) -> Branches:
    """Choose what becomes of a rollout with several trajectories.

    Raises:
        ValueError: slime's partial rollouts take no lists.
    """
    if partial and asked == "list":
        raise ValueError("slime's --partial-rollout takes one sample a rollout: use branches='last' or 'error'.")
    if evaluation and asked != "error":
        return "last"  # of a list slime would count each sample's reward
    return asked or ("last" if partial else "list")


def sampling_of(sampling_params: Mapping[str, Any]) -> SamplingParams:
    """Read slime's sampling parameters, which are SGLang's.

    Raises:
        ValueError: slime's top-p replay is on, or a parameter is unknown.
    """
    given = {name: value for name, value in sampling_params.items() if name not in _SHOWN_ONLY and value is not None}
    if given.pop("custom_params", None):
        raise ValueError("slime's top-p replay is not filled in: train with --rollout-top-p 1.0.")
    if "sampling_seed" in given:
        given["seed"] = given.pop("sampling_seed")
    if isinstance(given.get("stop"), str):
        given["stop"] = (given["stop"],)
    return SamplingParams.model_validate(given)


async def _connected(args: Any) -> Policy:
    """Connect to slime's router once, however many rollouts begin at once."""
    backend, url = _server(args)
    key = (backend, url, str(args.hf_checkpoint))
    known = _policies.get(key)
    if known is None or (known.done() and (known.cancelled() or known.exception() is not None)):
        connecting = Policy.connect_async(backend=key[0], base_url=url, tokenizer=key[2])
        _policies[key] = asyncio.ensure_future(connecting)
    return await asyncio.shield(_policies[key])


def _server(args: Any) -> tuple[str, str]:
    """Return backend and address: `tito_backend` and `tito_base_url`, or of the router that slime's arguments name.

    slime puts the engine's name before the router's arguments, as in `sglang_router_ip`.

    Raises:
        ValueError: Neither says which backend, or where.
    """
    engine = next((name for name in installed_backends() if hasattr(args, f"{name}_router_ip")), None)
    backend = getattr(args, "tito_backend", None) or engine
    url = getattr(args, "tito_base_url", None)
    if engine is not None and not url:
        url = f"http://{getattr(args, f'{engine}_router_ip')}:{getattr(args, f'{engine}_router_port')}"
    if not backend or not url:
        raise ValueError(
            f"slime's arguments name the router of no installed backend ({', '.join(installed_backends())}): set "
            "tito_backend and tito_base_url in slime's --custom-config-path."
        )
    return backend, url


def _ledger(policy: Policy, sample: Any) -> Ledger:
    group = sample.group_index
    user = {"slime": {"index": sample.index}}
    return policy.ledger(group_id=None if group is None else str(group), user=user)


def _wanted(args: Any) -> dict[str, Any] | None:
    experts = _experts(args)
    return None if experts is None else {"routed_experts": experts}


def _experts(args: Any) -> tuple[int, int] | None:
    """Return the layers and the experts a token that slime replays, or None where it replays none."""
    if not getattr(args, "use_rollout_routing_replay", False):
        return None
    return int(args.num_layers), int(args.moe_router_topk)


def _reward_key(args: Any, evaluation: bool) -> str | None:
    of_training: str | None = getattr(args, "reward_key", None)
    return (getattr(args, "eval_reward_key", None) or of_training) if evaluation else of_training


def _decode(policy: Policy) -> Callable[[Any], str]:
    return lambda ids: str(policy.tokenizer.decode(ids, skip_special_tokens=False))


def _keep(sample: Any, agent: Agent, ledger: Ledger) -> None:
    """Keep what an aborted rollout goes on from: its whole turns, and the history that asks for the next one."""
    if sample.metadata is None or sample.status is not type(sample).Status["ABORTED"]:
        return
    sample.metadata[PARTIAL] = {"ledger": to_record(ledger), "messages": list(agent.messages)}


def _mask_earlier(args: Any, sample: Any, ledger: Ledger, earlier: int) -> None:
    """Mask what older weights sampled, where slime is told so."""
    if not getattr(args, "mask_offpolicy_in_partial_rollout", False) or not earlier:
        return
    start = len(sample.tokens) - sample.response_length
    for turn in ledger.path(len(ledger) - 1):
        if turn.index < earlier:
            stop = turn.path_length - start
            first = max(stop - turn.own_length, 0)
            sample.loss_mask[first:stop] = [0] * (stop - first)
