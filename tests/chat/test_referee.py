"""The referee renders whole conversations as transformers does, with its own conversion."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from functools import cache
from itertools import product
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support import structures
from support.budget import examples
from support.byte_level import CHATML_TOOLS, byte_level
from support.families import TEMPLATE_FAMILIES
from support.plain_template import Plain
from support.random_chats import Reading, Writer
from support.templates import tokenizer_of
from tito_core.chat.referee import Conversion, Referee, RefusedError

TEXT = "{{- header(message.role) + message.content -}}"
PARTS = "{{- header(message.role) -}}{%- for p in message.content -%}{{- p.text -}}{%- endfor -%}"
RESULT = "'\n<tool_response>\n' + message.content +"
JSON = "{{- call.function.arguments | tojson + '}</tool_call>' -}}"


@cache
def tokenizer(name: str) -> Any:
    if name in TEMPLATE_FAMILIES:
        return TEMPLATE_FAMILIES[name].tokenizer()
    return structures.tokenizer(name) if name in structures.STRUCTURES else tokenizer_of(name)


def referee(made: Any, now: Callable[[], datetime] = datetime.now, **arguments: Any) -> Referee:
    return Referee(made.chat_template, {**made.special_tokens_map, **arguments}, now)


TEMPLATES = ["byte level", "smollm2", "qwen3-tiny", "numbers all results", "cohere-like", "phi-like", "mistral-like"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_rendering_is_that_of_apply_chat_template(name: str) -> None:
    made, judge = tokenizer(name), referee(tokenizer(name))
    plain: Any = Plain(made)

    @settings(deadline=None, max_examples=examples(25))
    @given(st.randoms(use_true_random=False), st.integers(0, 3), st.booleans())
    def check(random: Random, turns: int, prompt: bool) -> None:
        chat = Writer(random, plain.reading, cuts=0).chat(turns)
        expected = plain.render(chat.openai(turns, plain.reading), chat.openai_tools(), prompt)
        tools, system = chat.strands_tools() or None, chat.system or None
        assert judge.render(chat.strands(turns), system, tools, generation_prompt=prompt) == expected

    check()


def demanding(parts: bool, json_arguments: bool, short_ids: bool, either: bool) -> str:
    """Return a template that shows nothing, or raises, unless its requirement holds."""
    source = CHATML_TOOLS
    if parts:
        shown = PARTS.removeprefix("{{- header(message.role) -}}")
        source = source.replace(TEXT, PARTS).replace("message.content or not loop.first", "not loop.first")
        source = source.replace(
            "{{- " + RESULT + " '\n</tool_response>' -}}",
            "{{- '\n<tool_response>\n' -}}" + shown + "{{- '\n</tool_response>' -}}",
        )
    if json_arguments:
        source = source.replace(JSON, "{{- call.function.arguments + '}</tool_call>' -}}")
    raises = "{{- raise_exception('no') if message.tool_calls and %s -}}{%%- if message.role"
    if short_ids:
        source = source.replace("{%- if message.role", raises % "message.tool_calls[0].id|length != 9")
        source = source.replace(
            "{{- '\n<tool_response>",
            "{{- raise_exception('no') if message.tool_call_id|length != 9 -}}{{- '\n<tool_response>",
        )
    if either:
        text = "(message.content[0].text if message.content is not string else message.content)"
        source = source.replace("{%- if message.role", raises % f"{text} and message.thinking")
        source = source.replace("{%- for call in", "{{- message.thinking or '' -}}{%- for call in")
    assert source.count("raise_exception") == 2 * short_ids + either
    assert source.count("p.text") == 2 * parts
    return source


@pytest.mark.parametrize(
    "flags", list(product((False, True), repeat=4)), ids=lambda flags: "".join("ny"[f] for f in flags)
)
def test_the_conversion_is_the_default_unless_the_template_requires_another(flags: tuple[bool, ...]) -> None:
    made = byte_level(template=demanding(*flags))
    judge = referee(made)
    assert judge.conversion == Conversion(*flags)
    parts, json_arguments, _, _ = flags
    reading = Reading(parts=parts, arguments="string" if json_arguments else "mapping", reasoning=None)

    @settings(deadline=None, max_examples=examples(5))
    @given(st.randoms(use_true_random=False), st.integers(0, 3))
    def check(random: Random, turns: int) -> None:
        chat = Writer(random, reading, cuts=0).chat(turns)
        expected = Plain(made).render(chat.openai(turns, reading), chat.openai_tools(), True)
        assert judge.render(chat.strands(turns), chat.system or None, chat.strands_tools() or None) == expected

    check()


def use(identity: str, name: str = "look") -> Any:
    return {"toolUse": {"toolUseId": identity, "name": name, "input": {}}}


def result(identity: str, text: str) -> Any:
    return {"toolResult": {"toolUseId": identity, "status": "success", "content": [{"text": text}]}}


def tool_messages(*blocks: Any, calls: tuple[str, ...] = ("a", "b"), conversion: Conversion = Conversion()) -> Any:  # noqa: B008
    history = [
        {"role": "assistant", "content": [use(identity, f"tool {identity}") for identity in calls]},
        {"role": "user", "content": list(blocks)},
    ]
    return conversion.messages(history, None)[1:]


@given(st.permutations(["a", "b", "c"]))
def test_results_come_in_the_order_of_their_calls(order: list[str]) -> None:
    written = tool_messages(*(result(identity, identity * 2) for identity in order), calls=("a", "b", "c"))
    assert [(m["tool_call_id"], m["name"], m["content"]) for m in written] == [
        ("a", "tool a", "aa"),
        ("b", "tool b", "bb"),
        ("c", "tool c", "cc"),
    ]


def test_a_result_of_an_unknown_call_comes_last_without_a_name() -> None:
    written = tool_messages(result("z", "zz"), result("b", "bb"), result("y", "yy"), result("a", "aa"))
    assert [(m["tool_call_id"], m["name"]) for m in written] == [("a", "tool a"), ("b", "tool b"), ("z", ""), ("y", "")]


def test_text_comes_after_the_results_and_in_one_message() -> None:
    written = tool_messages({"text": "x"}, result("b", "bb"), {"text": "y"}, result("a", "aa"))
    assert [(m["role"], m["content"]) for m in written] == [("tool", "aa"), ("tool", "bb"), ("user", "x\ny")]
    assert tool_messages({"text": ""}) == [{"role": "user", "content": ""}]
    shown = result("a", "x")
    shown["toolResult"]["content"].append({"json": {"é": ["y", None]}})
    assert tool_messages(shown)[0]["content"] == 'x\n{"é": ["y", null]}'


@given(st.text(max_size=12), st.from_regex(r"\A[a-zA-Z0-9]{9}\Z"))
def test_ids_have_nine_letters_or_digits_if_required(identity: str, short: str) -> None:
    conversion = Conversion(short_ids=True)
    [made] = tool_messages(result(identity, ""), calls=(identity,), conversion=conversion)
    [call] = conversion.messages([{"role": "assistant", "content": [use(identity)]}], None)[0]["tool_calls"]
    assert re.fullmatch(r"[a-zA-Z0-9]{9}", made["tool_call_id"])
    assert made["tool_call_id"] == call["id"]
    assert tool_messages(result(short, ""), calls=(short,), conversion=conversion)[0]["tool_call_id"] == short
    assert tool_messages(result(identity, ""), calls=(identity,))[0]["tool_call_id"] == identity


def test_a_sampled_id_is_rendered_without_ours() -> None:
    ours = "call_0123abcd_7.functions.look:0"
    [call] = Conversion().messages([{"role": "assistant", "content": [use(ours)]}], None)[0]["tool_calls"]
    assert call["id"] == "functions.look:0"
    assert tool_messages(result(ours, ""), calls=(ours,))[0]["tool_call_id"] == "functions.look:0"


def test_calls_have_text_or_reasoning_if_both_are_refused() -> None:
    thought = {"reasoningContent": {"reasoningText": {"text": "h"}}}
    conversion = Conversion(text_or_reasoning=True)

    def keys(*blocks: Any) -> set[str]:
        [answer] = conversion.messages([{"role": "assistant", "content": list(blocks)}], None)
        return {key for key in ("reasoning_content", "thinking", "reasoning") if key in answer}

    everywhere = {"reasoning_content", "thinking", "reasoning"}
    assert keys(thought, {"text": "t"}, use("a")) == set()
    assert (
        keys(thought, use("a")) == keys(thought, {"text": ""}, use("a")) == keys(thought, {"text": "t"}) == everywhere
    )
    assert keys({"text": "t"}, use("a")) == set()


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('never') }}",
        "{{ nobody.x.y }}",
        "{{ 1 // 0 }}",
        "{{ messages[99].role.x }}",
        "{{ ''.__class__.x }}",
    ],
)
def test_any_exception_of_a_template_is_a_refusal(source: str) -> None:
    judge = referee(byte_level(template=CHATML_TOOLS + source))
    with pytest.raises(RefusedError) as refused:
        judge.render([{"role": "user", "content": [{"text": "a"}]}], None, None)
    assert str(refused.value).startswith(f"{type(refused.value.__cause__).__name__}: ")


def test_the_time_is_the_given_one() -> None:
    made = byte_level(template="{{ strftime_now('%d %b %Y') }}|{{ today }}|" + CHATML_TOOLS)
    days = [datetime(2001, 2, 3)]
    judge = referee(made, lambda: days[0], today="a Friday")
    question = [{"role": "user", "content": [{"text": "a"}]}]
    assert judge.render(question, None, None).startswith("03 Feb 2001|a Friday|")
    days[0] = datetime(2012, 11, 10)
    assert judge.render(question, None, None).startswith("10 Nov 2012|")
