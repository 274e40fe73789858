"""The conversations that are rendered to find a template's message format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from support.byte_level import CHATML_TOOLS
from support.conversations import translated
from tito_core.chat.messages import REASONING_KEYS, MessageFormat, TemplateMessage
from tito_core.chat.rendering import compile_template, find_message_format, render
from tito_core.chat.traced import Traced, sources

TEXT = "{{- header(message.role) + message.content -}}"
ARGUMENTS = "{{- call.function.arguments | tojson + '}</tool_call>' -}}"
PARTS = (
    "{{- header(message.role) -}}{%- for p in message.content if p.type == 'text' -%}{{- p['text'] -}}{%- endfor -%}"
)
THINKING = "{{- message.thinking or '' -}}"


def probe(source: str) -> tuple[MessageFormat, list[list[Any]]]:
    """Return a template's message format and the conversations that were rendered to find it."""
    compiled, rendered = compile_template(source), []

    def shows(messages: Sequence[TemplateMessage]) -> Traced:
        assert {origin for message in messages for origin in sources(message)} <= {0, 1, 2}
        rendered.append(translated(list(messages)))
        return render(compiled, {"messages": messages, "tools": None})

    return find_message_format(shows), rendered


def call(arguments: Any, content: Any = "", **more: Any) -> dict[str, Any]:
    function = {"name": "look", "arguments": arguments}
    calls = [{"id": "call_1", "type": "function", "function": function}]
    return {"role": "assistant", "content": content, "tool_calls": calls, **more}


def tool_round(arguments: Any) -> list[Any]:
    """Return the round of tools that shows whether a template accepts calls."""
    return [QUESTION, call(arguments), {"role": "tool", "tool_call_id": "call_1", "name": "look", "content": "seen"}]


QUESTION: dict[str, Any] = {"role": "user", "content": "why"}
SO: dict[str, Any] = {"role": "assistant", "content": "so"}
AT = {"at": "it"}


def test_the_default_format_is_tried_first() -> None:
    found, rendered = probe(CHATML_TOOLS.replace(TEXT, THINKING + TEXT))
    assert found == MessageFormat("mapping", "thinking", text_and_reasoning=True, parts=False)
    assert rendered == [
        [QUESTION],
        tool_round(AT),
        [QUESTION, call({"at": "it's", "n": True})],
        [QUESTION, {**SO, "reasoning_content": "hm"}],
        [QUESTION, call(AT, reasoning_content="hm")],
        [QUESTION, {**SO, "thinking": "hm"}],
        [QUESTION, call(AT, "so")],
        [QUESTION, call(AT, thinking="hm")],
        [QUESTION, call(AT, "so", thinking="hm")],
    ]


def test_arguments_as_text_are_json() -> None:
    found, rendered = probe(CHATML_TOOLS.replace(ARGUMENTS, "{{- call.function.arguments + '}' -}}"))
    assert found == MessageFormat("string", None, text_and_reasoning=True, parts=False)
    assert rendered[1:7] == [
        tool_round(AT),
        tool_round('{"at": "it"}'),
        [QUESTION, call({"at": "it's", "n": True})],
        [QUESTION, call('{"at": "it"}')],
        [QUESTION, {**SO, "reasoning_content": "hm"}],
        [QUESTION, call('{"at": "it"}', reasoning_content="hm")],
    ]
    assert len(rendered) == 5 + 2 * len(REASONING_KEYS)


@pytest.mark.parametrize("arguments", ["mapping", "string"])
@pytest.mark.parametrize("reasoning", [None, "thinking"])
def test_parts_are_kept_with_every_other_option(arguments: Any, reasoning: str | None) -> None:
    source = CHATML_TOOLS.replace(TEXT, (THINKING if reasoning else "") + PARTS)
    source = source.replace("'\\n' if message.content or not loop.first else ''", "'\\n'")
    if arguments == "string":
        source = source.replace(ARGUMENTS, "{{- call.function.arguments + '}' -}}")
    found, rendered = probe(source)
    assert found == MessageFormat(arguments, reasoning, text_and_reasoning=True, parts=True)
    assert rendered[:2] == [[QUESTION], [{"role": "user", "content": [{"type": "text", "text": "why"}]}]]
    assert all(type(message["content"]) is list for messages in rendered[1:] for message in messages)


def test_a_template_that_shows_no_question_gets_the_default_format() -> None:
    found, rendered = probe("{{ messages[-1].tool_calls }}")
    assert (found.parts, found.reasoning) == (False, None)
    assert rendered[:2] == [[QUESTION], [{"role": "user", "content": [{"type": "text", "text": "why"}]}]]


def test_text_that_is_refused_with_calls_does_not_exclude_reasoning() -> None:
    alone = "{{- raise_exception('alone') if message.tool_calls and message.content -}}"
    found, _ = probe(CHATML_TOOLS.replace(TEXT, alone + THINKING + TEXT))
    assert found == MessageFormat("mapping", "thinking", text_and_reasoning=True, parts=False)
    unthought = "{{- raise_exception('unthought') if message.tool_calls and message.thinking -}}"
    found, _ = probe(CHATML_TOOLS.replace(TEXT, unthought + THINKING + TEXT))
    assert found == MessageFormat("mapping", "thinking", text_and_reasoning=True, parts=False)


def test_reasoning_shown_only_with_calls_is_found_with_string_arguments() -> None:
    shown = "{{- message.reasoning if message.tool_calls else '' -}}"
    source = CHATML_TOOLS.replace(TEXT, shown + TEXT)
    source = source.replace(ARGUMENTS, "{{- call.function.arguments + '}' -}}")
    assert probe(source)[0] == MessageFormat("string", "reasoning", text_and_reasoning=True, parts=False)


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
def test_a_python_repr_of_arguments_does_not_count_as_a_mapping(arguments: str, expected: str) -> None:
    assert probe(CHATML_TOOLS.replace(ARGUMENTS, arguments))[0].arguments == expected
