"""The Qwen3 template and tokenizer on real servers: control tokens, grammars, content that spells control tokens."""

from __future__ import annotations

import re
from typing import Any

import pytest
from strands import Agent

from strands_tito.inspect.verify import rescore
from support.histories import add
from support.real import Served
from tito_conformance.agents import collect_answer
from tito_core.ledger import Provenance, check_ledger

pytestmark = pytest.mark.engine


@pytest.fixture
def served(tagged: Served) -> Served:
    return tagged


async def test_tokens_under_a_grammar_are_constrained_and_not_trained(served: Served) -> None:
    grammar = {"kind": "regex", "value": r"Sum: [0-9]{1,3}\n"}
    model = served.policy.model(sampling={"max_new_tokens": 128, "grammar": grammar})
    result = await Agent(model=model, tools=[add], callback_handler=None).invoke_async("Add something.")
    assert re.fullmatch(r"Sum: [0-9]{1,3}", str(result).strip())
    check_ledger(model.ledger)
    trajectory = model.trajectory
    assert trajectory.count(Provenance.CONSTRAINED) >= 4
    assert trajectory.count(Provenance.SAMPLED) == 0
    assert trajectory.loss_mask.sum() == 0
    assert model.ledger.trajectories(train_constrained=True)[0].loss_mask.sum() >= 4


async def test_re_scoring_confirms_random_ids(served: Served) -> None:
    model = served.model(max_new_tokens=64, ignore_eos=True)
    agent = Agent(model=model, tools=[add], callback_handler=None, system_prompt="Be brief. <|im_end|> <think>")
    for question in ("Hello <|im_start|>system", "And </tool_call> now?"):
        messages: Any = [*agent.messages, {"role": "user", "content": [{"text": question}]}]
        agent.messages = [
            *messages,
            (await collect_answer(model.stream(messages, system_prompt=agent.system_prompt))).message,
        ]
    check_ledger(model.ledger)
    rescored = await rescore(model.ledger, served.policy.backend)
    assert rescored.quantile(1) <= 1e-4
    assert len(rescored.differences) == 128


async def test_stripped_reasoning_starts_a_branch(served: Served) -> None:
    model = served.policy.model(sampling={"max_new_tokens": 24}, thinking="as-template")
    call = {"toolUseId": "call_0", "name": "add", "input": {"a": 1, "b": 2}}
    thought = {"reasoningContent": {"reasoningText": {"text": "Hmmm, one and two."}}}
    result: Any = {"toolUseId": "call_0", "status": "success", "content": [{"text": "3"}]}
    messages: Any = [
        {"role": "user", "content": [{"text": "Add one and two."}]},
        {"role": "assistant", "content": [thought, {"toolUse": call}]},
        {"role": "user", "content": [{"toolResult": result}]},
    ]
    state: dict[str, Any] = {}
    for question in ("Sure?", "Really?"):
        answer = await collect_answer(model.stream(messages, [add.tool_spec], model_state=state))
        content = answer.message["content"] or [{"text": "[blank text]"}]
        messages = [
            *messages,
            {"role": "assistant", "content": content},
            {"role": "user", "content": [{"text": question}]},
        ]
    first, second = (turn.draft for turn in model.ledger)
    prompts = [served.policy.tokenizer.decode(draft.prompt_ids) for draft in (first, second)]
    assert [("Hmmm" in prompt) for prompt in prompts] == [True, False]
    assert (first.parent, second.parent) == (None, None)
    assert str(second.branch) == "thinking stripped, from turn 0, at message 1"
    check_ledger(model.ledger)
    assert (await rescore(model.ledger, served.policy.backend)).quantile(1) <= 1e-4
