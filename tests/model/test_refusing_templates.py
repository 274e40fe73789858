"""Templates that refuse what agents do: nothing that the policy samples ends a rollout in an error (laws 7 to 9)."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strands import Agent, tool
from strands.types.exceptions import MaxTokensReachedException

from support.budget import examples
from support.byte_level import CHATML_TOOLS
from support.scripted import Says, call, ids_of, model_of, tokenizer, with_parts
from tito_core import TITOModel
from tito_core.chat.template import ChatTemplate, TemplateError
from tito_core.hooks import LoopLimiter, LoopLimitReachedError
from tito_core.ledger import check_ledger
from tito_core.termination import Termination, termination_of

EACH = "{% for m in messages %}{% if ? %}{{ raise_exception('refused') }}{% endif %}{% endfor %}"
ROLES = "(loop.previtem or m).role"
REFUSING = {
    "a second call": EACH.replace("?", "m.tool_calls and m.tool_calls|length > 1"),
    "a question after a question or a result": EACH.replace(
        "?", f"m.role == 'user' and not loop.first and {ROLES} in 'user tool'"
    ),
    "results in a row": EACH.replace("?", f"m.role == 'tool' == {ROLES}"),
    "an answer that spells a header": EACH.replace("?", "m.role == 'assistant' and '<|header|>' in m.content"),
}
ONE = "a second call"
OK, BROKEN = call("look", '{"at": "it"}'), '<tool_call>{"name": "look"</tool_call>'
ran: list[str] = []


@tool
def look(at: str) -> str:
    """Look at a place.

    Args:
        at: Where.
    """
    ran.append(at)
    return "seen"


@cache
def template_of(head: str, body: str = CHATML_TOOLS) -> ChatTemplate:
    refusing = deepcopy(tokenizer())
    refusing.chat_template = head + body
    return ChatTemplate.of(refusing)


def model_over(template: ChatTemplate, *answers: Any, kind: str = "vllm", **options: Any) -> TITOModel:
    ran.clear()
    return with_parts(model_of(kind, Says(*answers), **options), template=template)


def agent_of(model: TITOModel, **options: Any) -> Agent:
    return Agent(model=model, tools=[look], callback_handler=None, **options)


def prompt_of(model: TITOModel, turn: int) -> str:
    return str(tokenizer().decode(model.ledger[turn].draft.prompt_ids))


@settings(deadline=None, max_examples=examples(60))
@given(
    st.sampled_from(list(REFUSING)),
    st.lists(st.sampled_from([OK, BROKEN]), max_size=3),
    st.sampled_from(["", "So.", "A <|header|>."]),
)
def test_every_answer_goes_on_and_so_does_every_edited_history(refused: str, calls: list[str], said: str) -> None:
    model = model_over(template_of(REFUSING[refused]), said + "".join(calls), *["Done."] * 3)
    agent = agent_of(model)
    agent("Look.")
    runs = calls[:1] if refused == ONE else calls
    assert ran == ["it"] * runs.count(OK)
    agent("And now?")
    assert model.ledger[len(model.ledger) - 1].parent is not None
    agent.messages[0]["content"] = [{"text": "Look again."}]
    agent("And now?")
    assert model.ledger[len(model.ledger) - 1].parent is None
    check_ledger(model.ledger)


async def test_of_several_calls_the_first_runs_and_the_policy_reads_why_the_others_did_not() -> None:
    model = model_over(template_of(REFUSING[ONE]), OK + OK + BROKEN, "Done.", kind="vllm")
    await agent_of(model, hooks=[LoopLimiter(max_parallel_tool_calls=1)]).invoke_async("Look.")
    assert ran == ["it"]
    assert [record.status for record in model.ledger[0].draft.calls] == ["ok", "malformed", "malformed"]
    read = prompt_of(model, 1)
    assert read.index("seen") < read.index("tool call 2 of 3 to look was malformed and was not executed. The chat")
    assert "shows one call in an answer. Make the next call after its result." in read
    assert "tool call 3 of 3" in read
    assert read.count("tool_call>") == 4  # of the two feedbacks that quote a call, none rendered again


async def test_calls_of_an_answer_that_was_cut_off_stay_as_they_are() -> None:
    ids = ids_of(OK + OK + "<tool_call>")
    model = model_over(template_of(REFUSING[ONE]), ids, sampling={"max_new_tokens": len(ids)}, malformed_calls="raise")
    with pytest.raises(MaxTokensReachedException):
        await agent_of(model).invoke_async("Look.")
    assert [record.status for record in model.ledger[0].draft.calls] == ["ok", "ok", "truncated"]


async def test_a_question_follows_a_failed_request_or_a_limit_under_strict_alternation() -> None:
    model = model_over(template_of(REFUSING["a question after a question or a result"]), OK, "Done.")
    limiter = LoopLimiter(max_tool_iters=1)
    agent = agent_of(model, hooks=[limiter], messages=[{"role": "user", "content": [{"text": "Who failed?"}]}])
    with pytest.raises(LoopLimitReachedError):
        await agent.invoke_async("Look.")
    limiter.reset()
    await agent.invoke_async("Are you there?")
    assert "Who failed?\n\nLook.<|im_end|>" in prompt_of(model, 0)
    assert "seen\n\nAre you there?\n</tool_response>" in prompt_of(model, 1)
    assert model.ledger[1].parent == 0


async def test_where_no_result_can_be_shown_no_tool_runs() -> None:
    plain = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    prompt = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    only_text = EACH.replace("?", "m.role == 'tool'")
    model = model_over(template_of(only_text, plain + prompt), OK, "Done.")
    with pytest.raises(TemplateError, match="so no tool ran") as caught:
        await agent_of(model).invoke_async("Look.")
    assert (ran, len(model.ledger)) == ([], 1)
    assert termination_of(caught.value, model.ledger) is Termination.TEMPLATE
