"""Certification: candidates, refusals with a difference, the certificate and its cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.byte_level import CHATML_TOOLS, byte_level
from support.conversations import answer, calls, results, user
from tito_core.chat import certify
from tito_core.chat.certify import Certificate
from tito_core.chat.probes import LOOK, cases
from tito_core.chat.template import ChatTemplate, TemplateError

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CASES = len(list(cases()))
RESULT = "{{- '\n<tool_response>\n' + message.content"


def certified(source: str, **arguments: Any) -> Certificate:
    return ChatTemplate.certify(byte_level(template=source), **arguments)


def test_a_chatml_template_passes_all_probes_with_the_cheapest_candidate() -> None:
    certificate = certified(CHATML_TOOLS)
    assert certificate.candidate == "after a question"
    assert certificate.passed == tuple(case.name for case in cases())
    assert len(set(certificate.passed)) == len(certificate.passed) == CASES
    assert certificate.tools
    assert certificate.refused == ()
    assert certificate.rewrites == ("calls: a call in the history is rebuilt from its parsed arguments",)


def test_a_template_that_renders_tools_late_requires_tool_specs() -> None:
    made = ChatTemplate.of(byte_level(template=CHATML + PROMPT + "{{ tools }}"))
    assert made.certificate.candidate == "after a question, with the rollout's tools"
    with pytest.raises(TemplateError, match="pass tool_specs="):
        made.delta(answer("a"), [user("b")], None)
    with_tools = made.first_prompt([user("a"), answer("b"), user("c")], None, [LOOK]).ids.tolist()
    delta = made.delta(answer("b"), [user("c")], made.closer_id, tool_specs=[LOOK]).ids.tolist()
    assert with_tools[-len(delta) :] == delta
    assert made.delta(answer("b"), [user("c")], None, tool_specs=[]).ids.tolist() != [made.closer_id, *delta]


def test_a_template_that_counts_results_requires_the_history() -> None:
    counting = "{%- set ns = namespace(n=0) -%}" + CHATML_TOOLS.replace(
        RESULT, "{%- set ns.n = ns.n + 1 -%}{{- 'first' if ns.n == 1 else 'again' -}}" + RESULT
    )
    assert counting != "{%- set ns = namespace(n=0) -%}" + CHATML_TOOLS
    made = ChatTemplate.of(byte_level(template=counting))
    assert made.certificate.candidate == "after a round of tools where there was one"
    [call] = calls(("look", {}))
    with pytest.raises(TemplateError, match="pass history="):
        made.delta(call, [results("x")], None)
    first = made.delta(call, [results("x")], None, history=[user("a")]).ids.tolist()
    again = made.delta(call, [results("x")], None, history=[user("a"), call, results("y")]).ids.tolist()
    assert first != again


def test_a_template_that_shows_calls_only_with_text_shows_no_tools() -> None:
    shown = "{%- for call in message.tool_calls or [] -%}"
    made = certified(CHATML_TOOLS.replace(shown, shown.replace("[] -%}", "[] if message.content -%}")))
    assert not made.tools  # its calls without text are refused, so tool results cannot be certified


def test_a_template_that_depends_on_the_past_is_refused_with_the_first_difference() -> None:
    with pytest.raises(TemplateError) as refused:
        certified(CHATML_TOOLS.replace(RESULT, RESULT + " + (messages|length)|string"))
    message = str(refused.value)
    assert "result, first, with a system prompt" in message
    lines = message.splitlines()
    assert lines[1].startswith("  template: ")
    assert lines[2].startswith("  delta:    ")
    assert lines[1][12:] != lines[2][12:]


def test_a_template_is_probed_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tokenizer = byte_level()
    made = ChatTemplate.of(tokenizer, certificates=tmp_path)
    [kept] = tmp_path.iterdir()
    monkeypatch.setattr(certify, "choose", None)  # would be called if there were no certificate
    again = ChatTemplate.of(tokenizer, certificates=tmp_path)
    for name in ("certificate", "fingerprint", "closer_id", "stop_ids", "arguments"):
        assert getattr(again, name) == getattr(made, name)
    assert made.arguments == tokenizer.special_tokens_map
    assert (made.closer_id, made.stop_ids) == (2, (2,))
    assert (
        again.delta(answer("a"), [user("b")], None).ids.tolist()
        == made.delta(answer("a"), [user("b")], None).ids.tolist()
    )
    for changed in ({"enable_thinking": False}, {"content_tokens": "as-template"}):
        with pytest.raises(TypeError):
            ChatTemplate.of(tokenizer, certificates=tmp_path, **changed)
    kept.write_text("{")
    with pytest.raises(TypeError):
        ChatTemplate.of(tokenizer, certificates=tmp_path)


REMARK = "{{- header(message.role) + (message.content if not message.tool_calls else '') -}}"
CLOSED = "{%- endfor -%}\n        {{- '<|im_end|>\n' -}}"


def moving(closed: str) -> str:
    """Return a template that omits text with calls from its usual place and ends turns with `closed`."""
    source = CHATML_TOOLS.replace("{{- header(message.role) + message.content -}}", REMARK).replace(CLOSED, closed)
    assert REMARK in source
    assert closed in source
    return source


def test_text_that_is_moved_behind_calls_changes_no_delta() -> None:
    certificate = certified(moving("{%- endfor -%}{{- message.content if message.tool_calls -}}{{- '<|im_end|>\n' -}}"))
    assert certificate.passed == tuple(case.name for case in cases())


def test_text_that_is_moved_out_of_its_turn_is_on_the_certificate() -> None:
    certificate = certified(
        moving("{%- endfor -%}{{- '<|im_end|>\n' + (message.content if message.tool_calls else '') -}}")
    )
    assert [line for line in certificate.rewrites if line.startswith("text besides calls")]
    assert not [name for name in certificate.passed if name.startswith("result after a remark")]
    assert [name for name in certificate.passed if name.startswith("two results")]
    assert certificate.tools


def test_a_result_that_depends_on_a_remark_is_refused() -> None:
    after_remark = "{%- set m = messages[loop.index0 - 1] -%}{{- 'So:' if m.tool_calls and m.content else '' -}}"
    with pytest.raises(TemplateError, match="'result after a remark, first'"):
        certified(CHATML_TOOLS.replace(RESULT, after_remark + RESULT))


RESULTS = "messages|selectattr('role', 'eq', 'tool')|list"


@pytest.mark.parametrize(
    ("condition", "candidate"),
    [
        (RESULTS + " and not tools", "after a question, with a tool"),
        (RESULTS + " and messages[0].role != 'system'", "after a system prompt and a question"),
    ],
)
def test_a_candidate_that_the_template_refuses_is_not_chosen(condition: str, candidate: str) -> None:
    certificate = certified(CHATML_TOOLS + "{{- raise_exception('not so') if " + condition + " -}}")
    assert certificate.candidate == candidate
    assert certificate.tools
    assert all(reason.endswith("not so") for _, reason in certificate.refused)
