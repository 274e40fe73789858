"""The tool template that we wrote for SmolLM2: what it shows, and that it never rewrites the past."""

from __future__ import annotations

import json
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from tito_engines.models import load_tokenizer

Message = dict[str, Any]
_TOKENIZER: list[PreTrainedTokenizerBase] = []


def _tool(name: str = "calculator") -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
    return {
        "type": "function",
        "function": {"name": name, "description": "Works <b>it</b> out.", "parameters": parameters},
    }


def _render(messages: list[Message], *, tools: list[dict[str, Any]] | None = None, generate: bool = False) -> str:
    if not _TOKENIZER:
        _TOKENIZER.append(load_tokenizer("smollm2"))
    text = _TOKENIZER[0].apply_chat_template(messages, tools=tools, add_generation_prompt=generate, tokenize=False)
    assert isinstance(text, str)
    return text


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _asks(*expressions: str, content: str = "") -> Message:
    calls = [
        {"type": "function", "function": {"name": "calculator", "arguments": {"expression": e}}} for e in expressions
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def _result(text: str) -> Message:
    return {"role": "tool", "content": text}


def test_without_tools_it_is_the_models_own_format() -> None:
    assert _render([_user("Hi")], generate=True) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_tools_are_shown_as_json_lines() -> None:
    tools = [_tool("calculator"), _tool("abacus")]
    text = _render([{"role": "system", "content": "Be brief."}, _user("Hi")], tools=tools)
    assert text.startswith("<|im_start|>system\nBe brief.\n\n")
    shown = text.split("<tools>\n")[1].split("\n</tools>")[0].splitlines()
    assert [json.loads(line) for line in shown] == [tool["function"] for tool in tools]


@pytest.mark.parametrize(("name", "examples"), [("calculator", 4), ("abacus", 0)])
def test_worked_examples_are_valid_calls_and_come_with_a_calculator(name: str, examples: int) -> None:
    text = _render([_user("Hi")], tools=[_tool(name)])
    turns = [turn.removesuffix("<|im_end|>\n") for turn in text.split("<|im_start|>")]
    answers = [turn.removeprefix("assistant\n") for turn in turns if turn.startswith("assistant\n")]
    calls = [answer for answer in answers if answer.startswith("<tool_call>")]
    assert len(calls) == examples
    for call in calls:
        made = json.loads(call.removeprefix("<tool_call>").removesuffix("</tool_call>"))
        assert made["name"] == "calculator"
        assert list(made["arguments"]) == ["expression"]


def test_an_answer_is_its_content_and_then_its_calls() -> None:
    text = _render([_user("Hi"), _asks("1 + 1", "2 * 3", content="Let me see.")])
    assert text.endswith(
        "<|im_start|>assistant\nLet me see.\n"
        '<tool_call>{"name": "calculator", "arguments": {"expression": "1 + 1"}}</tool_call>\n'
        '<tool_call>{"name": "calculator", "arguments": {"expression": "2 * 3"}}</tool_call><|im_end|>\n'
    )


def test_arguments_may_be_json_text() -> None:
    call = _asks("x")
    call["tool_calls"][0]["function"]["arguments"] = '{"expression":  "x"}'
    assert '"arguments": {"expression":  "x"}}</tool_call><|im_end|>\n' in _render([_user("Hi"), call])


def test_consecutive_results_share_one_user_turn_in_order() -> None:
    text = _render([_user("Hi"), _asks("1", "2"), _result("one"), _result("two"), _user("And?")], generate=True)
    assert text.split("</tool_call><|im_end|>\n")[1] == (
        "<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>\n"
        "What is the answer?<|im_end|>\n"
        "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_content_may_be_text_parts() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert _render([parts]) == _render([_user("ab")])


_TEXT = st.text(max_size=30)
_ANSWER = st.one_of(
    _TEXT.map(lambda text: {"role": "assistant", "content": text}),
    st.builds(lambda content, *e: _asks(*e, content=content), _TEXT, _TEXT, _TEXT),
)
_NEW = st.one_of(
    _TEXT.map(lambda text: [_user(text)]),
    st.tuples(st.lists(_TEXT, min_size=1, max_size=3), st.lists(_TEXT, max_size=1)).map(
        lambda pair: [*map(_result, pair[0]), *map(_user, pair[1])]
    ),
)
_EXCHANGE = st.tuples(_NEW, _ANSWER).map(lambda pair: [*pair[0], pair[1]])


@given(
    history=st.lists(_EXCHANGE, min_size=1, max_size=3).map(lambda parts: [_user("First."), *chain(*parts)]),
    system=st.one_of(st.none(), _TEXT),
    with_tools=st.booleans(),
    new=_NEW,
)
@settings(deadline=None)
def test_a_delta_depends_on_the_new_messages_alone(
    history: list[Message], system: str | None, with_tools: bool, new: list[Message]
) -> None:
    tools = [_tool()] if with_tools else None
    messages = ([] if system is None else [{"role": "system", "content": system}]) + history
    before = _render(messages, tools=tools)
    after = _render([*messages, *new], tools=tools, generate=True)
    assert before.endswith("<|im_end|>\n")
    assert after.startswith(before)
    stand_in = [_user("Hi"), {"role": "assistant", "content": "x"}]
    whole = _render([*stand_in, *new], generate=True)
    assert after.removeprefix(before) == whole.removeprefix(_render(stand_in))
