"""Credit: rewards of turns and tool calls, in the ledger, in samples, and in what each trainer reads."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strands import Agent
from strands.agent.conversation_manager import SummarizingConversationManager
from strands.hooks import AfterToolCallEvent

from strands_tito.export import BranchedRolloutError, sample_of, samples_of, trained_tokens
from strands_tito.export.batch import packed, padded
from strands_tito.export.files import ExportOptions, Written, write
from strands_tito.export.parquet import read_parquet
from strands_tito.export.sample import credits_of, total_of
from strands_tito.export.slime import fan_out, fill, rewards_by_group
from strands_tito.export.trainer import prompt_response_of
from strands_tito.export.trl import columns_of
from strands_tito.integrations.trl import recorded_reward
from support.drafts import make_draft
from support.multiplying import QUESTION, multiply, says
from support.rollout_forests import chain, grow, rollouts
from support.scripted import Says, model_of
from support.slime_facts import Recorded
from tito_core import store
from tito_core.ledger import Annotation, CallRecord, LawViolationError, Ledger, check_ledger

CALLS = (CallRecord("look", "ok", 0, 2), CallRecord(None, "suspect", 2, 2), CallRecord("look", "ok", 2, 4))


def with_calls() -> Ledger:
    """Return a rollout of two turns and a branch after the first, whose outputs have 5, 2 and 3 tokens."""
    ledger = Ledger(group_id="g")
    ledger.commit(make_draft(None, 0, [100] * 3, [200] * 5, calls=CALLS))
    grow(ledger, 0, 1, 2)
    grow(ledger, 0, 2, 3)
    return ledger


def last_token(ledger: Ledger, turn: int, call: int | None) -> int:
    """Return the place in a turn's output of the token that has a reward, the slow way."""
    outputs = range(len(ledger[turn].draft.output_ids))
    if call is None:
        return outputs[-1]
    record = ledger[turn].draft.calls[call]
    return max([place for place in outputs if record.start <= place < record.stop], default=0)


@settings(max_examples=100)
@given(rollouts())
def test_each_reward_is_on_one_token_of_one_sample_and_their_sum_is_the_forests(ledger: Ledger) -> None:
    recorded: dict[tuple[int, int | None], Any] = {}
    for note in ledger.annotations:
        if note.name == "reward" and note.turn is not None:
            recorded[note.turn, note.call] = note.value
    expected: Counter[tuple[int, int]] = Counter()
    for (turn, call), value in recorded.items():
        expected[turn, last_token(ledger, turn, call)] += value or 0
    found: Counter[tuple[int, int]] = Counter()
    samples = samples_of(ledger)
    for sample, leaf in zip(samples, ledger.leaves(), strict=True):
        at = 0
        for turn in ledger.path(leaf):
            at += len(turn.draft.prompt_ids)
            for place in range(len(turn.draft.output_ids)):
                found[turn.index, place] += 0 if sample.credit is None else sample.credit[at]
                at += 1
        if sample.credit is not None:
            assert not sample.credit[: sample.prompt_length].any()
    assert {place: value for place, value in found.items() if value} == {
        place: value for place, value in expected.items() if value
    }
    sums = [0.0 if sample.credit is None else sample.credit.sum() for sample in samples]
    assert sum(sums) == sum(credits_of(ledger).values()) == sum(expected.values())
    reward = samples[0].reward
    assert total_of(ledger) == (reward if not credits_of(ledger) else (reward or 0.0) + sum(sums))
    for sample, part in zip(samples, sums, strict=True):
        assert sample.total == (sample.reward if sample.credit is None else (sample.reward or 0.0) + part)


@settings(max_examples=50)
@given(rollouts(), st.integers(1, 4))
def test_a_response_that_is_cut_keeps_the_sum_of_its_rewards(ledger: Ledger, limit: int) -> None:
    for sample in samples_of(ledger):
        whole = replace(sample, termination="completed", images=())
        parts = prompt_response_of(
            whole, trainer="X", temperature=1.0, logprobs="omit", max_response_length=limit, max_prompt_length=3
        )
        rewards = parts.rewards(sample.reward)
        assert len(rewards) == len(parts.response_ids)
        assert sum(rewards) == (sample.total or 0.0)
        assert rewards[:-1] == ([0.0] * len(rewards) if parts.credit is None else parts.credit)[:-1]


def test_the_last_reward_of_a_turn_or_call_counts_and_none_takes_it_back() -> None:
    ledger = with_calls()
    ledger.annotate("reward", 1, turn=0, call=2)
    ledger.annotate("reward", 2, turn=0, call=0)
    ledger.annotate("reward", 4, turn=0, call=0)
    ledger.annotate("reward", 8, turn=0)
    ledger.annotate("reward", 16, turn=1)
    ledger.annotate("reward", None, turn=1)
    assert ledger.annotation("reward", turn=0, call=0) == 4.0
    assert (ledger.annotation("reward"), ledger.annotation("reward", turn=0)) == (None, 8.0)
    first, branch = samples_of(ledger)
    assert first.credit is not None
    assert first.credit.tolist() == [0, 0, 0, 0, 4, 0, 1, 8, 0, 0, 0]
    assert (first.total, branch.credit, branch.total) == (13.0, None, None)
    again = store.from_record(store.to_record(ledger))
    assert again.annotations == ledger.annotations
    check_ledger(again)


def test_a_reward_of_what_is_not_there_is_refused() -> None:
    ledger = with_calls()
    for turn, call, values in ((0, 3, "call 3 of turn 0: it has 3"), (1, 0, "turn 1: it has 0"), (None, 0, "None")):
        with pytest.raises(IndexError, match=values):
            ledger.annotate("reward", 1, turn=turn, call=call)
    with pytest.raises(LookupError, match=r"tool call 'call_7'.*turn=\.\.\. and call="):
        ledger.annotate("reward", 1, call="call_7")
    assert ledger.annotations == ()
    silent = Ledger()
    silent.commit(make_draft(None, 0, [100], []))
    with pytest.raises(ValueError, match="Turn 0 sampled no token"):
        silent.annotate("reward", 1, turn=0)
    broken = Ledger.load(ledger.header, [turn.draft for turn in ledger], [Annotation("note", 1, 0, 3)])
    with pytest.raises(LawViolationError, match="call 3 of turn 0, which has 3"):
        check_ledger(broken)


def test_a_place_that_numpy_counted_is_read_again(tmp_path: Path) -> None:
    ledger, path = with_calls(), tmp_path / "rollouts.tito"
    ledger.annotate("reward", 1, turn=np.int64(0), call=np.uint8(2))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        ledger.annotate("reward", 1, turn=0, call=1.0)  # type: ignore[arg-type]
    store.append(path, [ledger])
    (again,) = store.read(path)
    assert again.annotations == ledger.annotations == (Annotation("reward", 1.0, 0, 2),)


def test_a_stored_reward_of_a_turn_without_tokens_is_none() -> None:
    silent = make_draft(None, 0, [100] * 2, [])
    ledger = Ledger.load(chain((2, 2)).header, [silent], [Annotation("reward", 5.0, 0)])
    assert (credits_of(ledger), total_of(ledger), samples_of(ledger)[0].total) == ({}, None, None)


async def test_a_hook_rewards_the_call_that_ran_by_its_id() -> None:
    model = model_of("vllm", says)
    agent = Agent(model=model, tools=[multiply], callback_handler=None)

    def credit(event: AfterToolCallEvent) -> None:
        model.ledger.annotate("reward", 0.5, call=event.tool_use["toolUseId"])

    agent.hooks.add_callback(AfterToolCallEvent, credit)
    await agent.invoke_async(QUESTION)
    assert model.ledger.annotation("reward", turn=0, call=0) == 0.5
    (sample,) = samples_of(model.ledger)
    (call,) = model.ledger[0].draft.calls
    assert sample.credit is not None
    assert np.flatnonzero(sample.credit).tolist() == [sample.prompt_length + call.stop - 1]
    with pytest.raises(ValueError, match=r"'call_.*' is of turn 0, not of turn 1"):
        model.ledger.annotate("reward", 1, turn=1, call=agent.messages[1]["content"][0]["toolUse"]["toolUseId"])
    loaded = store.from_record(store.to_record(model.ledger))
    with pytest.raises(LookupError, match="sealed or loaded"):
        loaded.annotate("reward", 1, call="call_x")


def two_agents() -> Ledger:
    """Return a solver whose judge has a root of its own, in between; each has a reward for its last turn."""
    ledger = Ledger(group_id="g")
    for parent, agent in ((None, "solver"), (None, "judge"), (0, "solver")):
        before = ledger.path_length(parent)
        ledger.commit(make_draft(parent, before, [100] * 2, [200] * 2, agent=agent))
    ledger.annotate("reward", 1.0, turn=2)
    ledger.annotate("reward", -1.0, turn=1)
    return ledger


def test_each_agent_has_its_own_reward_and_its_own_group() -> None:
    ledgers = [two_agents(), two_agents(), chain((2, 2))]
    samples = [sample for ledger in ledgers for sample in samples_of(ledger)]
    assert [(one.identity.agent, one.total, one.identity.turn) for one in samples[:2]] == [
        ("judge", -1.0, 0),
        ("solver", 1.0, 0),
    ]
    for agent, reward in (("judge", -1.0), ("solver", 1.0)):
        (alone,) = samples_of(ledgers[0], agent=agent)
        assert (alone.total, sample_of(ledgers[0], branches="last", agent=agent).total) == (reward, reward)
    for by, numbers in (("task", [0, 0, 0, 0, -1]), ("agent", [0, 1, 0, 1, -1]), ("turn", [0, 1, 0, 1, -1])):
        batch = padded(samples, pad_id=0, group_by=by)  # type: ignore[arg-type]
        assert batch.group_index.tolist() == numbers
        assert packed(samples, pad_id=0, length=8, group_by=by).group_index.tolist() == numbers  # type: ignore[arg-type]
        assert batch.credit.sum(axis=1).tolist() == [-1.0, 1.0, -1.0, 1.0, 0.0]
        assert packed(samples, pad_id=0, length=8).credit.sum() == 0.0
    with pytest.raises(ValueError, match="not by 'step'"):
        padded(samples, pad_id=0, group_by="step")  # type: ignore[arg-type]


def test_a_group_by_turn_is_of_samples_that_begin_at_the_same_turn_of_their_agent() -> None:
    ledger = with_calls()
    assert [sample.identity.turn for sample in samples_of(ledger)] == [0, 2]
    samples = [*samples_of(ledger), *samples_of(chain((2, 2), (1, 1))), *samples_of(with_calls())]
    samples[2] = replace(samples[2], identity=replace(samples[2].identity, group_id="g"))
    assert padded(samples, pad_id=0, group_by="turn").group_index.tolist() == [0, 1, 0, 0, 1]
    samples[1] = replace(samples[1], identity=replace(samples[1].identity, turn=None))  # of an older file
    assert padded(samples, pad_id=0, group_by="turn").group_index.tolist() == [0, -1, 0, 0, 1]


def test_a_samples_turn_is_counted_among_those_of_its_agent() -> None:
    """Its path begins with the other's turn; counted among those, it would be in the group of the first sample."""
    ledger = Ledger(group_id="g")
    for parent, agent in ((None, "b"), (None, "a"), (1, "b")):
        ledger.commit(make_draft(parent, ledger.path_length(parent), [100] * 2, [200] * 2, agent=agent))
    assert [(each.identity.agent, each.identity.turn) for each in samples_of(ledger)] == [("b", 0), ("b", 1)]


class Sample(Recorded):  # type: ignore[misc]
    def get_reward_value(self, args: Any) -> Any:
        return self.reward


def test_slime_compares_rewards_of_one_agent_or_turn_where_it_is_told_to(caplog: pytest.LogCaptureFixture) -> None:
    ledgers = [two_agents(), two_agents()]
    ledgers[1].annotate("reward", 3.0, turn=2)
    samples = [
        one
        for index, ledger in enumerate(ledgers)
        for one in fan_out(Sample(index=index, group_index=0), ledger, decode=str, temperature=1.0)
    ]
    assert [one.reward for one in samples] == [-1.0, 1.0, -1.0, 3.0]
    args = type("Args", (), {"advantage_estimator": "grpo", "grpo_std_normalization": False})()
    raw, by_task = rewards_by_group(args, samples)
    assert raw == [-1.0, 1.0, -1.0, 3.0]
    assert by_task == [-1.5, 0.5, -1.5, 2.5], "each rollout counts once: the mean of 0 and 1"
    assert caplog.messages == [
        "rollouts=<2>, agents=<judge, solver> | rewards of different agents are compared with each other. Set "
        "tito_group_by: agent in slime's --custom-config-path to compare those of each agent."
    ]
    caplog.clear()
    for by in ("agent", "turn"):
        args.tito_group_by = by
        assert rewards_by_group(args, samples)[1] == [0.0, -1.0, 0.0, 1.0]
    for sample in samples:
        sample.reward = 1.0  # of the rollout, which all its samples share
    args.tito_group_by = "task"
    rewards_by_group(args, samples)
    assert not caplog.messages
    args.tito_group_by = "step"
    with pytest.raises(ValueError, match="not by 'step'"):
        rewards_by_group(args, samples)


def test_trl_gets_the_sum_of_a_row_and_its_tokens() -> None:
    ledger = with_calls()
    ledger.annotate("reward", 0.5, turn=0, call=0)
    ledger.annotate("reward", 2.0)
    options: dict[str, Any] = {"temperature": 1.0, "end_id": 2, "logprobs": "as-recorded", "branches": "last"}
    columns = columns_of([ledger, chain((2, 2)), Ledger()], **options)
    assert recorded_reward(**columns) == [2.5, None, None]
    credit = columns["rollout_credit"]
    assert (credit[1:], len(credit[0]), sum(credit[0])) == ([None, None], len(columns["completion_ids"][0]), 0.5)
    assert (columns["rollout_trajectory"], columns["rollout_turn"]) == ([1, 0, None], [0, 0, None])


def test_what_one_row_cannot_hold_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    ledger = with_calls()
    for turns in (ledger, two_agents()):
        with pytest.raises(BranchedRolloutError, match=r"leaves out 2 of \d+ sampled tokens \((no agent|judge) 2\)"):
            columns_of([turns], temperature=1.0, end_id=2)
    with caplog.at_level(logging.WARNING):
        columns_of([ledger, chain((2, 2)), Ledger()], temperature=1.0, end_id=2, branches="last", logprobs="omit")
    assert "rollouts=<2>, branched=<1>, left_out=<2> | not trained: TRL gets last paths only" in caplog.text
    assert caplog.messages[0].endswith("Their 0 rewards of turns and calls are not read.")
    caplog.clear()
    columns_of([two_agents()], temperature=1.0, end_id=2, branches="last", logprobs="omit")
    assert caplog.messages[0].endswith("Tokens by agent: judge 2. Their 1 rewards of turns and calls are not read.")
    caplog.clear()
    fill(Sample(index=0), ledger, branches="last", decode=str, temperature=1.0, logprobs="omit")
    assert "left_out=<2> | not trained: slime" in caplog.text
    caplog.clear()
    columns_of([chain((2, 2))], temperature=1.0, end_id=2, branches="last")
    assert caplog.text == ""
    fan_out(Sample(index=0), two_agents(), max_paths=1, decode=str, temperature=1.0)
    assert "left_out=<2> | not trained: slime gets 1 paths of each only. Tokens by agent: judge 2." in caplog.text


def test_a_rollout_without_a_turn_of_the_agent_is_a_row_that_does_not_count(caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "end_id": 2, "branches": "last", "logprobs": "omit"}
    columns = columns_of([two_agents(), chain((2, 2)), Ledger(group_id="h")], agent="judge", **options)
    assert columns["env_mask"] == [[1, 1], [0], [0]]
    assert recorded_reward(**columns) == [-1.0, None, None]
    assert (columns["rollout_group"], columns["rollout_agent"]) == (["g", None, "h"], ["judge", None, None])
    assert "rollouts=<1>, branched=<1>, left_out=<4> | not trained: TRL" in caplog.text
    assert "agents=<" not in caplog.text
    caplog.clear()
    assert columns_of([two_agents(), Ledger()], agent="jugde", **options)["env_mask"] == [[0], [0]]
    (only,) = caplog.messages
    assert only.startswith("rollouts=<1>, agent=<jugde>, agents=<solver, judge> | not trained: TRL")


@settings(max_examples=25, deadline=None)
@given(st.lists(rollouts(experts=False), max_size=3))
def test_the_report_of_a_file_adds_up(tmp_path_factory: Any, ledgers: list[Ledger]) -> None:
    path: Path = tmp_path_factory.mktemp("credit") / "out"
    for to in ("parquet", "slime", "verl", "trl"):
        for branches in ("list", "last") if to in ("verl", "trl") else ("list",):
            logprobs: Any = "checked" if to == "parquet" else "omit"
            options = ExportOptions(lambda _: str, logprobs=logprobs, branches=branches)
            written = write(ledgers, to, path, options)
            left = written.elsewhere.total() + written.masked + written.constrained
            assert written.trained + left == written.sampled
            assert written.credit == sum(len(credits_of(ledger)) for ledger in ledgers)
            if branches == "list":
                assert not written.elsewhere, "every sampled token has a row"
                assert written.rows == sum(len(ledger.leaves()) for ledger in ledgers)
                capped = write(ledgers, to, path, replace(options, max_paths=1))
                assert (capped.rows, capped.sampled) == (len(ledgers), written.sampled)
                left = capped.elsewhere.total() + capped.masked + capped.constrained
                assert capped.trained + left == capped.sampled


def test_a_file_says_which_rewards_have_no_row(tmp_path: Path) -> None:
    ledger = two_agents()
    for branches, credited in (("list", 2), ("last", 1)):
        options = ExportOptions(lambda _: str, logprobs="omit", branches=branches)  # type: ignore[arg-type]
        written: Written = write([ledger], "trl", tmp_path / "out", options)
        assert f"Rewards of turns and tool calls: {credited} of 2" in " ".join(written.lines("out"))
    write([ledger], "parquet", tmp_path / "out", ExportOptions(lambda _: str))
    found = [sample.credit for sample in read_parquet(tmp_path / "out")]
    assert [None if credit is None else credit.tolist() for credit in found] == [
        [0, 0, 0, -1],
        [0, 0, 0, 0, 0, 0, 0, 1],
    ]


def test_a_summarised_history_is_trained_once_with_its_own_reward() -> None:
    """Three samples: the path before the summary, the summary itself, and the path after it."""
    model = model_of("vllm", Says("One.", "Two.", "Summary.", "Three."))
    manager = SummarizingConversationManager(summary_ratio=0.8, preserve_recent_messages=1)
    agent = Agent(model=model, callback_handler=None, conversation_manager=manager)
    agent("a")
    agent("b")
    manager.reduce_context(agent)
    agent("c")
    samples = samples_of(model.ledger)
    assert [turn.draft.branch.reason for turn in model.ledger if turn.draft.branch] == ["side call", "summary"]
    assert [sample.identity.turn for sample in samples] == [0, 0, 2]
    assert trained_tokens(samples) == sum(len(turn.draft.output_ids) for turn in model.ledger)
    for turn, reward in enumerate((1, 2, 4, 8)):
        model.ledger.annotate("reward", reward, turn=turn)
    assert [sample.total for sample in samples_of(model.ledger)] == [3.0, 4.0, 8.0]
