"""slime's `generate`, over a scripted SGLang; slime's own loop runs it where SLIME_SRC points to its source."""

from __future__ import annotations

import asyncio
import copy
import inspect
import pickle
from argparse import Namespace
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from strands import Agent
from strands.hooks import AfterInvocationEvent, BeforeInvocationEvent
from strands.tools import ToolProvider

from strands_tito.export import BranchedRolloutError, LogprobMismatchError
from strands_tito.integrations.slime_generate import PARTIAL, _server, generate, generate_with
from support.multiplying import ANSWER, CALL, QUESTION, SAMPLED, make_agent, make_editing_agent, multiply, says
from support.scripted import END, Says, backend_of, engine_of, ids_of, policy_of, tokenizer
from support.slime_facts import PARAMETERS, Recorded, arguments
from tito_conformance.testing import Fault
from tito_core import Policy
from tito_core.backend.errors import UnsupportedByServerError


def scripted(engine: Any = None) -> Policy:
    return replace(policy_of("sglang"), backend=backend_of(engine or engine_of("sglang", says), "sglang"))


def sample(prompt: Any = QUESTION) -> Any:
    return Recorded(index=3, prompt=prompt)


@pytest.mark.parametrize("sampled_at", [{"temperature": 0.0}, {"temperature": 0.6, "top_p": 0.7}, {"top_k": 20}])
async def test_an_evaluation_is_sampled_as_it_likes_and_is_one_sample(sampled_at: dict[str, Any]) -> None:
    """Nothing of it is trained, so it needs no logprobs; and slime counts the reward of each sample that it gets."""
    policy = scripted()
    args = arguments("http://nowhere:1", "unused", partial_rollout=True)
    own = sample()
    run = generate_with(make_editing_agent, policy=policy)
    done = await run(args, own, {**PARAMETERS, **sampled_at}, evaluation=True)
    assert done is own
    assert done.status is Recorded.Status["COMPLETED"]  # type: ignore[attr-defined]
    assert done.rollout_log_probs is None
    assert len(done.loss_mask) == done.response_length
    args.partial_rollout = False
    again = sample()
    with pytest.raises(LogprobMismatchError):
        await run(args, again, {**PARAMETERS, "temperature": 0.0})
    strict = generate_with(make_editing_agent, branches="error", policy=policy)
    with pytest.raises(BranchedRolloutError):
        await strict(args, again, {**PARAMETERS}, evaluation=True)
    assert "evaluation" in inspect.signature(generate).parameters, "slime looks for it there"


async def test_slimes_top_p_replay_gets_the_kept_sets_and_logprobs_over_them() -> None:
    """slime itself asks its server with `custom_params`; here the kept set is an optional output, and needs a top_k."""
    args = arguments("http://nowhere:1", "unused", rollout_top_p=0.9)
    params = {**PARAMETERS, "top_p": 0.9, "top_k": 4, "custom_params": {"return_top_p_token_ids": True}}
    run = generate_with(make_editing_agent, branches="last", policy=scripted())
    done = await run(args, sample(), params)
    ids, offsets = done.rollout_top_p_token_ids, done.rollout_top_p_token_offsets
    response = done.tokens[-done.response_length :]
    assert offsets[-1] == len(ids)
    for place, (start, stop) in enumerate(pairwise(offsets)):
        assert (response[place] in ids[start:stop]) == bool(done.loss_mask[place]) == (stop > start)
    with pytest.raises(UnsupportedByServerError, match="finite top_k"):
        await run(args, sample(), {**params, "top_k": -1})


async def test_logprobs_that_slime_would_not_take_are_left_out_on_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the refusal's sentence says; with the function, and by slime's configuration."""
    policy = scripted()
    cold = {**PARAMETERS, "temperature": 0.0}
    args = arguments("http://nowhere:1", "unused", tito_agent="support.multiplying:make_agent")

    with pytest.raises(LogprobMismatchError, match="logprobs='omit'"):
        await generate_with(make_agent, policy=policy)(args, sample(), cold)
    (done,) = await generate_with(make_agent, policy=policy, logprobs="omit")(args, sample(), cold)
    assert done.rollout_log_probs is None
    assert sum(done.loss_mask) > 0

    async def connected(_: Any) -> Any:
        return policy

    monkeypatch.setattr("strands_tito.integrations.slime_generate._connected", connected)
    args.tito_logprobs = "as-recorded"
    (done,) = await generate(args, sample(), cold)
    assert any(done.rollout_log_probs)


async def test_a_prompt_that_slime_has_rendered_is_refused() -> None:
    """Otherwise its markup would silently become text of a user message."""
    policy = scripted()
    args = arguments("http://nowhere:1", "unused", apply_chat_template=True)
    run = generate_with(make_agent, policy=policy)
    rendered = Recorded(index=3, prompt=f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n")
    with pytest.raises(ValueError, match="--apply-chat-template"):
        await run(args, rendered, {**PARAMETERS})
    chat = Recorded(index=3, prompt=[{"role": "user", "content": QUESTION}])
    (done,) = await run(args, chat, {**PARAMETERS})
    assert done.status is Recorded.Status["COMPLETED"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("branches", "partial"), [("list", False), ("last", False), ("last", True)])
@pytest.mark.parametrize("evaluation", [False, True])
@pytest.mark.parametrize("turns", [0, 1])
async def test_a_rollout_that_the_engine_loses_leaves_nothing_that_ends_slimes_training(
    turns: int, evaluation: bool, branches: Any, partial: bool
) -> None:
    """Of an aborted sample slime asks no reward, and makes a tensor of all rewards; each response has a token."""
    aborted = [None] * turns + [Fault(edit=ended_by_the_server)]
    engine = engine_of("sglang", says, fault=lambda number, request: aborted[min(number, turns)])
    policy = scripted(engine)
    args = arguments("http://nowhere:1", "unused", partial_rollout=partial)
    own = sample()
    run = generate_with(unrewarded, branches=branches, policy=policy)
    done = await run(args, own, {**PARAMETERS}, evaluation=evaluation)
    (one,) = done if isinstance(done, list) else [done]
    assert one.status is Recorded.Status["ABORTED"]  # type: ignore[attr-defined]
    assert (one.reward, one.remove_sample) == (0.0, True)
    assert len(one.tokens) > one.response_length == len(one.loss_mask) >= 1
    assert (one.rollout_log_probs is None) is evaluation
    assert evaluation or len(one.rollout_log_probs) == one.response_length
    assert (sum(one.loss_mask) > 0) is (turns == 1), "slime leaves out what is removed by itself"


@pytest.mark.parametrize("evaluation", [False, True])
async def test_a_lost_rollout_has_its_reward_under_slimes_key_and_experts_where_they_are_replayed(
    evaluation: bool,
) -> None:
    """slime reads each `reward[key]` and makes a tensor of all experts; no MoE layer of it may be all zeros."""
    more = {"reward_key": "score", "use_rollout_routing_replay": True, "num_layers": 3, "moe_router_topk": 2}
    args = arguments("http://nowhere:1", "unused", eval_reward_key="points", **more)
    faults: list[Fault] = []
    engine = engine_of("sglang", says, experts=(3, 2), fault=lambda number, request: faults.pop() if faults else None)
    policy = await Policy.connect_async(backend=backend_of(engine, "sglang"), tokenizer=tokenizer())
    faults.append(Fault(edit=ended_by_the_server))
    own = sample()
    done = await generate_with(unrewarded, branches="last", policy=policy)(
        args, own, {**PARAMETERS}, evaluation=evaluation
    )
    assert done.reward == {"points" if evaluation else "score": 0.0}
    done = await generate_with(make_agent, branches="last", policy=policy)(
        args, sample(), {**PARAMETERS}, evaluation=evaluation
    )
    assert done.reward in [{"points" if evaluation else "score": reward} for reward in (0.0, 1.0)], "a recorded one too"
    experts = np.array(done.rollout_routed_experts)
    assert experts.shape == (len(done.tokens) - 1, 3, 2)
    assert experts.any(axis=(0, 2)).all()


@pytest.mark.parametrize("branches", ["list", "last"])
async def test_a_lost_rollout_that_slime_runs_again_is_asked_its_reward(branches: Any) -> None:
    """slime's fully-async rollouts put an aborted group back, and ask no reward of a sample that has one."""
    faults = iter([Fault(edit=ended_by_the_server)])
    engine = engine_of("sglang", says, fault=lambda number, request: next(faults, None))
    policy = scripted(engine)
    run = generate_with(unrewarded, branches=branches, policy=policy)
    args, own = arguments("http://nowhere:1", "unused"), sample()
    for status, reward, removed in (("ABORTED", 0.0, True), ("COMPLETED", None, False)):
        done = await run(args, own, {**PARAMETERS})
        (own,) = done if isinstance(done, list) else [done]
        assert own.status is Recorded.Status[status]  # type: ignore[attr-defined]
        assert (own.reward, own.remove_sample) == (reward, removed)


@pytest.mark.parametrize("buffer", ["of this version", "of the version before"])
async def test_an_aborted_agent_without_a_name_stays_itself_when_it_goes_on(buffer: str) -> None:
    """As another agent, its old path would be trained with the reward of the answer that it gives now."""
    faults = [None, Fault(edit=ended_by_the_server), None]
    policy = scripted(engine_of("sglang", says, fault=lambda number, request: faults[number]))
    args, own = arguments("http://nowhere:1", "unused", partial_rollout=True), sample()

    def make(model: Any, row: Any) -> Agent:
        agent = unrewarded(model, row)

        def edit(event: BeforeInvocationEvent) -> None:
            if agent.messages and buffer == "of this version":
                agent.messages[0]["content"][0]["text"] = "What is 25 * 17, exactly?"

        agent.hooks.add_callback(BeforeInvocationEvent, edit)
        return agent

    run = generate_with(make, policy=policy)
    await run(args, own, {**PARAMETERS})
    own.metadata = pickle.loads(pickle.dumps(copy.deepcopy(own.metadata)))
    if buffer == "of the version before":
        own.metadata[PARTIAL].pop("agent", None)
    done = await run(args, own, {**PARAMETERS})
    assert done.status is Recorded.Status["COMPLETED"]  # type: ignore[attr-defined]
    assert done.response.endswith(ANSWER + END)
    assert (done.response == ANSWER + END) is (buffer == "of this version"), "the edit begins a new path"
    assert PARTIAL not in done.metadata


async def test_turns_of_another_agent_before_a_handoff_leave_the_mask_as_long_as_the_response() -> None:
    """They are in the prompt, which has no mask."""
    faults = [None, None, Fault(edit=ended_by_the_server), None]
    script = Says("A plan of several steps: multiply, then tell the product.", CALL, "aborted", ANSWER)
    policy = scripted(engine_of("sglang", script, fault=lambda number, request: faults[number]))
    args = arguments("http://nowhere:1", "unused", partial_rollout=True, mask_offpolicy_in_partial_rollout=True)

    def make(model: Any, row: Any) -> Agent:
        solver = Agent(model=model, name="solver", tools=[multiply], callback_handler=None)

        async def hand_over(event: BeforeInvocationEvent) -> None:
            if not solver.messages:
                planner = Agent(model=model, name="planner", tools=[multiply], callback_handler=None)
                await planner.invoke_async("Make a plan.")
                solver.messages[:] = planner.messages

        solver.hooks.add_callback(BeforeInvocationEvent, hand_over)
        return solver

    run, own = generate_with(make, trained_agent="solver", policy=policy), sample()
    await run(args, own, {**PARAMETERS})
    done = await run(args, own, {**PARAMETERS})
    answer = len(ids_of(ANSWER + END))
    assert len(done.loss_mask) == len(done.rollout_log_probs) == done.response_length > answer
    assert done.loss_mask == [0] * (done.response_length - answer) + [1] * answer


@pytest.mark.parametrize(("branches", "partial"), [("list", False), ("last", False), ("last", True)])
async def test_an_agent_that_resets_its_model_in_the_end_is_trained(branches: Any, partial: bool) -> None:
    """For example to keep the ledger: the rollout is the one that ran, not the empty next one."""
    faults = iter([None, Fault(edit=ended_by_the_server)] if partial else [])
    policy = scripted(engine_of("sglang", says, fault=lambda number, request: next(faults, None)))
    args, own = arguments("http://nowhere:1", "unused", partial_rollout=partial), sample()

    def make(model: Any, row: Any) -> Agent:
        agent = unrewarded(model, row)

        def finish(event: AfterInvocationEvent) -> None:
            model.ledger.annotate("reward", 1.0)
            model.reset()

        agent.hooks.add_callback(AfterInvocationEvent, finish)
        return agent

    run = generate_with(make, branches=branches, policy=policy)
    for _ in range(2 if partial else 1):
        done = await run(args, own, {**PARAMETERS})
    (one,) = done if isinstance(done, list) else [done]
    assert one.status is Recorded.Status["COMPLETED"]  # type: ignore[attr-defined]
    assert (one.reward, one.remove_sample) == (1.0, False)
    assert [
        token for token, mask in zip(one.tokens[-one.response_length :], one.loss_mask, strict=True) if mask
    ] == SAMPLED


async def test_tools_whose_server_does_not_stop_end_no_training(caplog: pytest.LogCaptureFixture) -> None:
    class Stubborn(ToolProvider):
        async def load_tools(self, **_: Any) -> list[Any]:
            return []

        def add_consumer(self, consumer_id: Any, **_: Any) -> None:
            self.used = True

        def remove_consumer(self, consumer_id: Any, **_: Any) -> None:
            if self.used:  # the agent itself asks again in the end
                self.used = False
                raise OSError("It does not stop.")

    def make(model: Any, row: Any) -> Agent:
        return Agent(model=model, tools=[multiply, Stubborn()], callback_handler=None)

    policy = scripted()
    own = sample()
    (done,) = await generate_with(make, policy=policy)(arguments("http://nowhere:1", "unused"), own, {**PARAMETERS})
    assert done.status is Recorded.Status["COMPLETED"]  # type: ignore[attr-defined]
    assert "OSError: It does not stop." in caplog.text


def unrewarded(model: Any, row: Any) -> Agent:
    return Agent(model=model, tools=[multiply], callback_handler=None)


def ended_by_the_server(answer: Any) -> None:
    """All but the last token was sampled by then."""
    meta = answer["meta_info"]
    meta["finish_reason"] = {"type": "abort", "message": "gone"}
    meta["completion_tokens"] -= 1
    for column in (answer["output_ids"], meta["output_token_logprobs"]):
        column.pop()
    meta["weight_versions"][-1]["end"] -= 1


@pytest.mark.parametrize("way", ["fails", "is cancelled"])
async def test_a_connection_that_was_not_made_is_tried_again_with_the_next_rollout(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = scripted()
    tries = iter([OSError("not up yet") if way == "fails" else asyncio.CancelledError(), None])

    async def connect(**_: Any) -> Any:
        error = next(tries)
        if error is not None:
            raise error
        return policy

    monkeypatch.setattr(Policy, "connect_async", connect)
    args = arguments("http://not-up:1", way)
    run = generate_with(make_agent)
    with pytest.raises((OSError, asyncio.CancelledError)):
        await run(args, sample(), {**PARAMETERS})
    (done,) = await run(args, sample(), {**PARAMETERS})
    assert done.status is Recorded.Status["COMPLETED"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("more", "connected"),
    [
        ({}, {"patience_s": 60, "template_arguments": None}),
        ({"tito_patience_s": 7, "apply_chat_template_kwargs": {}}, {"patience_s": 7, "template_arguments": None}),
        ({"apply_chat_template_kwargs": {"think": False}}, {"template_arguments": {"think": False}}),
    ],
)
async def test_patience_and_template_arguments_are_of_slimes_configuration(
    more: dict[str, Any], connected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    async def connect(**options: Any) -> Any:
        given.update(options)
        raise OSError("enough")

    monkeypatch.setattr(Policy, "connect_async", connect)
    args = arguments("http://patient:1", f"patient {more}", **more)
    with pytest.raises(OSError, match="enough"):
        await generate_with(make_agent)(args, sample(), {**PARAMETERS})
    assert {name: given[name] for name in connected} == connected


async def test_template_arguments_that_the_given_policy_does_not_have_are_refused() -> None:
    args = arguments("http://nowhere:1", "unused", apply_chat_template_kwargs={"enable_thinking": False})
    with pytest.raises(ValueError, match=r"--apply-chat-template-kwargs is .*enable_thinking.*template_arguments"):
        await generate_with(make_agent, policy=policy_of("sglang"))(args, Recorded(prompt=QUESTION), {**PARAMETERS})


@pytest.mark.parametrize(
    ("evaluation", "limits", "limit"),
    [
        (False, {"rollout_max_context_len": 300, "eval_max_context_len": 200}, 300),
        (True, {"rollout_max_context_len": 300, "eval_max_context_len": 200}, 200),
        (True, {"rollout_max_context_len": 300}, 300),
    ],
)
async def test_the_limit_of_the_context_is_that_of_training_or_of_the_evaluation(
    evaluation: bool, limits: dict[str, int], limit: int
) -> None:
    found: list[Any] = []

    def make(model: Any, row: Any) -> Agent:
        found.append(model.config["context_window_limit"])
        return make_agent(model, row)

    policy = scripted()
    args = arguments("http://nowhere:1", "unused", **limits)
    own = sample()
    await generate_with(make, policy=policy)(args, own, {**PARAMETERS}, evaluation=evaluation)
    assert found == [limit]


@pytest.mark.parametrize(
    ("more", "server"),
    [
        ({}, ("sglang", "http://router:1")),
        ({"tito_backend": "vllm"}, ("vllm", "http://router:1")),
        ({"tito_base_url": "http://other:2"}, ("sglang", "http://other:2")),
    ],
)
def test_the_server_is_slimes_router_unless_the_configuration_names_another(
    more: dict[str, str], server: tuple[str, str]
) -> None:
    assert _server(arguments("http://router:1", "unused", **more)) == server


def test_without_a_router_the_configuration_names_backend_and_address() -> None:
    with pytest.raises(ValueError, match="tito_backend and tito_base_url"):
        _server(Namespace(tito_base_url="http://other:2"))
    complete = Namespace(tito_backend="vllm", tito_base_url="http://other:2")
    assert _server(complete) == ("vllm", "http://other:2")
