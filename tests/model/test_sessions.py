"""A restored session finds its ledger again, and continues it or starts a linked branch."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from strands import Agent

from support.scripted import Says, backend_of, call, engine_of, ids_of, policy_of
from support.session import Life, Lived, agent_of, live, live_elsewhere
from tito_conformance.testing import ScriptedEngine
from tito_core import TITOModel, store
from tito_core.ledger import Ledger, check_ledger
from tito_core.store import LedgerFile

UUID = "00000000-0000-4000-8000-000000000000"
FIRST = ["What is 2 + 3?"]
FIRST_SAYS = [call("add", '{"a": 2, "b": 3}'), "It is 5."]
SECOND = ["And 5 + 5?", "Sure?"]
SECOND_SAYS = [call("add", '{"a": 5, "b": 5}') + call("add", '{"a": 1, "b": 1}'), "It is 10.", "Yes."]


def first_life(kind: str, folder: Path, **changes: Any) -> Life:
    return replace(
        Life(kind, FIRST, FIRST_SAYS, str(folder / "sessions"), str(folder / "rollouts"), uuid=UUID), **changes
    )


def model_over(file: LedgerFile, engine: ScriptedEngine) -> TITOModel:
    """Return a new model over an open file."""
    return replace(policy_of("vllm"), backend=backend_of(engine, "vllm"), store=file).model()


class SlowFile(LedgerFile):
    """A file that reads ledgers slowly, so that other threads request the same ledger meanwhile."""

    def load(self, uuid: str, *, check: bool = True) -> Ledger:
        time.sleep(0.05)
        return super().load(uuid, check=check)


def second_life(first: Life, **changes: Any) -> Life:
    return replace(first, questions=SECOND, answers=SECOND_SAYS, uuid=None, **changes)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings of conversations whose ledger was not found."""
    return [each.getMessage() for each in caplog.records if "was recorded in another ledger" in each.getMessage()]


def assert_prompts_are_paths(lived: Lived) -> None:
    """Check that every prompt of this life is the path before its turn and the turn's delta."""
    turns = lived.turns[len(lived.turns) - len(lived.prompts) :]
    for turn, prompt in zip(turns, lived.prompts, strict=True):
        path: list[int] = []
        at = turn["parent"]
        while at is not None:
            path = lived.turns[at]["prompt"] + lived.turns[at]["output"] + path
            at = lived.turns[at]["parent"]
        assert prompt == path + turn["prompt"]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_restored_session_continues_as_if_its_process_had_not_ended(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On vLLM in another process; and then once more in one that held the store open meanwhile, as a server does."""
    first = first_life(kind, tmp_path)
    await live(first)
    with LedgerFile(tmp_path / "rollouts", "a") as file:
        lived = live_elsewhere(second_life(first)) if kind == "vllm" else (await live(second_life(first)))[0]
        (stored,) = store.read(file.path)
        model = model_over(file, engine_of("vllm", Says("Ok.")))
        await agent_of(model, first, "default").invoke_async("Still there?")
        assert (model.ledger.uuid, [turn.parent for turn in model.ledger]) == (UUID, [None, 0, 1, 2, 3, 4])
    assert lived.ledger == UUID
    assert warnings_of(caplog) == []
    assert [turn["parent"] for turn in lived.turns] == [None, 0, 1, 2, 3]
    assert all(turn["reason"] is None for turn in lived.turns)
    assert lived.calls == [f"call_00000000_{number}" for number in (1, 2, 3)]
    assert lived.texts == ["It is 10.", "Yes."]
    assert_prompts_are_paths(lived)
    _, whole, _ = await live(Life(kind, FIRST + SECOND, FIRST_SAYS + SECOND_SAYS, uuid=UUID))
    assert store.encode(stored, engine=False) == store.encode(whole.ledger, engine=False)


async def test_without_a_store_a_restored_session_starts_a_new_root(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = first_life("sglang", tmp_path, store=None)
    await live(first)
    lived, _, _ = await live(second_life(first))
    assert lived.ledger != UUID
    assert [turn["parent"] for turn in lived.turns] == [None, 0, 1]
    assert_prompts_are_paths(lived)
    assert not set(lived.calls[1:]) & {"call_00000000_1"}
    [warning] = warnings_of(caplog)
    parts = (UUID, lived.ledger, "this policy has no store", "not trained", "store=PATH")
    assert [part for part in parts if part not in warning] == []


async def test_a_store_without_the_ledger_gets_a_new_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = first_life("vllm", tmp_path)
    await live(first)
    lived, _, _ = await live(second_life(first, store=str(tmp_path / "other")))
    assert lived.ledger != UUID
    assert [turn["parent"] for turn in lived.turns] == [None, 0, 1]
    assert_prompts_are_paths(lived)
    assert [(found.uuid, len(found)) for found in store.read(tmp_path / "other")] == [(lived.ledger, 3)]
    again, _, _ = await live(second_life(first, store=str(tmp_path / "other")))
    assert again.ledger == lived.ledger
    [warning] = warnings_of(caplog)
    parts = (UUID, lived.ledger, f"which {tmp_path / 'other'} does not hold", "not trained", "store=PATH")
    assert [part for part in parts if part not in warning] == []
    assert [turn["parent"] for turn in again.turns] == [None, 0, 1, 2, 3, 4]


async def test_an_edited_session_file_is_a_linked_branch(tmp_path: Path) -> None:
    first = first_life("sglang", tmp_path)
    await live(first)
    path = tmp_path / "sessions/session_s/agents/agent_default/messages/message_0.json"
    path.write_text(path.read_text().replace("What is 2 + 3?", "What is 2 plus 3?"))
    lived, _, _ = await live(second_life(first))
    assert lived.ledger == UUID
    assert [(turn["parent"], turn["reason"], turn["from"]) for turn in lived.turns[1:]] == [
        (0, None, None),
        (None, "edit", 1),
        (2, None, None),
        (3, None, None),
    ]
    edited = ids_of("What is 2 plus 3?")
    root = lived.turns[2]["prompt"]
    assert any(root[at : at + len(edited)] == edited for at in range(len(root)))
    assert_prompts_are_paths(lived)


async def test_a_session_older_than_the_store_branches_from_its_last_turn(tmp_path: Path) -> None:
    first = first_life("vllm", tmp_path)
    await live(first)
    shutil.copytree(tmp_path / "sessions", tmp_path / "old")
    await live(second_life(first))
    lived, _, _ = await live(second_life(first, sessions=str(tmp_path / "old")))
    assert lived.ledger == UUID
    assert [turn["parent"] for turn in lived.turns] == [None, 0, 1, 2, 3, 1, 5, 6]
    # The session does not know that its own turn was extended.
    assert (lived.turns[5]["reason"], lived.turns[5]["from"]) == ("separate agent", 1)
    assert_prompts_are_paths(lived)
    assert lived.calls == [f"call_00000000_{number}" for number in (1, 4, 5)]


async def test_an_agent_that_continues_after_a_reset_starts_the_next_ledger(tmp_path: Path) -> None:
    with LedgerFile(tmp_path / "rollouts", "a") as file:
        model = model_over(file, engine_of("vllm", Says("Ok.")))
        agent = Agent(model=model, callback_handler=None)
        await agent.invoke_async("One?")
        sealed = model.reset()
        await agent.invoke_async("Two?")
        kept = [(sealed.uuid, [None]), (model.ledger.uuid, [None])]
        assert [(found.uuid, [turn.parent for turn in found]) for found in store.read(file.path)] == kept
        assert model.ledger.uuid != sealed.uuid


@pytest.mark.parametrize("keeps", [True, False], ids=["live", "dropped"])
async def test_an_agent_that_is_used_for_one_task_after_another_has_a_ledger_for_each(
    keeps: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its key names the last rollout's ledger. It is not a restored agent."""
    with LedgerFile(tmp_path / "rollouts", "a") as file:
        model = model_over(file, engine_of("vllm", Says("Ok.")))
        agent, kept = Agent(model=model, callback_handler=None), [model.ledger]
        for number in range(3):
            agent.messages.clear()
            await agent.invoke_async("The same task." if number else "One?")
            model.ledger.annotate("reward", number)
            kept = [*kept, model.ledger] if keeps else []
            model = agent.model = model.policy.model()
        assert [(len(ledger), ledger.annotation("reward")) for ledger in file] == [(1, 0.0), (1, 1.0), (1, 2.0)]
        assert warnings_of(caplog) == [], "nothing is continued"


async def test_an_agent_goes_on_with_another_model_only_from_a_turn_of_its_ledger(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with LedgerFile(tmp_path / "rollouts", "a") as file:
        model = model_over(file, engine_of("vllm", Says("Ok.")))
        agent, first = Agent(model=model, callback_handler=None), model.ledger
        await agent.invoke_async("One?")
        agent.model = model.policy.model()
        await agent.invoke_async("Two?")
        assert (agent.model.ledger, [turn.parent for turn in first]) == (first, [None, 0])
        agent.model = model.policy.model()
        agent.messages[0]["content"] = [{"text": "An example?"}]
        await agent.invoke_async("Three?")
        assert [len(ledger) for ledger in file] == [2, 1]
        [warning] = warnings_of(caplog)
        parts = (first.uuid, agent.model.ledger.uuid, "continues no turn", "not trained", "make a new agent")
        assert [part for part in parts if part not in warning] == []


async def test_a_given_ledger_is_not_replaced_by_a_restored_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = first_life("vllm", tmp_path)
    await live(first)
    given = "11111111-0000-4000-8000-000000000000"
    lived, _, _ = await live(replace(second_life(first), uuid=given))
    assert lived.ledger == given
    assert [turn["parent"] for turn in lived.turns] == [None, 0, 1]
    assert [(found.uuid, len(found)) for found in store.read(tmp_path / "rollouts")] == [(UUID, 2), (given, 3)]
    [warning] = warnings_of(caplog)
    parts = (UUID, given, "but this model had begun its own", "not trained", "policy.store.resume")
    assert [part for part in parts if part not in warning] == []


async def test_a_call_outside_any_agent_does_not_hide_the_ledger_of_a_restored_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A conversation manager may summarise before the restored agent's first turn."""
    first = first_life("vllm", tmp_path)
    await live(first)
    with LedgerFile(tmp_path / "rollouts", "a") as file:
        model = model_over(file, engine_of("vllm", Says("Ok.")))
        agent = agent_of(model, first, "default")
        async for _ in model.stream([{"role": "user", "content": [{"text": "Summarise."}]}]):
            pass
        before = model.ledger
        await agent.invoke_async("Still there?")
        assert (model.ledger.uuid, [turn.parent for turn in model.ledger]) == (UUID, [None, 0, 1])
        [warning] = [each.getMessage() for each in caplog.records if "outside any agent" in each.getMessage()]
        assert [part for part in (before.uuid, UUID, "turns=<1>") if part not in warning] == []


async def test_a_reward_from_before_the_restored_agents_first_turn_is_in_its_ledger(tmp_path: Path) -> None:
    """After an interrupt the tool runs before the model is called, and a hook gives its reward."""
    first = first_life("vllm", tmp_path)
    await live(first)
    with LedgerFile(tmp_path / "rollouts", "a") as file:
        model = model_over(file, engine_of("vllm", Says("Ok.")))
        agent = agent_of(model, first, "default")
        model.ledger.annotate("reward", 0.25)
        await agent.invoke_async("Still there?")
        model.ledger.annotate("done", True)
        stored = file.load(UUID)
        assert (len(stored), stored.annotation("reward"), stored.annotation("done")) == (3, 0.25, True)


async def test_a_restored_agent_does_not_replace_the_ledger_of_a_turn_in_flight(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = first_life("vllm", tmp_path)
    await live(first)
    with LedgerFile(tmp_path / "rollouts", "a") as file:
        engine = engine_of("vllm", Says("Ok."), latency=lambda prompt: 0.1 if prompt.number == 0 else 0.0)
        model = model_over(file, engine)
        waiting = asyncio.ensure_future(Agent(model=model, callback_handler=None).invoke_async("Slow?"))
        while not engine.running:
            await asyncio.sleep(0.001)
        await agent_of(model, first, "default").invoke_async("Quick?")
        await waiting
        assert [turn.parent for turn in model.ledger] == [None, None]
        check_ledger(model.ledger)
        [warning] = warnings_of(caplog)
        assert "but this model had begun its own" in warning


def test_agents_restored_in_several_threads_at_once_share_one_ledger(tmp_path: Path) -> None:
    names = [f"agent{number}" for number in range(6)]
    first = first_life("vllm", tmp_path, questions=["Hi?"] * 6, answers=["Hello."], agents=names)
    asyncio.run(live(first))
    with SlowFile(tmp_path / "rollouts", "a") as file:
        model = model_over(file, engine_of("vllm", Says("Ok.")))
        agents = [agent_of(model, first, name) for name in names]
        with ThreadPoolExecutor(6) as threads:
            list(threads.map(lambda agent: agent("Again?"), agents))
        assert model.ledger.uuid == UUID
        assert sorted(turn.parent for turn in list(model.ledger)[6:]) == [0, 1, 2, 3, 4, 5]


async def test_an_invalid_key_is_ignored(tmp_path: Path) -> None:
    first = first_life("vllm", tmp_path)
    await live(first)
    path = tmp_path / "sessions/session_s/agents/agent_default/agent.json"
    written = json.loads(path.read_text())
    for key in ("mine", 7, None, {"ledger": "mine", "turn": 0}, {"ledger": UUID, "turn": 99}, {"ledger": UUID}):
        written["_internal_state"]["model_state"] = {"tito": key}
        path.write_text(json.dumps(written))
        lived, _, _ = await live(second_life(first, store=_copy(tmp_path), sessions=_copy_sessions(tmp_path)))
        assert_prompts_are_paths(lived)


def _copy(folder: Path) -> str:
    return str(shutil.copyfile(folder / "rollouts", folder / "rollouts-copy"))


def _copy_sessions(folder: Path) -> str:
    shutil.rmtree(folder / "sessions-copy", ignore_errors=True)
    return str(shutil.copytree(folder / "sessions", folder / "sessions-copy"))
