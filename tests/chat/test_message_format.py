"""The message format of a template, found by trying."""

from __future__ import annotations

from typing import Any

import pytest

from support.byte_level import CHATML_TOOLS
from support.conversations import answer, calls, results, translated, user
from tito_core.chat.messages import MessageFormat, template_messages
from tito_core.chat.rendering import Rendering

ARGUMENTS = "{{- call.function.arguments | tojson + '}</tool_call>' -}}"
TEXT = "{{- header(message.role) + message.content -}}"
PARTS = (
    "{{- header(message.role) -}}{%- for p in message.content if p.type == 'text' -%}{{- p['text'] -}}{%- endfor -%}"
)
THINKING = "{{- message.thinking or '' -}}"


def message_format(source: str) -> MessageFormat:
    return Rendering.of(source, {}).message_format


def shown(reasoning: str) -> str:
    return CHATML_TOOLS.replace(TEXT, "{{- header(message.role) + " + reasoning + " + message.content -}}")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (ARGUMENTS, "mapping"),
        ("{{- (call.function.arguments if call.function.arguments is string else 'x') -}}", "mapping"),
        ("{{- call.function.arguments + '}' -}}", "string"),
        ("{{- call.function.arguments -}}", "string"),
        (
            "{{- raise_exception('no mapping') if call.function.arguments is mapping else call.function.arguments -}}",
            "string",
        ),
        ("{%- for k, v in call.function.arguments.items() -%}{{- k -}}={{- v -}}{%- endfor -%}", "mapping"),
        ("{{- raise_exception('no calls') -}}", "mapping"),
    ],
)
def test_arguments(arguments: str, expected: str) -> None:
    assert message_format(CHATML_TOOLS.replace(ARGUMENTS, arguments)).arguments == expected


@pytest.mark.parametrize(
    ("reasoning", "expected"),
    [
        ("''", None),
        ("(message.reasoning_content or '')", "reasoning_content"),
        ("(message.thinking or '')", "thinking"),
        ("(message.reasoning or '')", "reasoning"),
        ("(message.reasoning or message.reasoning_content or '')", "reasoning_content"),
        ("(message.thinking or '' if message.tool_calls else '')", "thinking"),
        ("(message.thinking or '' if not message.tool_calls else '')", "thinking"),
    ],
)
def test_reasoning(reasoning: str, expected: str | None) -> None:
    assert message_format(shown(reasoning)).reasoning == expected


def test_templates_that_allow_either_text_or_reasoning_with_calls() -> None:
    alone = "(raise_exception('both') if message.tool_calls and message.content and message.thinking else '')"
    assert message_format(shown("(message.thinking or '')")).text_and_reasoning
    found = message_format(shown(alone + " + (message.thinking or '')"))
    assert found == MessageFormat("mapping", "thinking", text_and_reasoning=False)
    for text, key in (("So:", None), ("", "thinking")):
        [message] = translated(template_messages(calls(("f", {}), text=text, reasoning="Hm."), message_format=found))
        assert message.get("thinking") == ("Hm." if key else None)
    [message] = translated(template_messages([answer("So.", reasoning="Hm.")], message_format=found))
    assert message["thinking"] == "Hm."


def test_content_in_parts() -> None:
    found = message_format(CHATML_TOOLS.replace(TEXT, PARTS))
    assert found.parts
    assert not message_format(CHATML_TOOLS).parts
    messages: Any = translated(
        template_messages([user("a"), *calls(("f", {})), results("b")], "s", message_format=found)
    )
    assert [message["content"] for message in messages] == [
        [{"type": "text", "text": text}] for text in ("s", "a", "", "b")
    ]


def test_arguments_as_a_string_are_json() -> None:
    messages = template_messages(calls(("f", {"é": [1, None]})), message_format=MessageFormat("string"))
    assert messages[0]["tool_calls"][0]["function"]["arguments"] == '{"é": [1, null]}'
    assert messages[0]["tool_calls"][0]["function"]["arguments"].spans == ((0, 16, 0),)


def test_reasoning_that_is_not_shown_is_left_out() -> None:
    assert (
        "reasoning_content"
        not in template_messages([answer("a", reasoning="b")], message_format=MessageFormat(reasoning=None))[0]
    )


@pytest.mark.parametrize("arguments", ["mapping", "string"])
@pytest.mark.parametrize("reasoning", [None, "thinking"])
def test_parts_are_kept_with_every_other_option(arguments: Any, reasoning: str | None) -> None:
    source = CHATML_TOOLS.replace(TEXT, (THINKING if reasoning else "") + PARTS)
    source = source.replace("'\\n' if message.content or not loop.first else ''", "'\\n'")
    if arguments == "string":
        source = source.replace(ARGUMENTS, "{{- call.function.arguments + '}' -}}")
    found = message_format(source)
    assert found == MessageFormat(arguments, reasoning, text_and_reasoning=True, parts=True)


def test_a_template_that_shows_no_question_gets_the_default_format() -> None:
    found = message_format("{{ messages[-1].tool_calls }}")
    assert (found.parts, found.reasoning) == (False, None)


def test_text_that_is_refused_with_calls_does_not_exclude_reasoning() -> None:
    alone = "{{- raise_exception('alone') if message.tool_calls and message.content -}}"
    found = message_format(CHATML_TOOLS.replace(TEXT, alone + THINKING + TEXT))
    assert found == MessageFormat("mapping", "thinking", text_and_reasoning=True, parts=False)
    unthought = "{{- raise_exception('unthought') if message.tool_calls and message.thinking -}}"
    found = message_format(CHATML_TOOLS.replace(TEXT, unthought + THINKING + TEXT))
    assert found == MessageFormat("mapping", "thinking", text_and_reasoning=True, parts=False)


def test_reasoning_shown_only_with_calls_is_found_with_string_arguments() -> None:
    shown = "{{- message.reasoning if message.tool_calls else '' -}}"
    source = CHATML_TOOLS.replace(TEXT, shown + TEXT)
    source = source.replace(ARGUMENTS, "{{- call.function.arguments + '}' -}}")
    assert message_format(source) == MessageFormat("string", "reasoning", text_and_reasoning=True, parts=False)


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
    assert message_format(CHATML_TOOLS.replace(ARGUMENTS, arguments)).arguments == expected
