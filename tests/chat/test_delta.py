"""The conversation that each candidate renders, and where its delta begins."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.byte_level import CHATML_TOOLS, byte_level
from tito_core.chat.delta import CANDIDATES, Candidate, DeltaSource
from tito_core.chat.encoder import ContentSafeEncoder
from tito_core.chat.ending import Opened, cut
from tito_core.chat.probes import FIND, assistant_message, call_message, result_message, user_message
from tito_core.chat.rendering import Rendering, TemplateError

TOKENIZER = byte_level()
PLAIN = (
    "{%- if tools -%}<t>{%- for tool in tools -%}{{- tool.function.name + ';' -}}{%- endfor -%}{%- endif -%}"
    "{%- for m in messages -%}<|im_start|>{{- m.role[0] + ':' -}}"
    "{%- if m.reasoning_content -%}<think>{{- m.reasoning_content -}}</think>{%- endif -%}{{- m.content -}}"
    "{%- for call in m.tool_calls or [] -%}<tool_call>{{- call.function.name -}}"
    "{{- call.function.arguments|tojson -}}</tool_call>"
    "{%- endfor -%}<|im_end|>\n{%- endfor -%}{%- if add_generation_prompt -%}<|im_start|>a:{%- endif -%}"
)
"""A small template that shows all its inputs."""
BY_NAME = {candidate.name: candidate for candidate in CANDIDATES}
BEFORE = {
    "after a question": "<|im_start|>u:.<|im_end|>",
    "after a system prompt and a question": "<|im_start|>s:.<|im_end|><|im_start|>u:.<|im_end|>",
    "after a question, with a tool": "<t>look;<|im_start|>u:.<|im_end|>",
    "after a system prompt and a question, with a tool": "<t>look;<|im_start|>s:.<|im_end|><|im_start|>u:.<|im_end|>",
    "after a round of tools, with a tool": '<t>look;<|im_start|>u:.<|im_end|><|im_start|>a:<tool_call>look{"at": "it"}'
    "</tool_call><|im_end|><|im_start|>t:seen<|im_end|><|im_start|>a:.<|im_end|><|im_start|>u:.<|im_end|>",
    "after a round of tools where there was one": "<|im_start|>u:.<|im_end|>",
    "after a question, with text before the calls": "<|im_start|>u:.<|im_end|>",
    "after a question, with the rollout's tools": "<t>find;<|im_start|>u:.<|im_end|>",
    "after messages like the rollout's own": "<|im_start|>u:.<|im_end|>",
    "after messages like the rollout's own, with a tool": "<t>look;<|im_start|>u:.<|im_end|>",
}
MIRRORING = [candidate for candidate in CANDIDATES if candidate.mirrors_history]


def source(candidate: Candidate, template: str = PLAIN) -> DeltaSource:
    return DeltaSource.of(Rendering.of(template, {}), ContentSafeEncoder(byte_level(template=template)), candidate)


def spelled(ids: Any) -> str:
    return "".join(TOKENIZER.decode([index]) for index in ids)


@pytest.mark.parametrize("name", BY_NAME)
def test_a_candidate_renders_a_small_conversation_around_the_turn(name: str) -> None:
    assert list(BEFORE) == list(BY_NAME)
    made = source(BY_NAME[name])
    turn = len(BY_NAME[name].before)
    history = [user_message("long " * 99)] if BY_NAME[name].mirrors_history else []
    tail = made.tail(assistant_message("long " * 99, "Hm."), [user_message("b")], [FIND], history)
    assert str.__str__(tail.text) == BEFORE[name] + "<|im_start|>a:.<|im_end|><|im_start|>u:b<|im_end|><|im_start|>a:"
    assert cut(tail.text, tail.start) == "<|im_start|>u:b<|im_end|><|im_start|>a:"
    assert [origin for *_, origin in cut(tail.text, tail.start).spans] == [turn + 1]
    assert spelled(token for *_, token in tail.controls) == "<|im_start|><|im_end|><|im_start|>"
    assert tail.controls[0][0] == tail.start
    assert tail.ending is made.answers
    tail = made.tail(call_message(("find", {"n": 1}), text="Long."), [result_message([{"text": "c"}])], [FIND], history)
    remark = BY_NAME[name].remark
    assert str.__str__(tail.text) == (
        f'{BEFORE[name]}<|im_start|>a:{remark}<tool_call>find{{"n": 1}}</tool_call><|im_end|>'
        "<|im_start|>t:c<|im_end|><|im_start|>a:"
    )
    assert cut(tail.text, tail.start) == "<|im_start|>t:c<|im_end|><|im_start|>a:"
    assert tail.ending is made.calls


def test_a_round_of_tools_is_rendered_where_there_was_one() -> None:
    made = source(BY_NAME["after a round of tools where there was one"])
    rounds = BEFORE["after a round of tools, with a tool"].removeprefix("<t>look;")
    for history, before in (
        ([user_message("a")], BEFORE["after a question"]),
        ([user_message("a"), call_message(("find", {})), result_message([])], rounds),
    ):
        tail = made.tail(assistant_message("x"), [user_message("b")], None, history)
        assert str.__str__(tail.text) == before + "<|im_start|>a:.<|im_end|><|im_start|>u:b<|im_end|><|im_start|>a:"


@pytest.mark.parametrize("candidate", MIRRORING, ids=lambda candidate: candidate.name)
def test_messages_like_the_rollouts_own_have_their_number_kinds_ids_and_names_and_no_more(candidate: Candidate) -> None:
    long = "long " * 99
    history = [
        user_message(long, " \n"),
        call_message(("find", {"n": 1}), ("look", {"at": long}), text=long, thought=long),
        result_message([{"text": long}], [{"json": {"a": long}}], text=long),
        assistant_message(long),
        user_message(""),
    ]
    tail = source(candidate).tail(assistant_message("x"), [user_message("b")], None, history)
    at = '{"at": "it"}'
    assert str.__str__(tail.text) == (
        ("<t>look;" if candidate.tools == "ours" else "")
        + "<|im_start|>u:.\n<|im_end|><|im_start|>a:<think>Hm</think>."
        + f"<tool_call>find{at}</tool_call><tool_call>look{at}</tool_call><|im_end|>"
        + "<|im_start|>t:.<|im_end|><|im_start|>t:.<|im_end|><|im_start|>u:.<|im_end|>"
        + "<|im_start|>a:.<|im_end|><|im_start|>u:<|im_end|><|im_start|>a:.<|im_end|>"
        + "<|im_start|>u:b<|im_end|><|im_start|>a:"
    )


@given(st.integers(0, 6), st.booleans())
def test_the_rollouts_own_ids_reach_a_template_that_writes_them(rounds: int, texts: bool) -> None:
    history = [user_message("a")]
    for i in range(rounds):
        history += [
            call_message(("look", {}), first=i),
            result_message([{"text": "b"}], text="c" if texts else "", first=i),
        ]
    made = source(MIRRORING[0], PLAIN.replace("{{- m.content -}}", "{{- m.tool_call_id -}}{{- m.content -}}"))
    tail = made.tail(assistant_message("x"), [user_message("b")], None, history)
    assert re.findall(r"call_(\d)", str.__str__(tail.text)) == [str(i) for i in range(rounds)]


@pytest.mark.parametrize("name", BY_NAME)
def test_how_turns_end_is_learned_in_the_candidates_surroundings(name: str) -> None:
    made = source(BY_NAME[name])
    assert made.calls is not None
    for ending in (made.answers, made.calls):
        assert spelled(ending.closing) == "<|im_end|>"
        assert {opened: spelled(ids) for opened, ids in ending.closers.items()} == {
            Opened.MESSAGE: "<|im_end|>",
            Opened.REASONING: "</think><|im_end|>",
            Opened.CALL: "</tool_call><|im_end|>",
        }


@pytest.mark.parametrize(
    ("name", "given", "lacks"),
    [
        ("after a question, with the rollout's tools", {"history": []}, "tool_specs"),
        ("after a round of tools where there was one", {"tools": []}, "history"),
        ("after messages like the rollout's own", {"tools": []}, "history"),
        ("after messages like the rollout's own, with a tool", {}, "history"),
    ],
)
def test_a_candidate_requires_its_inputs(name: str, given: dict[str, Any], lacks: str) -> None:
    made = source(BY_NAME[name])
    with pytest.raises(TemplateError, match=f"{name}: pass {lacks}="):
        made.tail(assistant_message("x"), [user_message("b")], **given)
    assert made.tail(assistant_message("x"), [user_message("b")], **{**given, "tools": [], "history": []}).start > 0


def test_a_turn_with_another_ending_is_refused_with_the_expected_tokens() -> None:
    otherwise = PLAIN.replace(
        "{%- endfor -%}<|im_end|>\n", "{%- endfor -%}{{- '' if messages[-1].content == 'no' else '<|im_end|>' -}}"
    )
    made = source(CANDIDATES[0], otherwise)
    assert made.tail(assistant_message("x"), [user_message("b")]).start > 0
    with pytest.raises(TemplateError, match=re.escape("does not end this answer with '<|im_end|>'")):
        made.tail(assistant_message("x"), [user_message("no")])


OPENS = (
    "{%- for m in messages -%}{{- {'user': '<|im_start|>', 'assistant': '<|im_end|>', 'tool': '<think>'}[m.role] -}}"
    "{{- m.content -}}{%- for call in m.tool_calls or [] -%}{{- call.function.name -}}</tool_call>{%- endfor -%}"
    "{%- endfor -%}{%- if add_generation_prompt -%}<|im_end|>{%- endif -%}"
)


def test_a_delta_after_a_turn_without_closers_starts_with_the_opener() -> None:
    made = source(CANDIDATES[0], OPENS)
    assert made.calls is not None
    assert (made.answers.closing, made.calls.closing) == ((), ())
    assert spelled(sorted(made.answers.openers)) == "<|im_start|><think>"
    assert (
        cut((tail := made.tail(assistant_message("x"), [user_message("b")])).text, tail.start)
        == "<|im_start|>b<|im_end|>"
    )
    tail = made.tail(call_message(("look", {})), [result_message([{"text": "c"}])])
    assert cut(tail.text, tail.start) == "<think>c<|im_end|>"
    never = OPENS.replace("'user': '<|im_start|>'", "'user': '<|im_start|>' if messages[-1].content != 'no' else ''")
    with pytest.raises(TemplateError, match=re.escape("does not end this answer with '<|im_start|>' '<think>'")):
        source(CANDIDATES[0], never).tail(assistant_message("x"), [user_message("no")])


def test_a_template_without_calls_has_answers_only() -> None:
    made = source(CANDIDATES[0], PLAIN.replace("m.tool_calls or []", "[]"))
    assert made.calls is None
    assert Opened.CALL not in made.answers.closers
    assert source(CANDIDATES[0], CHATML_TOOLS).calls is not None
