"""Strands' ready-made agent, with all that it switches on: one ledger, and branches with their reasons."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from strands import tool

from support.histories import add, observe
from support.scripted import Says, call, tokenizer
from tito_conformance.testing import Completion, ScriptedRequest
from tito_core import store
from tito_core.store import LedgerFile


def create_harness(**options: Any) -> Any:
    """Make the agent. Importing it takes a second, so only a process that runs these tests does."""
    from strands_harness import create_harness as create

    return create(**options)


REMINDER = r"\n*<system-reminder>.*?</system-reminder>"
"""What the harness adds to the last message of one call: the date, the folder, the list of things to do."""
PLAN = call("todo_write", '{"todos": [{"content": "a", "status": "in_progress", "activeForm": "doing a"}]}')


@tool
def page(n: int) -> str:
    """Read a page.

    Args:
        n: Which.
    """
    return f"Page {n}. " + "The harbour was quiet and the ships lay still. " * 400


class Roles(Says):
    """Answers a sub-agent and the extraction of memories by their prompts, since these run side by side."""

    def __call__(self, request: ScriptedRequest) -> Completion:
        prompt = tokenizer().decode(list(request.prompt_ids))
        others = {"You extract durable facts": "[]", "<|im_start|>user\nAdd 4 and 5": "Nine."}
        others |= {"<|im_start|>user\n<content>": "They talked."}
        answer = next((answer for words, answer in others.items() if words in prompt), None)
        if answer is None or request.scoring:
            return super().__call__(request)
        self.requests.append(request)
        return Completion([*tokenizer().encode(answer), tokenizer().eos_token_id])


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the harness keeps sessions and memories under it


async def test_the_harness_with_all_its_defaults(tmp_path: Path) -> None:
    file = LedgerFile(tmp_path / "rollouts.tito", "a")
    rollout = observe(
        "vllm",
        PLAN,
        call("page", '{"n": 7}') + call("add", '{"a": 2, "b": 3}'),
        call("programmatic_tool_caller", json.dumps({"code": "print(await add(a=1, b=2))"})),
        call("subagent", '{"task": "Add 4 and 5"}'),
        "I wait.",
        "It is nine.",
        "Yes.",
        "Welcome.",
        says=Roles,
        max_model_len=32768,
        store=file,
    )
    for questions in (("Make a plan.", "Sure?"), ("Back?",)):  # the second is a restored session
        async with create_harness(model=rollout.model, tools=[add, page], session={"id": "one"}) as agent:
            for question in questions:
                await agent.invoke_async(question)
    rollout.check(in_order=False, injected=REMINDER)
    tree = {turn.index: (turn.parent, turn.draft.agent) for turn in rollout.model.ledger}
    reasons = sorted(branch[0] for branch in rollout.branches.values())
    # The sub-agent; its result, which Strands delivers by a call that it writes into the last answer; memories, twice.
    assert reasons == ["EDIT", "SEPARATE", "SIDE_CALL", "SIDE_CALL"], tree
    assert len(tree) == 11
    file.close()
    [loaded] = store.read(tmp_path / "rollouts.tito")
    assert store.encode(loaded) == store.encode(rollout.model.ledger)
