"""Rollouts as lists: they equal the ledger's trajectories, and can be pickled and written as JSON."""

from __future__ import annotations

import base64
import contextlib
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from strands import Agent
from strands.agent.conversation_manager import NullConversationManager
from strands.types.exceptions import MaxTokensReachedException

from support.histories import add
from support.names import named
from support.scripted import BACKENDS, Says, call
from tito_compat.rollout import Rollout, Token, TokenManager, decode_routed_experts
from tito_core.ledger import Trajectory
from tito_core.model import SeveralTrajectoriesError

by_kind = pytest.mark.parametrize("kind", BACKENDS)
ANSWERS = (call("add", '{"a": 2, "b": 3}'), call("add", '{"a": 2,}'), "It is 5.", "", "on and " * 40 + "on...")


def agent_of(model: Any) -> Agent:
    return Agent(model=model, tools=[add], callback_handler=None, conversation_manager=NullConversationManager())


def expect_equal(rollout: Rollout, trajectory: Trajectory) -> None:
    """Every list equals its column; prompt logprobs are merged into `logprobs`."""
    assert rollout.token_ids == trajectory.token_ids.tolist()
    assert rollout.loss_mask == rollout.output_mask == trajectory.loss_mask.tolist()
    prompt = np.full(len(trajectory), np.nan, np.float32)
    if "prompt_logprobs" in trajectory.column_names:
        prompt = np.asarray(trajectory.column("prompt_logprobs", np.nan), np.float32)
    expected = np.where(np.isnan(trajectory.logprobs), prompt, trajectory.logprobs)
    assert [np.nan if value is None else value for value in rollout.logprobs] == pytest.approx(
        expected.tolist(), abs=0, nan_ok=True
    )
    runs = [(s.is_output, s.stop - s.start) for s in trajectory.segments if s.stop > s.start]
    assert rollout.segment_info == runs
    assert [len(segment) for segment in rollout.segments] == [length for _, length in runs]
    assert [token for segment in rollout.segments for token in segment] == rollout.tokens
    assert [token.token_id for token in rollout.initial_prompt] == rollout.token_ids[: rollout.initial_prompt_length]
    assert rollout.initial_prompt_length == runs[0][1]
    assert len(rollout) == len(trajectory)


@settings(max_examples=6)
@given(
    kind=st.sampled_from(BACKENDS),
    answers=st.lists(st.sampled_from(ANSWERS), min_size=1, max_size=5),
    prompts=st.integers(1, 3),
    forgets=st.booleans(),
    held=st.booleans(),
)
async def test_rollouts_equal_the_trajectories_of_any_conversation(
    kind: str, answers: list[str], prompts: int, forgets: bool, held: bool
) -> None:
    params = {"max_new_tokens": 40}
    options = {"sampling_params": params} if kind == "sglang" else {"params": params}
    model = named(kind, Says(*answers, "Done."), **options)
    agent = agent_of(model)
    early = model.rollout if held else None
    for number in range(prompts):
        with contextlib.suppress(MaxTokensReachedException):  # a truncated answer ends the invocation
            await agent.invoke_async(f"{number}?", limits={"turns": 3})
        if forgets:
            agent.messages[:] = []
    trajectories = model.trajectories
    for rollout, trajectory in zip(model.rollouts, trajectories, strict=True):
        expect_equal(rollout, trajectory)
    if len(trajectories) == 1:
        expect_equal(model.rollout, trajectories[0])
        assert model.token_manager is model.rollout
        assert early is None or early is model.rollout
    else:
        with pytest.raises(SeveralTrajectoriesError, match=r"model\.rollouts"):
            _ = model.rollout
    kept = model.rollouts
    model.reset()
    assert model.rollout_history == kept
    assert len(model.rollout) == 0
    assert model.tool_parse_errors == {}


@by_kind
async def test_a_held_rollout_grows_with_each_turn(kind: str) -> None:
    model = named(kind, Says(call("add", '{"a": 2, "b": 3}'), "It is 5.", "Yes."))
    held = model.rollout
    assert len(held) == 0
    assert not model.is_connected
    agent = agent_of(model)
    await agent.invoke_async("2 + 3?")
    assert [is_output for is_output, _ in held.segment_info] == [False, True, False, True]
    expect_equal(held, model.trajectory)
    await agent.invoke_async("Sure?")
    assert len(held.segment_info) == 6
    expect_equal(held, model.trajectory)
    assert model.rollout is held
    held.loss_mask[-1] = 0
    model.reset()
    assert model.rollout_history == [held]
    assert model.rollout_history[0] is held
    assert model.rollout is not held


@by_kind
async def test_each_episode_has_a_rollout_of_its_own(kind: str) -> None:
    model = named(kind, Says("One.", "Two."))
    for _ in range(2):
        await agent_of(model).invoke_async("Count.")
        model.reset()
    model.reset()
    assert [len(rollout.segment_info) for rollout in model.rollout_history] == [2, 2]
    assert model.rollout_history[0] != model.rollout_history[1]


class Result(BaseModel):
    rollout: Rollout | None = None


async def sampled(kind: str) -> Rollout:
    model = named(kind, Says(call("add", '{"a": 2, "b": 3}'), "It is 5."))
    await agent_of(model).invoke_async("2 + 3?")
    return model.rollout


@by_kind
async def test_it_goes_through_pydantic_json_and_pickle(kind: str) -> None:
    rollout = await sampled(kind)
    result = Result(rollout=rollout)
    assert result.rollout is rollout
    assert Result.model_validate_json(result.model_dump_json()).rollout == rollout
    assert Rollout.model_validate(rollout.model_dump()) == rollout
    assert pickle.loads(pickle.dumps(rollout)) == rollout
    assert rollout.model_copy(deep=True) == rollout


async def test_it_goes_to_another_process_and_back() -> None:
    rollout = await sampled("sglang")
    code = (
        "import pickle, sys; rollout = pickle.load(sys.stdin.buffer); "
        "pickle.dump((len(rollout), rollout.segment_info, rollout), sys.stdout.buffer)"
    )
    ran = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(rollout), capture_output=True, check=True)
    assert pickle.loads(ran.stdout) == (len(rollout), rollout.segment_info, rollout)


def test_whole_prompts_and_deltas_give_the_same() -> None:
    """A recipe that adds the whole prompt of each request gets each token once."""
    whole, deltas = TokenManager(), TokenManager()
    whole.add_prompt([1, 2, 3])
    whole.add_response([4, 5], [-0.5, -0.25])
    whole.add_prompt([1, 2, 3, 4, 5, 6, 7])
    whole.add_response([8])
    deltas.add_prompt([1, 2, 3])
    deltas.add_response([4, 5], [-0.5, -0.25])
    deltas.add_prompt([6, 7])
    deltas.add_response([8])
    assert whole == deltas
    assert whole.token_ids == [1, 2, 3, 4, 5, 6, 7, 8]
    assert whole.loss_mask == [0, 0, 0, 1, 1, 0, 0, 1]
    assert whole.logprobs == [None, None, None, -0.5, -0.25, None, None, None]
    assert whole.segments[1] == [Token(4, -0.5), Token(5, -0.25)]
    assert repr(whole) == "TokenManager(tokens=8, output_tokens=3, segments=4)"
    whole.reset()
    assert whole == TokenManager()
    whole.add_response([4])
    assert (whole.token_ids, whole.loss_mask) == ([4], [1]), "as strands-vllm's, it needs no prompt"


@settings(max_examples=20)
@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 3), min_size=1)), max_size=6))
def test_a_rollout_appends_every_segment(segments: list[tuple[bool, list[int]]]) -> None:
    """As strands-sglang's does, also if a delta starts with the tokens that are held."""
    rollout = Rollout()
    rollout.add_prompt([1])
    for is_output, ids in segments:
        (rollout.add_response if is_output else rollout.add_prompt)(ids)
    assert rollout.token_ids == [1, *(token for _, ids in segments for token in ids)]
    assert rollout.segment_info == [(False, 1), *((is_output, len(ids)) for is_output, ids in segments)]


@by_kind
async def test_tokens_that_are_added_by_hand_are_refused_at_the_next_turn(kind: str) -> None:
    model = named(kind, Says("Five.", "Six."))
    model.rollout.add_prompt([1, 2])
    with pytest.raises(ValueError, match="2 tokens, and its turns have 0"):
        await agent_of(model).invoke_async("2 + 3?")
    model.reset()
    assert [rollout.token_ids for rollout in model.rollout_history] == [[1, 2]]
    await agent_of(model).invoke_async("2 + 3?")
    held = model.rollout
    held.loss_mask[-1] = 0
    await agent_of(model).invoke_async("2 + 3?")
    assert len(model.rollouts) == 2, "a mask that the user has changed is not refused"
    held.token_ids.pop()
    with pytest.raises(ValueError, match="turns have"):
        await agent_of(model).invoke_async("2 + 3?")


@settings(max_examples=20)
@given(st.lists(st.tuples(st.lists(st.integers(0, 9), min_size=1), st.lists(st.integers(0, 9))), max_size=5))
def test_any_conversation_of_whole_prompts_is_that_of_its_deltas(turns: list[tuple[list[int], list[int]]]) -> None:
    whole, context, trained = TokenManager(), [], []
    for delta, answer in turns:
        context += delta
        trained += [0] * len(delta)
        whole.add_prompt(context)
        whole.add_response(answer)
        context += answer
        trained += [1] * len(answer)
    assert (whole.token_ids, whole.loss_mask) == (context, trained)
    assert whole.logprobs == [None] * len(context)
    assert sum(length for _, length in whole.segment_info) == len(context)


def test_a_bad_segment_is_refused_and_nothing_is_added() -> None:
    rollout = Rollout()
    with pytest.raises(RuntimeError, match="add_prompt"):
        rollout.add_response([1])
    for add_to in (rollout.add_prompt, rollout.add_response):
        rollout.segment_info or rollout.add_prompt([9])
        before = rollout.model_copy(deep=True)
        with pytest.raises(ValueError, match=r"\(1\).*\(2\)"):
            add_to([1, 2], [-1.0])
        assert rollout == before
        add_to([])
        assert rollout == before


@settings(max_examples=20)
@given(st.integers(1, 4), st.integers(1, 3), st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_experts_come_back_in_their_shape(layers: int, experts: int, turns: list[int]) -> None:
    rows = [np.arange(n * layers * experts, dtype="<i4").reshape(n, layers, experts) for n in turns]
    rollout = Rollout()
    for each in rows:
        rollout.add_routed_experts(base64.b64encode(each.tobytes()).decode())
    whole = rollout.decode_routed_experts(layers, experts)
    assert np.array_equal(whole, np.concatenate(rows))
    one = decode_routed_experts(rollout.routed_experts[0], turns[0] + 1, layers, experts)
    assert np.array_equal(one, rows[0])
