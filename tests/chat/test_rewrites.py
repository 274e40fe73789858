"""Rewrites and the treatment of reasoning, as the certificate reports them."""

from __future__ import annotations

import pytest

from support.byte_level import CHATML_TOOLS
from tito_core.chat.certify import Thinking, rewrites, thinking
from tito_core.chat.rendering import Rendering

HEADER = "{{- header(message.role) + message.content -}}"
CALLS = "calls: a call in the history is rebuilt from its parsed arguments"
FIRST = "calls: of several calls in one message only the first is shown"
PROMPT = "prompt: what it writes at the end of a prompt is not what it writes before the answer in the history"
DATE = "date: the prompt holds the day or time, frozen for as long as the template lives"
HEAD = "head: what it writes before the first question, such as the tools, changes once more messages follow"
ARGUMENTS = "{{- call.function.arguments | tojson + '}</tool_call>' -}}"
ASSISTANT = "{{- header('assistant') -}}"


def shown(thought: str) -> str:
    return CHATML_TOOLS.replace(HEADER, "{{- header(message.role) + " + thought + " + message.content -}}")


@pytest.mark.parametrize(
    ("thought", "kind"),
    [
        ("(message.reasoning_content or '')", Thinking.KEPT),
        # In mid round only: no question has followed.
        ("(message.reasoning_content or '' if messages[-1].role == 'tool' or not tools else '')", Thinking.STRIPPED),
        (
            "(message.reasoning_content or '' if message.tool_calls and (tools or messages|length == 2) else '')",
            Thinking.STRIPPED,
        ),
        # In the last message only, be it an answer or calls.
        (
            "(message.reasoning_content or '' if loop.last and not add_generation_prompt else '')",
            Thinking.ALWAYS_STRIPPED,
        ),
        ("(message.reasoning_content or '' if loop.last and not message.tool_calls else '')", Thinking.ALWAYS_STRIPPED),
        ("(message.reasoning_content or '' if loop.last and message.tool_calls else '')", Thinking.ALWAYS_STRIPPED),
        (
            "(message.reasoning_content or '' if loop.last and not add_generation_prompt "
            "and (tools or message.content == 'so') else '')",
            Thinking.ALWAYS_STRIPPED,
        ),
        ("''", Thinking.NOT_SHOWN),
        ("(raise_exception('no') if message.reasoning_content else '')", Thinking.NOT_SHOWN),
    ],
)
def test_reasoning_of_earlier_answers(thought: str, kind: Thinking) -> None:
    # Where a template shows reasoning in some place only, the form is found in the same one.
    rendering = Rendering.of(shown(thought), {})
    assert thinking(rendering) == kind


@pytest.mark.parametrize(
    ("source", "tools", "expected"),
    [
        (CHATML_TOOLS, True, [CALLS]),
        (CHATML_TOOLS, False, []),
        (CHATML_TOOLS.replace(ARGUMENTS, ARGUMENTS + "{%- break -%}"), True, [CALLS, FIRST]),
        (CHATML_TOOLS.replace(ARGUMENTS, ARGUMENTS + "{%- break -%}"), False, []),
        # One that takes only one call is shown no other.
        (
            CHATML_TOOLS.replace(HEADER, "{{- raise_exception('one') if message.tool_calls|length > 1 -}}" + HEADER),
            True,
            [CALLS, FIRST],
        ),
        # Nor of one that reads arguments as text.
        (
            CHATML_TOOLS.replace(ARGUMENTS, "{{- call.function.arguments + '}</tool_call>' -}}{%- break -%}"),
            True,
            [CALLS],
        ),
        # Calls are compared where tools are shown, and without a prompt after them.
        (
            CHATML_TOOLS.replace(ARGUMENTS, ARGUMENTS + "{%- if tools -%}{%- break -%}{%- endif -%}"),
            True,
            [CALLS, FIRST],
        ),
        (
            CHATML_TOOLS.replace(ARGUMENTS, ARGUMENTS + "{%- if add_generation_prompt -%}{%- break -%}{%- endif -%}"),
            True,
            [CALLS],
        ),
        (CHATML_TOOLS.replace(ASSISTANT, "{{- header('assistant') + '<think>' -}}"), False, [PROMPT]),
        (CHATML_TOOLS + "{{ strftime_now('%Y') }}", False, [PROMPT, DATE]),
        ("{{ strftime_now('%Y') }}" + CHATML_TOOLS, False, [DATE]),
        ("{{ strftime_now('%d') }}" + CHATML_TOOLS, True, [CALLS, DATE]),
        ("{{ strftime_now('%Y') if day else '' }}" + CHATML_TOOLS, False, []),
        ("{% set year = strftime_now('%Y') %}" + CHATML_TOOLS, False, []),
        (CHATML_TOOLS.replace("{%- if tools -%}", "{%- if tools and messages|length == 1 -%}"), True, [CALLS, HEAD]),
        (CHATML_TOOLS.replace("{%- if tools -%}", "{%- if tools and messages|length == 1 -%}"), False, []),
        (CHATML_TOOLS.replace("{%- if tools -%}", "{%- if tools and messages|length < 3 -%}"), True, [CALLS, HEAD]),
        # Only what comes before the first question ends is compared.
        (
            CHATML_TOOLS.replace(ASSISTANT, "{{- header('assistant') + messages|length|string -}}"),
            True,
            [CALLS, PROMPT],
        ),
        ("{{- 'a' if messages|length == 1 and tools else 'b' -}}" + CHATML_TOOLS, True, [CALLS, HEAD]),
        ("{{ messages|length }} messages" + CHATML_TOOLS, False, [HEAD]),
        ("{{ messages|selectattr('role', 'eq', 'tool')|list|length }}" + CHATML_TOOLS, True, [CALLS, HEAD]),
    ],
)
def test_rewrites(source: str, tools: bool, expected: list[str]) -> None:
    assert list(rewrites(source, {}, Rendering.of(source, {}), tools=tools)) == expected


def test_a_date_counts_only_if_the_arguments_show_it() -> None:
    source = "{{ strftime_now('%H:%M') if clock else '' }}" + CHATML_TOOLS
    for clock, expected in ((True, [DATE]), (False, [])):
        variables = {"clock": clock}
        assert list(rewrites(source, variables, Rendering.of(source, variables), tools=False)) == expected
