"""What a template is tried with to find its form: conversations that any template takes, each character traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from support.byte_level import CHATML_TOOLS
from support.conversations import translated
from tito_core.chat.environment import compile_template, render
from tito_core.chat.messages import REASONING_KEYS, MessageFormat, TemplateMessage
from tito_core.chat.rendering import find_message_format
from tito_core.chat.traced import Traced, sources

TEXT = "{{- header(message.role) + message.content -}}"
ARGUMENTS = "{{- call.function.arguments | tojson + '}</tool_call>' -}}"
PARTS = (
    "{{- header(message.role) -}}{%- for p in message.content if p.type == 'text' -%}{{- p['text'] -}}{%- endfor -%}"
)
THINKING = "{{- message.thinking or '' -}}"


def tried(source: str) -> tuple[MessageFormat, list[list[Any]]]:
    """Find a template's form, and give each conversation that it was asked to render."""
    compiled, asked = compile_template(source), []

    def shows(messages: Sequence[TemplateMessage]) -> Traced:
        assert {origin for message in messages for origin in sources(message)} <= {0, 1, 2}
        asked.append(translated(list(messages)))
        return render(compiled, {"messages": messages, "tools": None})

    return find_message_format(shows), asked


def call(arguments: Any, content: Any = "", **more: Any) -> dict[str, Any]:
    function = {"name": "look", "arguments": arguments}
    calls = [{"id": "call_1", "type": "function", "function": function}]
    return {"role": "assistant", "content": content, "tool_calls": calls, **more}


def taken(arguments: Any) -> list[Any]:
    """Give the round of tools that shows whether calls are taken at all."""
    return [ASKED, call(arguments), {"role": "tool", "tool_call_id": "call_1", "name": "look", "content": "seen"}]


ASKED: dict[str, Any] = {"role": "user", "content": "why"}
SO: dict[str, Any] = {"role": "assistant", "content": "so"}
AT = {"at": "it"}


def test_the_usual_form_is_tried_first() -> None:
    found, asked = tried(CHATML_TOOLS.replace(TEXT, THINKING + TEXT))
    assert found == MessageFormat("mapping", "thinking", both=True, parts=False)
    assert asked == [
        [ASKED],
        taken(AT),
        [ASKED, call({"at": "it's", "n": True})],
        [ASKED, {**SO, "reasoning_content": "hm"}],
        [ASKED, call(AT, reasoning_content="hm")],
        [ASKED, {**SO, "thinking": "hm"}],
        [ASKED, call(AT, "so")],
        [ASKED, call(AT, thinking="hm")],
        [ASKED, call(AT, "so", thinking="hm")],
    ]


def test_arguments_as_text_are_json() -> None:
    found, asked = tried(CHATML_TOOLS.replace(ARGUMENTS, "{{- call.function.arguments + '}' -}}"))
    assert found == MessageFormat("string", None, both=True, parts=False)
    assert asked[1:7] == [
        taken(AT),
        taken('{"at": "it"}'),
        [ASKED, call({"at": "it's", "n": True})],
        [ASKED, call('{"at": "it"}')],
        [ASKED, {**SO, "reasoning_content": "hm"}],
        [ASKED, call('{"at": "it"}', reasoning_content="hm")],
    ]
    assert len(asked) == 5 + 2 * len(REASONING_KEYS)


@pytest.mark.parametrize("arguments", ["mapping", "string"])
@pytest.mark.parametrize("reasoning", [None, "thinking"])
def test_parts_are_parts_whatever_else_a_template_reads(arguments: Any, reasoning: str | None) -> None:
    source = CHATML_TOOLS.replace(TEXT, (THINKING if reasoning else "") + PARTS)
    source = source.replace("'\\n' if message.content or not loop.first else ''", "'\\n'")
    if arguments == "string":
        source = source.replace(ARGUMENTS, "{{- call.function.arguments + '}' -}}")
    found, asked = tried(source)
    assert found == MessageFormat(arguments, reasoning, both=True, parts=True)
    assert asked[:2] == [[ASKED], [{"role": "user", "content": [{"type": "text", "text": "why"}]}]]
    assert all(type(message["content"]) is list for messages in asked[1:] for message in messages)


def test_a_template_that_shows_no_question_at_all_reads_the_usual_form() -> None:
    found, asked = tried("{{ messages[-1].tool_calls }}")
    assert (found.parts, found.reasoning) == (False, None)
    assert asked[:2] == [[ASKED], [{"role": "user", "content": [{"type": "text", "text": "why"}]}]]


def test_text_that_no_call_may_have_beside_it_says_nothing_of_reasoning() -> None:
    alone = "{{- raise_exception('alone') if message.tool_calls and message.content -}}"
    found, _ = tried(CHATML_TOOLS.replace(TEXT, alone + THINKING + TEXT))
    assert found == MessageFormat("mapping", "thinking", both=True, parts=False)
    unthought = "{{- raise_exception('unthought') if message.tool_calls and message.thinking -}}"
    found, _ = tried(CHATML_TOOLS.replace(TEXT, unthought + THINKING + TEXT))
    assert found == MessageFormat("mapping", "thinking", both=True, parts=False)


def test_reasoning_that_only_calls_show_is_found_with_arguments_as_text() -> None:
    shown = "{{- message.reasoning if message.tool_calls else '' -}}"
    source = CHATML_TOOLS.replace(TEXT, shown + TEXT)
    source = source.replace(ARGUMENTS, "{{- call.function.arguments + '}' -}}")
    assert tried(source)[0] == MessageFormat("string", "reasoning", both=True, parts=False)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("{{- call.function.arguments if call.function.arguments[0] == '{' else raise_exception('JSON') -}}", "string"),
        ("{{- call.function.arguments|string -}}", "string"),
        ("{{- call.function.arguments.items()|list|string -}}", "mapping"),
        ("{{- (call.function.arguments|string)[6:] -}}", "mapping"),
        ("{{- call.function.arguments|upper -}}", "mapping"),
        ("{{- call.function.arguments.n|tojson -}}", "mapping"),
    ],
)
def test_pythons_own_notation_for_a_mapping_is_no_form(arguments: str, expected: str) -> None:
    assert tried(CHATML_TOOLS.replace(ARGUMENTS, arguments))[0].arguments == expected
