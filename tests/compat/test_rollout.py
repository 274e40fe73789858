"""Rollouts as lists: they equal the ledger's trajectories, and can be pickled and written as JSON."""

from __future__ import annotations

import contextlib
import pickle

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
from tito_compat.rollout import Rollout, Token, TokenManager
from tito_core.ledger import Trajectory
from tito_core.model import SeveralTrajectoriesError

ANSWERS = (call("add", '{"a": 2, "b": 3}'), call("add", '{"a": 2,}'), "It is 5.", "", "on and " * 40 + "on...")


def expect_equal(rollout: Rollout, trajectory: Trajectory) -> None:
    """Every list equals its column; prompt logprobs are merged into `logprobs`."""
    assert rollout.token_ids == trajectory.token_ids.tolist()
    assert rollout.loss_mask == trajectory.loss_mask.tolist()
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
    tokens = [token for segment in rollout.segments for token in segment]
    assert tokens == [*map(Token, rollout.token_ids, rollout.logprobs, map(bool, rollout.loss_mask))]
    assert rollout.initial_prompt_length == runs[0][1]
    assert len(rollout) == len(trajectory)


@settings(max_examples=6)
@given(
    kind=st.sampled_from(BACKENDS),
    answers=st.lists(st.sampled_from(ANSWERS), min_size=1, max_size=5),
    prompts=st.integers(1, 3),
    forgets=st.booleans(),
)
async def test_rollouts_equal_the_trajectories_of_any_conversation(
    kind: str, answers: list[str], prompts: int, forgets: bool
) -> None:
    params = {"max_new_tokens": 40}
    options = {"sampling_params": params} if kind == "sglang" else {"params": params}
    model = named(kind, Says(*answers, "Done."), **options)
    agent = Agent(model=model, tools=[add], callback_handler=None, conversation_manager=NullConversationManager())
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
    else:
        with pytest.raises(SeveralTrajectoriesError, match=r"model\.rollouts"):
            _ = model.rollout
    ledger = model.reset()
    assert [Rollout.of(each) for each in ledger.trajectories][: len(trajectories)] == [*map(Rollout.of, trajectories)]
    assert len(model.rollout) == 0


class Result(BaseModel):
    rollout: Rollout | None = None


def made() -> Rollout:
    rollout = Rollout()
    rollout.add_prompt([1, 2, 3])
    rollout.add_response([4, 5], [-0.5, -0.25])
    return rollout


def test_it_goes_through_pydantic_json_and_pickle() -> None:
    rollout = made()
    result = Result(rollout=rollout)
    assert result.rollout is rollout
    assert Result.model_validate_json(result.model_dump_json()).rollout == rollout
    assert pickle.loads(pickle.dumps(rollout)) == rollout
    assert repr(rollout) == "Rollout(tokens=5, output_tokens=2, segments=2)"


def test_a_bad_segment_is_refused_and_nothing_is_added() -> None:
    rollout = made()
    before = rollout.model_copy(deep=True)
    for add_to in (rollout.add_prompt, rollout.add_response):
        with pytest.raises(ValueError, match=r"\(1\).*\(2\)"):
            add_to([1, 2], [-1.0])
        add_to([])
        assert rollout == before


@settings(max_examples=20)
@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 3), min_size=1)), max_size=6))
def test_a_rollout_appends_every_segment(segments: list[tuple[bool, list[int]]]) -> None:
    """As strands-sglang's does, also if a delta starts with the tokens that are held."""
    rollout = Rollout()
    for is_output, ids in segments:
        (rollout.add_response if is_output else rollout.add_prompt)(ids)
    assert rollout.token_ids == [token for _, ids in segments for token in ids]
    assert rollout.loss_mask == [int(is_output) for is_output, ids in segments for _ in ids]
    assert rollout.segment_info == [(is_output, len(ids)) for is_output, ids in segments]


@settings(max_examples=20)
@given(st.lists(st.tuples(st.lists(st.integers(0, 9), min_size=1), st.lists(st.integers(0, 9))), max_size=5))
def test_any_conversation_of_whole_prompts_is_that_of_its_deltas(turns: list[tuple[list[int], list[int]]]) -> None:
    """strands-vllm's recipe adds the whole prompt of each request; a token manager takes each token once."""
    whole, deltas, context = TokenManager(), Rollout(), list[int]()
    for delta, answer in turns:
        context += delta
        whole.add_prompt(context, [-1.0] * len(context))
        deltas.add_prompt(delta, [-1.0] * len(delta))
        whole.add_response(answer)
        deltas.add_response(answer)
        context += answer
    assert whole.model_dump() == deltas.model_dump()
    assert whole.token_ids == context
