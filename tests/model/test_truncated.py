"""Truncated turns: what they left open is closed once, as the template does, and is never trained."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strands.types.exceptions import MaxTokensReachedException

from support.drafts import make_draft
from support.histories import ObservedRollout, add, observe
from support.scripted import END, ids_of, policy_of, tokenizer
from tito_core.chat.ending import Opened
from tito_core.ledger import CallRecord, Finish, Provenance, check_ledger
from tito_core.turn.history import stopped_in_reasoning
from tito_core.turn.request import open_part

NAME = "qwen3-tiny"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
WHOLE = f"<think>\nHm, <tool_call> no.\n</think>\n\nSo: é {CALL} and"
NEXT = "\n<|im_start|>user\nSecond?<|im_end|>\n<|im_start|>assistant\n"


def closers(text: str) -> str:
    """Return what Qwen3's template writes after this beginning of an answer."""
    if text.startswith("<think>") and "</think>" not in text:
        return "\n</think>\n\n<|im_end|>"
    outside = text.rpartition("</think>")[2]
    call = "</tool_call>" if text.endswith("\n") else "\n</tool_call>"
    return call + "<|im_end|>" if outside.count("<tool_call>") > outside.count("</tool_call>") else "<|im_end|>"


async def cut_and_ask(rollout: ObservedRollout) -> None:
    agent = rollout.agent()
    with pytest.raises(MaxTokensReachedException):
        await agent.invoke_async("First?")
    rollout.model.update_config(max_new_tokens=64)
    await agent.invoke_async("Second?")


def test_a_turn_is_closed_wherever_it_was_cut() -> None:
    shown = tokenizer(NAME)

    @settings(deadline=None, max_examples=40)
    @given(st.integers(1, len(WHOLE)), st.sampled_from([WHOLE, WHOLE[WHOLE.index("</think>") + 10 :]]))
    def holds(length: int, whole: str) -> None:
        text = whole[:length]
        rollout = observe(
            "sglang", text + "...", "Two.", name=NAME, sampling={"max_new_tokens": len(ids_of(text, NAME))}
        )
        asyncio.run(cut_and_ask(rollout))
        assert rollout.parents == [None, 0]
        check_ledger(rollout.model.ledger)
        first, second = (turn.draft for turn in rollout.model.ledger)
        kinds = second.prompt_provenance
        inserted = int((kinds == Provenance.INSERTED).sum())
        assert (kinds[:inserted] == Provenance.INSERTED).all()
        assert shown.decode(second.prompt_ids[:inserted]) == closers(text)
        assert shown.decode(second.prompt_ids[inserted:]) == NEXT
        sent = list(rollout.script.requests[1].prompt_ids)
        assert sent == [*first.prompt_ids, *first.output_ids, *second.prompt_ids]
        trajectory = rollout.model.trajectory
        assert int(trajectory.loss_mask.sum()) == len(first.output_ids) + len(second.output_ids)

    holds()


async def test_a_stop_token_inside_reasoning_starts_a_branch() -> None:
    rollout = observe("vllm", "<think>\nHm.", "Two.", "Three.", name=NAME)
    agent = rollout.agent()
    for question in ("First?", "Second?", "Third?"):
        await agent.invoke_async(question)
    assert rollout.parents == [None, None, 1]
    assert rollout.branches == {1: ("THINKING", 0, 1)}
    branch = rollout.model.ledger[1].draft.branch
    assert str(branch) == "thinking stripped (left open), from turn 0, at message 1"
    assert list(rollout.model.ledger[0].draft.output_ids) == ids_of("<think>\nHm." + END, NAME)
    template = policy_of("vllm", NAME).template
    prompts = [tokenizer(NAME).decode(list(request.prompt_ids)) for request in rollout.script.requests]
    for call, prompt in list(zip(rollout.shown, prompts, strict=True))[:2]:
        assert str.__str__(template.rendering.of_messages(call.messages, call.system, [add.tool_spec])) == prompt
    assert Provenance.INSERTED not in rollout.model.trajectories[1].provenance
    check_ledger(rollout.model.ledger)


@pytest.mark.parametrize(
    ("finish", "stop", "closed", "status", "left"),
    [
        (Finish.LENGTH, None, True, None, Opened.MESSAGE),
        (Finish.LENGTH, None, False, None, Opened.REASONING),
        (Finish.LENGTH, None, False, "truncated", Opened.REASONING),
        (Finish.LENGTH, None, True, "truncated", Opened.CALL),
        (Finish.LENGTH, None, True, "ok", Opened.MESSAGE),
        (Finish.STOP, 200, False, None, Opened.MESSAGE),
        (Finish.STOP, None, True, "ok", Opened.MESSAGE),
        (Finish.STOP, "Observation:", False, None, Opened.REASONING),
        (Finish.STOP, "Observation:", True, None, Opened.MESSAGE),
    ],
)
def test_the_open_part_of_a_truncated_turn(finish: Any, stop: Any, closed: bool, status: Any, left: Opened) -> None:
    calls = (CallRecord("add", status, 0, 1),) if status else ()
    draft = make_draft(None, 0, [100], [200], finish=finish, stop=stop, reasoning_closed=closed, calls=calls)
    assert open_part(draft) == left
    assert stopped_in_reasoning(draft) == (finish == Finish.STOP and stop == 200 and not closed)


def test_the_oracle_of_closers_is_the_templates() -> None:
    shown = re.sub(r"\s+", "", "".join(closers(WHOLE[:length]) for length in (8, WHOLE.index(CALL) + 15, len(WHOLE))))
    assert shown == "</think><|im_end|></tool_call><|im_end|><|im_end|>"
