"""Strands' history edits on real servers: exact or linked, and confirmed by the engine's scores."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest
from strands import Agent
from strands.agent.conversation_manager import SlidingWindowConversationManager
from strands.hooks import AfterModelCallEvent, HookProvider, HookRegistry
from strands.session import FileSessionManager
from strands.types.exceptions import MaxTokensReachedException

from calculator import calculator
from strands_tito.inspect.verify import rescore
from support.real import Served
from tito_core import TITOModel, store
from tito_core.ledger import Ledger, Provenance, Reason, check_ledger
from tito_core.turn.branch import HistoryChangedError

pytestmark = pytest.mark.engine


def agent_of(model: TITOModel, **options: Any) -> Agent:
    return Agent(model=model, callback_handler=None, **options)


async def confirm(served: Served, ledger: Ledger) -> None:
    """Check every law, and that re-scoring confirms every sampled token."""
    check_ledger(ledger)
    rescored = await rescore(ledger, served.policy.backend)
    assert rescored.not_comparable == 0
    assert len(rescored.differences) == sum(turn.draft.columns.output for turn in ledger)
    assert rescored.quantile(1) <= 1e-4


def branches(ledger: Ledger) -> list[tuple[Reason, int | None] | None]:
    found = [turn.draft.branch for turn in ledger]
    return [None if branch is None else (branch.reason, branch.turn) for branch in found]


async def test_an_edit_a_rewind_and_new_tools(served: Served) -> None:
    model = served.model(temperature=1.0, max_new_tokens=24)
    agent = agent_of(model)
    for question in ("Who are you?", "And what do you like?"):
        await ask(agent, question)
    agent.messages[2]["content"] = [{"text": "And what do you dislike?"}]
    await ask(agent, "Why?")
    del agent.messages[2:]
    await ask(agent, "Say something else.")
    agent.tool_registry.register_tool(calculator)
    await ask(agent, "What is 3 + 4?")
    assert branches(model.ledger)[:4] == [None, None, (Reason.EDIT, 0), (Reason.REWIND, 0)]
    assert branches(model.ledger)[4] == (Reason.OPENING, 3)
    assert [turn.parent for turn in model.ledger][:5] == [None, 0, None, 0, None]
    await confirm(served, model.ledger)


async def ask(agent: Agent, question: str) -> None:
    """Run one invocation; a truncated answer is fine."""
    with contextlib.suppress(MaxTokensReachedException):
        await agent.invoke_async(question, limits={"turns": 2})


async def test_a_truncated_answer_is_closed_and_the_conversation_goes_on(served: Served) -> None:
    model = served.model(temperature=1.0, max_new_tokens=3, ignore_eos=True)
    agent = agent_of(model)
    for question in ("Who are you?", "And then?", "And after that?", "And at last?"):
        await ask(agent, question)
    assert [turn.parent for turn in model.ledger] == [None, 0, 1, 2]
    closer = served.policy.template.closer_id  # a truncated answer may end in it by chance
    unclosed = [turn for turn in list(model.ledger)[:-1] if turn.draft.output_ids[-1] != closer]
    assert model.trajectory.count(Provenance.INSERTED) == len(unclosed) > 0
    await confirm(served, model.ledger)


async def test_strands_ready_made_agent(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # it keeps sessions and memories there
    model = served.model(temperature=1.0, max_new_tokens=24)
    tools: Any = {"tools": [calculator], "builtin_tools": ["read", "subagent"]}
    from strands_harness import create_harness  # its import takes a second, also where no engine is

    async with create_harness(model=model, **tools, session={"id": "one"}) as agent:
        for question in ("What is 3 + 4?", "And 5 + 6?"):
            await ask(agent, question)
    ledger = model.ledger
    [extracted] = [turn.index for turn in ledger if turn.draft.branch and turn.draft.branch.reason is Reason.SIDE_CALL]
    assert ledger[extracted].draft.agent is None
    await confirm(served, ledger)


async def test_the_sliding_window_trims_into_linked_roots(served: Served) -> None:
    model = served.model(temperature=1.0, max_new_tokens=4)
    agent = agent_of(model, conversation_manager=SlidingWindowConversationManager(window_size=4))
    for number in range(5):
        await ask(agent, f"Question {number}?")
    reasons = {branch[0] for branch in branches(model.ledger) if branch is not None}
    assert reasons == {Reason.TRIM}
    await confirm(served, model.ledger)


class RetryOnce(HookProvider):
    def __init__(self) -> None:
        self.left = 1

    def register_hooks(self, registry: HookRegistry, **_: Any) -> None:
        registry.add_callback(AfterModelCallEvent, self.retry)

    def retry(self, event: AfterModelCallEvent) -> None:
        if event.stop_response is not None and self.left:
            self.left -= 1
            event.retry = True


async def test_a_retry_is_a_branch_of_its_own(served: Served) -> None:
    model = served.model(temperature=1.0, max_new_tokens=8)
    agent = agent_of(model, hooks=[RetryOnce()])
    await ask(agent, "Who are you?")
    await ask(agent, "And then?")
    assert branches(model.ledger) == [None, (Reason.RETRY, 0), None]
    assert [turn.parent for turn in model.ledger] == [None, None, 1]
    await confirm(served, model.ledger)


async def test_eight_identical_agents_have_eight_roots(served: Served) -> None:
    model = served.model(temperature=0.0, max_new_tokens=6)
    agents = [agent_of(model) for _ in range(8)]
    for question in ("Hello!", "And now?"):
        await asyncio.gather(*(ask(agent, question) for agent in agents))
    assert len(model.trajectories) == 8
    assert all(len(trajectory.turns) == 2 for trajectory in model.trajectories)
    await confirm(served, model.ledger)


async def test_a_restored_session_finds_its_ledger(served: Served, tmp_path: Path) -> None:
    with store.LedgerFile(tmp_path / "rollouts.tito", "a") as file:
        first = served.policy_with(file).model(sampling={"temperature": 1.0, "max_new_tokens": 8})
        await ask(agent_of(first, agent_id="a", session_manager=sessions(tmp_path)), "Who are you?")
    with store.LedgerFile(tmp_path / "rollouts.tito", "a") as file:
        second = served.policy_with(file).model(sampling={"temperature": 1.0, "max_new_tokens": 8})
        await ask(agent_of(second, agent_id="a", session_manager=sessions(tmp_path)), "And then?")
        assert second.ledger.uuid == first.ledger.uuid
        assert [turn.parent for turn in second.ledger] == [None, 0]
        await confirm(served, file.load(first.ledger.uuid))


def sessions(folder: Path) -> FileSessionManager:
    return FileSessionManager(session_id="s", storage_dir=str(folder / "sessions"))


async def test_a_changed_history_can_be_an_error(served: Served) -> None:
    model = served.policy.model(sampling={"temperature": 1.0, "max_new_tokens": 8}, history="error")
    agent = agent_of(model)
    await ask(agent, "Who are you?")
    agent.messages[0]["content"] = [{"text": "Who am I?"}]
    with pytest.raises(HistoryChangedError, match=r"message 0 \(user\) changed"):
        await agent.invoke_async("And then?")
    assert len(model.ledger) == 1
