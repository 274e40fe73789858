"""The first delta of each shape is compared with the plain rendering before anything is sent (law 7)."""

from __future__ import annotations

from collections import Counter
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strands import Agent, tool

from support.budget import examples
from support.byte_level import CHATML_TOOLS, byte_level
from support.conversations import HOSTILE, LOOK, conversations
from support.families import TEMPLATE_FAMILIES
from support.scripted import Says, backend_of, call, engine_of, tokenizer
from support.templates import NAMES, template_of
from tito_core import Policy, TITOModel
from tito_core.chat.comparison import (
    MAX_COMPARED_TOKENS,
    TOKENS_PER_COMPARED_TOKEN,
    Comparisons,
    _text_before_delta,
    delta_shape,
)
from tito_core.chat.messages import MALFORMED_CALL
from tito_core.chat.referee import RefusedError
from tito_core.chat.template import ChatTemplate
from tito_core.ledger import LawViolationError

BEGINS = "{{- 'Loud:' if (messages|selectattr('role', 'eq', 'user')|first).content|length == 5 -}}"
ACCENT = "{%- for m in messages[:-2] if m.role == 'tool' and m.content|length == 8 -%}{{- 'Accent:' -}}{%- endfor -%}"


@tool
def look(at: str) -> str:
    """Look at a place.

    Args:
        at: Where.
    """
    return f"It is {at}."


@dataclass
class Rollout:
    model: TITOModel
    says: Says
    agent: Agent


def rollout(ending: str, *answers: str, messages: Any = None) -> Rollout:
    """Start a rollout under SmolLM2's tool template with `ending` appended to the template."""
    made = copy(tokenizer())
    made.chat_template += ending
    says = Says(*answers)
    policy = Policy.connect(backend=backend_of(engine_of("vllm", says), "vllm"), tokenizer=made)
    model = policy.model()
    agent = Agent(model=model, tools=[look], messages=messages, system_prompt="Be brief.", callback_handler=None)
    return Rollout(model, says, agent)


def talked(count: int) -> Any:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": [{"text": f"Text {i}."}]} for i in range(count)]


async def test_a_difference_that_no_probe_covers_is_caught_before_sending() -> None:
    run = rollout(ACCENT, call("look", '{"at": "é"}'), "So.")
    await run.agent.invoke_async("Why?")
    held = list(run.agent.messages)
    for _ in range(2):  # it is due again after a failure
        with pytest.raises(LawViolationError, match=r"(?s)Accent:.*Use another chat template") as caught:
            await run.agent.invoke_async("And?")
        assert caught.value.law == 7
        assert (len(run.says.requests), len(run.model.ledger)) == (2, 2)
        run.agent.messages[:] = held


async def test_the_same_turns_are_sent_with_a_consistent_template() -> None:
    run = rollout("", call("look", '{"at": "é"}'), "So.", "So.", messages=talked(28))
    for question in ("!Why?", "And?"):
        await run.agent.invoke_async(question)
    assert len(run.says.requests) == len(run.model.ledger) == 3


async def test_the_first_delta_of_every_path_is_compared_also_when_it_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tito_core.chat.comparison.MAX_COMPARED_TOKENS", 1)
    run = rollout(BEGINS, *["So."] * 4)
    for question in ("Why?", "And?"):  # a harmless rollout
        await run.agent.invoke_async(question)
    agent = Agent(model=run.model.policy.model(), system_prompt="Be brief.", callback_handler=None)
    await agent.invoke_async("!Why?")
    with pytest.raises(LawViolationError, match="do not train on it"):
        await agent.invoke_async("And?")
    assert len(run.says.requests) == 3


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(0, 5000)), max_size=60))
def test_sampled_comparisons_render_a_quarter_of_the_new_tokens_at_most(turns: list[tuple[int, int]]) -> None:
    """A turn adds tokens to a prompt of any length, as in many rollouts of one policy."""
    made, added, rendered = fresh(), 0, 0
    for new, before in turns:
        length = MAX_COMPARED_TOKENS + before + new
        added += new
        due = made.comparison(talked(3), 2, None, None, length, added=new)
        rendered += length if due is not None else 0
    assert rendered * TOKENS_PER_COMPARED_TOKEN <= added


def test_the_sample_falls_on_every_turn_of_a_conversation_sooner_or_later() -> None:
    made, rollouts, turns = fresh(), 300, 7
    compared: Counter[int] = Counter()
    for _ in range(rollouts):
        for turn in range(turns):
            new = 2000 if turn == 0 else 100
            length = 10_000 + 100 * turn
            compared[turn] += made.comparison(talked(3), 2, None, None, length, added=new) is not None
    assert set(compared) == set(range(turns))
    assert all(compared.values())
    assert 14 <= sum(compared.values()) <= rollouts * 2600 // 40_000  # 19 would use up all new tokens


FAILS = "{%- set ns = namespace(bad=0) -%}{%- for m in messages -%}{%- if m.role == 'tool' -%}" + (
    "{%- set ns.bad = ns.bad + 1 if m.content|length > 20 else 0 -%}{%- endif -%}{%- endfor -%}"
    "{{- 'Stop trying. ' if ns.bad >= 2 and messages[-1].role == 'tool' -}}"
)
"""After two long results in a row, which no literal shows, the generation prompt differs."""


async def test_a_counter_that_no_probe_finds_is_caught_by_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tito_core.chat.comparison.MAX_COMPARED_TOKENS", 1)  # as in a process that saw all shapes
    look_twice = [call("look", '{"at": "%s"}' % ("x" * 30))] * 2
    run = rollout(FAILS, *[*look_twice, "So."] * 40)
    for _ in range(40):
        agent = Agent(model=run.model.policy.model(), tools=[look], system_prompt="Be brief.", callback_handler=None)
        try:
            await agent.invoke_async("Why?")
        except Exception as error:
            cause = error.__cause__ if error.__cause__ is not None else error
            assert isinstance(cause, LawViolationError)
            break
    assert 3 < len(run.says.requests) < 115  # some rollouts passed before
    leftover = Agent(model=run.model.policy.model(), callback_handler=None)
    await leftover.invoke_async("Why?")  # takes the answer that the failed rollout left
    again = Agent(model=run.model.policy.model(), tools=[look], system_prompt="Be brief.", callback_handler=None)
    sent = len(run.says.requests)
    with pytest.raises(Exception, match="Law 7"):  # from now on every turn is compared
        await again.invoke_async("Why?")
    assert len(run.says.requests) == sent + 2


@cache
def template(ending: str = "") -> ChatTemplate:
    return ChatTemplate.of(byte_level(template=CHATML_TOOLS + ending))


def fresh(ending: str = "") -> ChatTemplate:
    """Return a template without remembered comparisons."""
    return fresh_of(template(ending))


def fresh_of(made: ChatTemplate) -> ChatTemplate:
    return replace(made, _comparisons=Comparisons(made._comparisons._referee, made.certificate))


def places(messages: Any) -> list[tuple[Any, int]]:
    """Return the history of each request of a conversation, with the number of messages before its delta."""
    ends = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    return [
        (messages[:end], before + 1 if i else 0)
        for i, (before, end) in enumerate(zip([0, *ends], [*ends, len(messages)], strict=True))
    ]


@settings(max_examples=13)
@given(conversations(), st.sampled_from([None, "Be brief."]), st.booleans())
def test_a_right_delta_is_compared_once_per_shape(messages: Any, system: str | None, shows_tools: bool) -> None:
    made, tools = fresh(), [LOOK] if shows_tools else None
    seen = set()
    for history, answered in places(messages):
        shape = delta_shape(history, answered, system, tools)
        compare = made.comparison(history, answered, system, tools, 10)
        assert (compare is None) == (shape in seen)
        if compare is not None:
            compare()
            seen.add(shape)
        assert made.comparison(history, answered, system, tools, 10) is None


@pytest.mark.parametrize("name", ["byte level", "qwen3-tiny", "numbers all results"])
def test_no_content_fails_the_comparison_of_a_right_delta(name: str) -> None:
    made = template_of(name) if name in NAMES else ChatTemplate.of(TEMPLATE_FAMILIES[name].tokenizer())

    @settings(max_examples=examples(15))
    @given(conversations(HOSTILE))
    def check(messages: Any) -> None:
        used = fresh_of(made)
        for history, answered in places(messages):
            compare = used.comparison(history, answered, None, [LOOK], 10)
            if compare is not None:
                compare()

    check()


def test_concurrent_comparisons_of_one_shape_all_run() -> None:
    made = fresh()
    one, other = (made.comparison(talked(3), 2, None, None, 10) for _ in range(2))
    assert one is not None
    assert other is not None
    one()
    other()
    assert made.comparison(talked(3), 2, None, None, 10) is None


def test_a_wrong_delta_stays_due() -> None:
    made = fresh("{{- 'Loud:' if messages[0].content|length == 7 -}}")
    for _ in range(2):
        compare = made.comparison(talked(3), 2, None, None, 10)
        assert compare is not None
        with pytest.raises(LawViolationError) as caught:
            compare()
        assert caught.value.law == 7
        assert "Loud:" in str(caught.value)
    first = made.comparison(talked(3), 0, None, None, 10)
    assert first is not None
    first()  # a first prompt is the whole rendering


def test_the_text_that_was_encoded_is_compared() -> None:
    made = fresh()
    encoded = made.delta(talked(3)[1], talked(3)[2:], None, tool_specs=[], history=talked(3)[:1])
    assert encoded.text is not None
    for text, right in ((encoded.text, True), (encoded.text.replace("\n", " \n", 1), False)):
        compare = fresh().comparison(talked(3), 2, None, None, 10, rendered=text)
        assert compare is not None
        if right:
            compare()
        else:
            with pytest.raises(LawViolationError, match="differ from the chat template's own rendering"):
                compare()


def test_only_shapes_of_short_conversations_are_compared() -> None:
    made = fresh()
    assert made.comparison(talked(3), 2, None, None, MAX_COMPARED_TOKENS + 1) is None
    assert made.comparison(talked(3), 2, None, None, MAX_COMPARED_TOKENS) is not None


@pytest.mark.parametrize("where", [1, 3])
def test_a_malformed_call_is_not_compared(where: int) -> None:
    made, messages = fresh(), talked(5)
    use = {"toolUseId": "call_0", "name": MALFORMED_CALL, "input": {}}
    messages[where]["content"] = [{"toolUse": use}]
    assert made.comparison(messages, 4, None, None, 10) is None
    use["name"] = "look"
    assert made.comparison(messages, 4, None, None, 10) is not None


def test_a_history_that_the_template_refuses_as_a_whole_is_compared_with_nothing() -> None:
    made = fresh("{{- raise_exception('too many') if messages|length > 20 -}}")
    compare = made.comparison(talked(25), 24, None, None, 10)
    assert compare is not None
    compare()
    assert made.comparison(talked(25), 24, None, None, 10) is not None
    with pytest.raises(RefusedError, match="too many"):
        made._comparisons._referee.render(talked(25), None, None)


@given(conversations(), conversations(), st.booleans())
def test_a_shape_is_of_kinds_and_not_of_content(messages: Any, others: Any, opened: bool) -> None:
    system, tools = ("Be brief.", [LOOK]) if opened else (None, None)
    for history, answered in places(messages):
        shape = delta_shape(history, answered, system, tools)
        changed: Any = [
            {
                "role": m["role"],
                "content": [{key: f"{value}!" for key, value in block.items()} for block in m["content"]],
            }
            for m in history
        ]
        assert delta_shape(changed, answered, system, tools) == shape
        assert delta_shape(history, answered, "!" if system else "Be kind.", tools) != shape
        assert delta_shape(history, answered, None if system else "Be brief.", tools) != shape
        assert delta_shape(history, answered, system, None if tools else [LOOK]) != shape
        if answered:
            kinds = [next(iter(block)) for block in history[-1]["content"]]
            more = [*history[:-1], {"role": "user", "content": [*history[-1]["content"], {"text": "!"}]}]
            assert delta_shape(more, answered, system, tools) != shape, kinds


def shown(*results: Any) -> Any:
    blocks = [{"toolResult": {"toolUseId": f"call_{i}", "content": items}} for i, items in enumerate(results)]
    return {"role": "user", "content": blocks}


PICTURE: Any = {"image": {"format": "png", "source": {"bytes": b""}}}


@pytest.mark.parametrize(
    ("last", "kinds"),
    [
        ({"role": "user", "content": []}, ("user",)),
        (shown([{"text": "a"}]), ("user", "toolResult")),
        (shown([{"text": "a"}, PICTURE]), ("user", "toolResult with 1 images")),
        (shown([PICTURE, PICTURE], []), ("user", "toolResult with 2 images", "toolResult")),
        ({"role": "user", "content": [{"text": "a"}, PICTURE]}, ("user", "text", "image")),
        ({"role": "assistant", "content": [{"toolUse": {"name": "look"}}]}, ("assistant", "toolUse")),
    ],
)
def test_a_shape_names_the_kind_of_each_block_and_counts_the_images_of_results(last: Any, kinds: Any) -> None:
    assert delta_shape([last], 0, None, None) == (None, (), kinds)
    assert delta_shape([last, last], 1, "Be brief.", [LOOK]) == ("Be brief.", (LOOK["name"],), 1, 0, kinds, kinds)


@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_a_shape_counts_the_messages_of_results_before_the_parent_turn(rounds: int) -> None:
    question, answer = talked(2)
    early = [part for _ in range(rounds) for part in (answer, shown([{"text": "a"}], [{"text": "b"}]))]
    history = [question, *early, answer, shown([{"text": "c"}])]
    answered = len(history) - 1
    assert delta_shape(history, answered, None, None)[2:4] == (answered, rounds)


@pytest.mark.parametrize(
    ("message", "whole", "found", "before"),
    [
        ({"role": "user", "content": [{"text": " a "}]}, "a: x", "x", True),
        ({"role": "user", "content": [{"text": " a "}]}, "x: a", "a", False),
        ({"role": "user", "content": [{"text": "a"}]}, "x", "x", False),  # shown nowhere: other checks' business
        (shown([{"text": "a"}]), "a: x", "x", True),
        (shown([{"text": "x"}, {"text": "a"}]), "a: x", "x", True),
        (shown([{"text": "x"}, PICTURE]), "a: x", "x", False),
    ],
)
def test_a_new_text_that_is_shown_before_the_delta_only_is_found(
    message: Any, whole: str, found: str, before: bool
) -> None:
    assert _text_before_delta([message], whole, found) is before
