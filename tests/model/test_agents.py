"""Several agents on one model: whose turn it is, and which path is "the last"."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from strands import Agent, tool
from strands.agent.conversation_manager import SummarizingConversationManager
from strands.multiagent import GraphBuilder
from strands.session import FileSessionManager
from strands.vended_plugins.goal import GoalLoop

from strands_tito.export import BranchedRolloutError, sample_of, samples_of, trained_tokens
from support.scripted import END, Says, call, model_of, tokenizer
from tito_core import TITOModel, store
from tito_core.ledger import Ledger, check_ledger
from tito_core.turn.inputs import _STRANDS_NAMES


def agents(ledger: Ledger) -> list[str | None]:
    check_ledger(ledger)
    return [turn.draft.agent for turn in ledger]


def trained(ledger: Ledger, **choice: Any) -> str:
    sample = sample_of(ledger, branches="last", **choice)
    kept = [int(token) for token, mask in zip(sample.token_ids, sample.loss_mask, strict=True) if mask]
    return str(tokenizer().decode(kept)).replace(END, "")


def agent_of(model: TITOModel, **options: Any) -> Agent:
    return Agent(model=model, callback_handler=None, **options)


def test_the_last_path_is_the_agents_and_not_its_judges() -> None:
    """GoalLoop makes a judge, without a name, for each answer, after the agent's last turn."""
    verdict = call("JudgeOutcome", '{"passed": true, "feedback": null}')
    model = model_of("vllm", Says("It is Paris.", verdict))
    agent_of(model, plugins=[GoalLoop("names a city", max_attempts=2)])("The capital?")
    assert agents(model.ledger) == ["agent-0", "agent-1"]
    assert trained(model.ledger) == "It is Paris."
    assert trained(model.ledger, agent="agent-1") == verdict
    assert [path.agent for path in model.trajectories] == ["agent-0", "agent-1"]


def test_the_last_path_is_the_agents_and_not_that_of_an_agent_that_it_delegates_to() -> None:
    model = model_of("vllm", Says(call("helper", '{"input": "q"}'), "Four."))
    helper = agent_of(model, name="helper", description="helps")
    agent_of(model, name="solver", tools=[helper.as_tool(delegate=True)])("2 + 2?")
    assert agents(model.ledger) == ["solver", "helper"]
    assert "helper" in trained(model.ledger)
    assert trained(model.ledger, agent="helper") == "Four."
    assert [sample.identity.agent for sample in samples_of(model.ledger)] == ["solver", "helper"]
    (only,) = samples_of(model.ledger, agent="helper")
    assert only.identity.agent == "helper"
    with pytest.raises(LookupError, match=r"'judge' made no turn .* solver, helper"):
        sample_of(model.ledger, branches="last", agent="judge")
    with pytest.raises(BranchedRolloutError, match=r"last path of agent 'solver'.*solver, helper"):
        sample_of(model.ledger)
    assert sample_of(model.ledger, agent="helper").identity.trajectories == 1, "of this agent there is one path"


def test_agents_of_one_name_are_one_agent_and_an_id_is_a_name() -> None:
    """A tool that makes a new agent for each call is the usual sub-agent."""
    model = model_of("vllm", Says(call("ask", '{"q": "a"}'), "One.", call("ask", '{"q": "b"}'), "Two.", "Both."))

    @tool
    def ask(q: str) -> str:
        """Ask.

        Args:
            q: A question.
        """
        return str(agent_of(model, name="researcher")(q))

    agent_of(model, agent_id="lead", tools=[ask])("Find out.")
    assert agents(model.ledger) == ["lead", "researcher", "lead", "researcher", "lead"]
    assert trained(model.ledger, agent="researcher") == "Two."
    assert trained(model.ledger).endswith("Both.")
    with pytest.raises(BranchedRolloutError, match="2 trajectories"):
        sample_of(model.ledger, agent="researcher")
    assert trained_tokens(samples_of(model.ledger, agent="researcher")) == sum(
        turn.draft.columns.output for turn in model.ledger if turn.draft.agent == "researcher"
    )


def test_an_agent_keeps_its_identity_over_turns_edits_and_calls() -> None:
    model = model_of("vllm", Says("One.", "Other.", "Two.", "Three."))
    first, other = agent_of(model), agent_of(model, system_prompt="Other.")
    first("a")
    other("a")
    first.system_prompt = "Be brief."  # a new root
    first("b")
    first.name = "renamed"
    first("c")
    assert agents(model.ledger) == ["agent-0", "agent-1", "agent-0", "agent-0"]
    assert model.ledger.agents == ("agent-0", "agent-1")


def test_a_new_agent_without_a_name_that_continues_a_history_is_the_same_agent() -> None:
    model = model_of("vllm", Says("One.", "Two.", "Judged."))
    first = agent_of(model)
    first("a")
    agent_of(model, messages=list(first.messages))("b")
    agent_of(model, name="judge", messages=list(first.messages))("Was it right?")
    assert agents(model.ledger) == ["agent-0", "agent-0", "judge"]
    assert [turn.parent for turn in model.ledger] == [None, 0, 0]
    assert trained(model.ledger) == "One.Two."
    assert trained(model.ledger, agent="judge") == "Judged.", "what it continues is context"


def test_a_restored_agent_is_the_same_agent(tmp_path: Path) -> None:
    def run(question: str) -> Ledger:
        with store.LedgerFile(tmp_path / "rollouts.tito", "a") as file:
            model = model_of("vllm", Says("One.", "Two."), store=file)
            agent_of(model, session_manager=FileSessionManager("s", storage_dir=str(tmp_path / "s")))(question)
            return model.ledger

    assert agents(run("a")) == ["agent-0"]
    assert agents(run("b")) == ["agent-0", "agent-0"]
    with store.LedgerFile(tmp_path / "rollouts.tito") as file:
        (loaded,) = file
    assert agents(loaded) == ["agent-0", "agent-0"]


def test_a_summary_of_the_history_belongs_to_no_agent() -> None:
    model = model_of("vllm", Says("One.", "Two.", "Summary.", "Three."))
    manager = SummarizingConversationManager(summary_ratio=0.5, preserve_recent_messages=1)
    agent = agent_of(model, conversation_manager=manager)
    agent("a")
    agent("b")
    manager.reduce_context(agent)
    agent("c")
    assert agents(model.ledger) == ["agent-0", "agent-0", None, "agent-0"]
    assert trained(model.ledger) == "Three."


async def test_parallel_agents_that_share_a_state_are_told_apart() -> None:
    """Strands puts the agent into the invocation state, which parallel nodes share: the last to write it is in it."""
    model = model_of("vllm", Says("Done."))
    shared: dict[str, Any] = {}
    left, right = agent_of(model, name="left"), agent_of(model, name="right", system_prompt="Other.")
    builder = GraphBuilder().set_max_node_executions(2)
    for node in (left, right):
        builder.add_node(node, node.name)
        builder.set_entry_point(node.name)
    await builder.build().invoke_async("go", invocation_state=shared)
    found = agents(model.ledger)
    assert len(set(found)) == 2
    assert set(found) <= {"left", "right", "agent-0", "agent-1"}, "never the other one's name"
    for turn in model.ledger:
        own = "Other." in tokenizer().decode(model.ledger.path_ids(turn.index))
        assert turn.draft.agent != ("left" if own else "right")


async def test_the_agent_in_the_state_names_the_caller_only_with_the_callers_signal() -> None:
    model = model_of("vllm", Says("One.", "Two.", "Three."))
    other, question = agent_of(model, name="other"), [{"role": "user", "content": [{"text": "a"}]}]
    for signal in (threading.Event(), None, other.cancel_signal):
        state: dict[str, Any] = {}
        async for _ in model.stream(
            [*question, {"role": "assistant", "content": [{"text": str(signal)}]}, *question],  # type: ignore[list-item]
            model_state=state,
            invocation_state={"agent": other},
            cancel_signal=signal,
        ):
            pass
    assert agents(model.ledger) == ["agent-0", "agent-1", "other"]


def test_a_new_ledger_counts_its_own_agents() -> None:
    model = model_of("vllm", Says("One.", "Two.", "Three."))
    first, second = agent_of(model), agent_of(model, system_prompt="Other.")
    first("a")
    second("a")
    model.reset()
    second("b")
    assert agents(model.ledger) == ["agent-0"]


def test_agents_are_in_the_tree_and_strands_still_has_the_names_that_mean_none() -> None:
    model = model_of("vllm", Says("One.", "Two."))
    agent = agent_of(model)
    agent("a")
    assert (agent.name, agent.agent_id) == _STRANDS_NAMES
    assert " by " not in model.ledger.tree()
    agent_of(model, name="judge\n", system_prompt="Other.")("a")
    assert "turn 0 by agent-0  " in model.ledger.tree()
    assert r"turn 1 by 'judge\n'  " in model.ledger.tree()


def test_a_name_that_no_file_can_hold_is_written_with_marks() -> None:
    model = model_of("vllm", Says("One."))
    asyncio.run(agent_of(model, name="a\ud800").invoke_async("a"))
    assert agents(model.ledger) == ["a?"]
    assert json.loads(json.dumps(store.to_json(model.ledger)))["turns"][0]["agent"] == "a?"
