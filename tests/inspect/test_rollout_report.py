"""The terminal report about rollouts and their re-scoring."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from strands import Agent, tool

from strands_tito.inspect.show import Rollout, rollout_table, show
from support.scripted import Says, call, model_of


@tool
def add(a: int, b: int) -> str:
    """Add.

    Args:
        a: One.
        b: The other.
    """
    return str(a + b)


async def test_the_report_has_a_row_per_rollout_and_the_totals() -> None:
    model = model_of("vllm", Says(call("add", '{"a": 1, "b": 2}') + call("add", "{"), "It  is\n3."))
    agent = Agent(model=model, tools=[add], callback_handler=None)
    await agent.invoke_async("What is 1 + 2?")
    rollouts = [
        Rollout("What is 1 + 2?", "It  is\n3.", "end_turn", model.ledger),
        Rollout("And again?", "", "max_tokens", model.ledger),
    ]
    console = Console(record=True, width=200)
    rescored = await show(console, model.policy, rollouts, 2.0)
    sampled = sum(len(turn.draft.output_ids) for turn in model.ledger)
    text = console.export_text()
    head, first, second = _rows(text)
    assert head == ["#", "question", "turns", "prompt", "inserted", "sampled", "calls", "malformed", "answer"]
    prompt = sum(len(turn.draft.prompt_ids) for turn in model.ledger)
    assert first[:6] == ["1", "What", "is", "1", "+", "2?"]
    assert first[6] == "2"
    assert int(first[7]) + int(first[8]) <= prompt
    assert first[9:] == [str(sampled), "1", "1", "It", "is", "3."]
    assert second[-1] == "(max_tokens)"
    assert "laws        1 to 4 and 8 to 10 hold on 2 ledgers, 4 turns" in text
    assert f"speed       {sampled:.0f} sampled tokens/s, 2.00 turns/s, 2.0 s" in text
    assert "of 4 turns" in text
    assert f"engine      vllm {model.policy.info.version}, model scripted, logprobs" in text
    assert len(rescored.differences) + rescored.not_comparable == 2 * sampled
    assert f"re-scored   {len(rescored.differences)} sampled tokens" in text


def _rows(text: str) -> list[list[str]]:
    lines = [line.split() for line in text.splitlines() if line.strip()]
    return [lines[0], *[line for line in lines if line[0] in ("1", "2")]]


def _printed(table: Any) -> str:
    console = Console(record=True, width=200)
    console.print(table)
    return console.export_text()


def test_a_table_without_rollouts_has_its_header() -> None:
    assert [column.name for column in rollout_table([]).columns][:3] == ["#", "question", "turns"]
    assert _rows(_printed(rollout_table([])))[0][:3] == ["#", "question", "turns"]
