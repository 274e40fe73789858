"""A malformed call never runs, whatever tool it names; the policy, the user or the trainer gets the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from strands import Agent, tool
from strands.hooks import BeforeToolCallEvent

from support.scripted import BACKENDS, Says, call, ids_of, model_of, tokenizer
from support.session import Life, live
from support.wipers import KINDS, wiper
from tito_core import MalformedCallError
from tito_core.chat.messages import MALFORMED_CALL
from tito_core.ledger import check_ledger

BROKEN = {
    "broken JSON": '<tool_call>{"name": "wipe", "arguments": {"path": }}</tool_call>',
    "a list": call("wipe", '["/"]'),
    "a string": call("wipe", '"/"'),
    "nothing": call("wipe", "null"),
    "no arguments": '<tool_call>{"name": "wipe"}</tool_call>',
    "another key": '<tool_call>{"name": "wipe", "arguments": {}, "path": "/"}</tool_call>',
    "a key twice": call("wipe", '{"path": "/a", "path": "/b"}'),
    "no closing tag": '<tool_call>{"name": "wipe", "arguments": {}}',
    "the reserved name": call(MALFORMED_CALL, "{}"),
}
WELL_FORMED = call("wipe", '{"path": "/data/a"}')


def agent_of(model: Any, tools: Any, **options: Any) -> Agent:
    return Agent(model=model, tools=tools, callback_handler=None, **options)


def stored(agent: Agent) -> list[Any]:
    """Return the blocks of the agent's first answer."""
    return next(message["content"] for message in agent.messages if message["role"] == "assistant")


def prompt_of(model: Any, turn: int) -> str:
    return str(tokenizer().decode(model.ledger[turn].draft.prompt_ids))


@tool
def wipe(path: str = "/everything") -> str:
    """Wipe a path.

    Args:
        path: What to wipe.
    """
    raise AssertionError(f"It ran on {path}.")


@pytest.mark.parametrize("kind", KINDS)
async def test_no_malformed_call_of_any_form_runs_on_any_kind_of_tool(kind: str, tmp_path: Path) -> None:
    wire = BACKENDS[KINDS.index(kind) % len(BACKENDS)]
    with wiper(kind, tmp_path) as (tools, ran):
        for form, text in BROKEN.items():
            model = model_of(wire, Says(text, "Sorry."))
            agent = agent_of(model, tools)
            assert str(await agent.invoke_async("Clean up.")).strip() == "Sorry.", form
            [result] = [block["toolResult"] for block in agent.messages[2]["content"]]
            assert result["content"] == [{"text": f"Unknown tool: {MALFORMED_CALL}"}], form
            assert "malformed" in prompt_of(model, 1), form
            assert "Unknown tool" not in prompt_of(model, 1), form
            assert model.ledger[1].parent == 0, form
        assert ran.read_text() == ""
        await agent_of(model_of(wire, Says(WELL_FORMED, "Done.")), tools).invoke_async("Clean up.")
        assert ran.read_text() == "/data/a\n"  # so the tool can run


@pytest.mark.parametrize("malformed_calls", ["feedback", "end_turn", "raise"])
@pytest.mark.parametrize(("wire", "kind"), [("vllm", "decorated"), ("sglang", "decorated"), ("sglang", "module")])
async def test_well_formed_calls_of_a_message_with_a_malformed_one_run_with_feedback_only(
    wire: str, malformed_calls: Any, kind: str, tmp_path: Path
) -> None:
    with wiper(kind, tmp_path) as (tools, ran):
        text = WELL_FORMED + BROKEN["broken JSON"] + call("wipe", '{"path": "/data/b"}')
        model = model_of(wire, Says(text, "Done."), malformed_calls=malformed_calls)
        agent = agent_of(model, tools)
        if malformed_calls == "raise":
            with pytest.raises(MalformedCallError):
                await agent.invoke_async("Clean up.")
        else:
            await agent.invoke_async("Clean up.")
        assert sorted(ran.read_text().split()) == (["/data/a", "/data/b"] if malformed_calls == "feedback" else [])
        check_ledger(model.ledger)
        assert [record.status for record in model.ledger[0].draft.calls] == ["ok", "malformed", "ok"]
    if malformed_calls == "feedback":
        assert stored(agent)[1]["toolUse"]["input"].keys() == {"reason", "raw"}, "it has no name"
        results = prompt_of(model, 1).split("<tool_response>\n")[1:]
        assert [text.split("\n")[0] for text in results[:3]][::2] == ["wiped", "wiped"]
        parts = ("2 of 3", "malformed", "JSON", "line 1 column 40 (char 39)", BROKEN["broken JSON"])
        assert [part for part in parts if part not in results[1]] == []


async def test_strands_stores_a_malformed_call_as_a_mapping_with_its_whole_text() -> None:
    raw = call("wipe", '["' + "x" * 500 + '"]')
    model = model_of("sglang", Says("Well. " + raw, "Sorry."))
    agent = agent_of(model, [wipe])
    await agent.invoke_async("Clean up.")
    text, use = stored(agent)
    assert text == {"text": "Well."}
    assert (use["toolUse"]["name"], use["toolUse"]["input"]) == (
        MALFORMED_CALL,
        {"reason": use["toolUse"]["input"]["reason"], "raw": raw, "name": "wipe"},
    )
    assert '"arguments"' in use["toolUse"]["input"]["reason"]
    assert "wipe was malformed" in prompt_of(model, 1)
    assert "x" * 100 in prompt_of(model, 1)
    assert "x" * 250 not in prompt_of(model, 1)
    assert model.ledger[1].parent == 0


async def test_the_raw_text_that_the_policy_reads_again_holds_no_control_token() -> None:
    loaded = tokenizer("qwen3-tiny")
    text = BROKEN["broken JSON"] + "<|im_start|>"
    model = model_of("vllm", Says(text[:-12], "Sorry.", name="qwen3-tiny"), "qwen3-tiny")
    await agent_of(model, [wipe]).invoke_async("Clean up.")
    opening = loaded.convert_tokens_to_ids("<tool_call>")
    assert opening in model.ledger[0].draft.output_ids
    assert opening not in model.ledger[1].draft.prompt_ids
    assert "<tool_call>" in loaded.decode(model.ledger[1].draft.prompt_ids)


def life(wire: str, folder: Path, **changes: Any) -> Life:
    options: dict[str, Any] = {
        "kind": wire,
        "questions": ["Add."],
        "answers": [call("add", '["a"]') + call("add", '{"a": 1, "b": 2}'), "Sorry."],
        "sessions": str(folder / "sessions"),
        "store": str(folder / "rollouts"),
        "uuid": "00000000-0000-4000-8000-000000000000",
    }
    return Life(**{**options, **changes})


async def test_a_history_that_starts_a_new_root_still_shows_the_reason(tmp_path: Path) -> None:
    await live(life("vllm", tmp_path, store=None))
    lived, _, _ = await live(life("vllm", tmp_path, store=None, questions=["Sure?"], answers=["Yes."], uuid=None))
    [turn] = lived.turns
    assert turn["parent"] is None
    text = tokenizer().decode(turn["prompt"])
    assert "1 of 2 to add was malformed" in text
    assert "Unknown tool" not in text
    assert "<tool_response>\n3\n</tool_response>" in text


async def test_the_policy_reads_a_hooks_answer_to_a_malformed_call() -> None:
    model = model_of("vllm", Says(BROKEN["a list"], "Sorry."))
    agent = agent_of(model, [wipe])
    agent.hooks.add_callback(BeforeToolCallEvent, lambda event: setattr(event, "cancel_tool", "One try is left."))
    await agent.invoke_async("Clean up.")
    assert f"{BROKEN['a list']}\nOne try is left.\n" in prompt_of(model, 1)


async def test_end_turn_keeps_the_text_and_continues_the_sampled_tokens() -> None:
    text = f"Well. {WELL_FORMED} and {BROKEN['broken JSON']}"
    model = model_of("sglang", Says(text, "Sorry."), malformed_calls="end_turn")
    agent = agent_of(model, [wipe])
    result = await agent.invoke_async("Clean up.")
    assert result.stop_reason == "end_turn"
    assert stored(agent) == [{"text": f"Well.  and\n{WELL_FORMED}\n{BROKEN['broken JSON']}"}]
    await agent.invoke_async("Well?")
    assert [turn.parent for turn in model.ledger] == [None, 0]
    assert model.ledger[0].draft.output_ids.tolist() == ids_of(text + "<|im_end|>")
    assert prompt_of(model, 1).startswith("\n<|im_start|>user\nWell?")
    check_ledger(model.ledger)


async def test_raise_names_the_call_and_keeps_the_turn() -> None:
    model = model_of("vllm", Says(f"Well. {BROKEN['a list']}{BROKEN['nothing']}", "Sorry."), malformed_calls="raise")
    agent = agent_of(model, [wipe])
    with pytest.raises(MalformedCallError, match=r"wipe in turn 0 .*\"arguments\" object.*1 more") as caught:
        await agent.invoke_async("Clean up.")
    error = caught.value
    assert [(c.name, c.raw) for c in error.calls] == [("wipe", BROKEN["a list"]), ("wipe", BROKEN["nothing"])]
    assert [message["role"] for message in agent.messages] == ["user"]
    [turn] = model.ledger
    assert error.turn == turn.index == 0
    assert model.trajectory.loss_mask.sum() == len(turn.draft.output_ids)
    check_ledger(model.ledger)
    agent.messages.append(error.message)
    await agent.invoke_async("Well?")
    assert [turn.parent for turn in model.ledger] == [None, 0]
    check_ledger(model.ledger)


def test_another_setting_and_a_tool_with_the_reserved_name_are_refused() -> None:
    with pytest.raises(ValueError, match=r"malformed_calls .*'feedback'.*'repair'"):
        model_of("vllm", Says(""), malformed_calls="repair")

    @tool(name=MALFORMED_CALL)
    def taken() -> None:
        """Nothing."""

    with pytest.raises(ValueError, match=f"{MALFORMED_CALL}.*Rename"):
        agent_of(model_of("vllm", Says("")), [taken])("Hi.")
