"""Rendering: inputs of a template, and refusals of messages that it does not show."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from support.conversations import LOOK, answer, calls, results, user
from tito_core.chat.messages import SYSTEM_SOURCE, template_messages
from tito_core.chat.rendering import Rendering, TemplateError

ALL = (
    "{{ tools[0].function.name if tools else '' }}|{{ documents is none }}|{{ add_generation_prompt }}|{{ style }}|"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{% endfor %};{% endfor %}"
)


def test_a_template_gets_messages_tools_arguments_and_the_prompt_flag() -> None:
    rendering = Rendering.of(ALL, {"style": "terse"})
    text = rendering.of_messages([user("a"), answer("b")], "s", [LOOK])
    assert str.__str__(text) == "look|True|True|terse|system:s;user:a;assistant:b;"
    assert [(text[start:stop], source) for start, stop, source in text.spans if source >= SYSTEM_SOURCE] == [
        ("s", SYSTEM_SOURCE), ("a", 0), ("b", 1)
    ]  # fmt: skip
    assert rendering.of_messages([user("a")], generation_prompt=False) == "|True|False|terse|user:a;"
    assert rendering.of_messages([user("a")]) == "|True|True|terse|user:a;"
    assert rendering.of_translated(template_messages([user("a")])) == "|True|True|terse|user:a;"
    assert rendering.variables == {"style": "terse"}


def test_the_rollouts_values_override_arguments() -> None:
    rendering = Rendering.of(ALL, {"messages": "no", "add_generation_prompt": "no"})
    assert rendering.of_messages([user("a")]) == "|True|True||user:a;"


def test_the_message_format_is_found_with_the_template_arguments() -> None:
    thought = "{% if show and not add_generation_prompt %}{{ m.thinking }}{% endif %}{{ m.content }}"
    source = "{% for m in messages %}" + thought + "{% endfor %}"
    assert Rendering.of(source, {"show": True}).message_format.reasoning == "thinking"
    assert Rendering.of(source, {"show": False}).message_format.reasoning is None


def test_the_time_is_the_given_one() -> None:
    rendering = Rendering.of("{{ strftime_now('%Y') }}{{ messages[0].content }}", {}, datetime(1999, 1, 1))
    assert rendering.of_messages([user("a")]) == "1999a"


def test_invalid_jinja_is_refused_with_its_line() -> None:
    with pytest.raises(TemplateError) as refused:
        Rendering.of("a\n{% for %}", {})
    assert str(refused.value).startswith("The chat template is not valid Jinja: ")
    assert str(refused.value).endswith(" (line 2).")


@pytest.mark.parametrize("why", ["Roles must alternate", "Roles must alternate."])
def test_a_refusal_quotes_the_templates_reason(why: str) -> None:
    rendering = Rendering.of("{{ raise_exception('" + why + "') }}", {})
    with pytest.raises(TemplateError) as refused:
        rendering.of_messages([user("a"), answer("b")], "s")
    assert "with roles ['system', 'user', 'assistant']: Roles must alternate. Change" in str(refused.value)


CALLED = calls(("look", {"at": "x"}), text="Let me.")


@pytest.mark.parametrize(
    ("shows", "messages", "left_out", "role"),
    [
        ("m.content if m.role != 'user' else ''", [answer("a"), user("b")], 1, "user"),
        ("m.content if m.role != 'tool' else ''", [user("a"), *calls(("f", {})), results("b")], 1, "assistant"),
        ("m.content if m.role != 'tool' else ''", [user("a"), results("b")], 1, "tool"),
        ("m.content if m.role != 'system' else ''", [user("a")], 0, "system"),
    ],
)
def test_a_message_that_a_template_leaves_out_is_named(shows: str, messages: Any, left_out: int, role: str) -> None:
    rendering = Rendering.of("{% for m in messages %}{{ " + shows + " }}{% endfor %}", {})
    with pytest.raises(TemplateError) as refused:
        rendering.of_messages(messages, "s" if role == "system" else None)
    roles = [message["role"] for message in template_messages(messages, "s" if role == "system" else None)]
    assert f"leaves out message {left_out} of messages with roles {roles}" in str(refused.value)
    assert f"renders the role {role!r}" in str(refused.value)


@pytest.mark.parametrize(
    ("shows", "messages"),
    [
        # These have nothing to show.
        ("m.content if m.role != 'user' else ''", [answer("a"), user("")]),
        ("m.content if m.role != 'user' else ''", [answer("a"), user(" \n")]),
        ("m.content if m.role == 'user' else ''", [user("a"), answer("b")]),
        # These are shown, changed or in another place.
        ("m.content|upper", [user("a")]),
        ("m.content|tojson", [user("a")]),
        ("m.content", [user("a"), *CALLED, user("b")]),
        ("messages[0].content[::-1] if loop.first else ''", [user("ab")]),
        ("m.content ~ m.tool_calls[0].function.arguments.at if m.tool_calls else m.content", [user("a"), *CALLED]),
        ("m.content ~ m.tool_calls[0].function.name if m.tool_calls else m.content", [user("a"), *CALLED]),
        ("m.content ~ m.tool_calls[0].id if m.tool_calls else m.content", [user("a"), *CALLED]),
        ("m.content.encode().decode()", [user("a")]),
    ],
)
def test_blank_or_changed_messages_do_not_count_as_left_out(shows: str, messages: Any) -> None:
    rendering = Rendering.of("{% for m in messages %}{{ " + shows + " }}{% endfor %}", {})
    assert isinstance(rendering.of_messages(messages), str)
