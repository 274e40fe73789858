"""Differences that a refusal of a template shows, and refused probes."""

from __future__ import annotations

import pytest

from support.byte_level import CHATML_TOOLS, byte_level
from tito_core.chat.certify import Trial, attempt, choose, judge_of
from tito_core.chat.delta import CANDIDATES, DeltaSource
from tito_core.chat.encoder import ContentSafeEncoder
from tito_core.chat.probes import Case, call_message, cases, result_message, user_message
from tito_core.chat.referee import CONTEXT, Difference, Referee
from tito_core.chat.rendering import Rendering, TemplateError

FIRST = CANDIDATES[0]
PROBES = {case.name: case for case in cases()}


@pytest.mark.parametrize(
    ("expected", "found", "at", "shown"),
    [
        ("abc", "abd", 2, ("abc", "abd")),
        ("xbc", "abc", 0, ("xbc", "abc")),
        ("ab", "abc", 2, ("ab", "abc")),
        ("abc", "", 0, ("abc", "")),
        ("abc\n", "axc\t", 1, ("abc\\n", "axc\\t")),
        (
            "l" * 100 + "a" + "r" * 100,
            "l" * 100 + "b" + "r" * 100,
            100,
            ("l" * 60 + "a" + "r" * 59, "l" * 60 + "b" + "r" * 59),
        ),
        ("l" + "a" + "r" * 100, "l" + "b" + "r" * 100, 1, ("la" + "r" * 59, "lb" + "r" * 59)),
    ],
)
def test_a_difference_is_shown_with_its_position_and_context(
    expected: str, found: str, at: int, shown: tuple[str, str]
) -> None:
    assert CONTEXT == 60
    assert str(Difference(expected, found)) == (
        f"at character {at}:\n  template: '{shown[0]}'\n  delta:    '{shown[1]}'"
    )


def run_probes(source: str, *probes: Case) -> Trial:
    """Run the first candidate on some probes."""
    encoder = ContentSafeEncoder(byte_level(template=source))
    made = DeltaSource.of(Rendering.of(source, {}), encoder, FIRST)
    return attempt(made, judge_of(Referee(source, {}), encoder), probes)


def difference(source: str, *names: str) -> str:
    """Return the difference of the last probe; the others pass."""
    trial = run_probes(source, *(PROBES[name] for name in names))
    assert [case.name for case in trial.passed] == list(names[:-1])
    assert trial.difference is not None
    name, found = trial.difference
    assert name == names[-1]
    return str(found)


def test_the_first_difference_shows_both_texts() -> None:
    counted = CHATML_TOOLS + "{{ messages|length }}"
    assert difference(counted, "question, first", "question, after an answer") == (
        "at character 60:\n"
        "  template: '\\n<|im_start|>user\\nWhy n005.<|im_end|>\\n<|im_start|>assistant\\n5'\n"
        "  delta:    '\\n<|im_start|>user\\nWhy n005.<|im_end|>\\n<|im_start|>assistant\\n3'"
    )


def test_the_difference_of_the_candidate_with_most_passed_probes_is_shown() -> None:
    source = CHATML_TOOLS + "{{ messages|length if messages|length != 3 }}"
    encoder = ContentSafeEncoder(byte_level(template=source))
    with pytest.raises(TemplateError) as refused:
        choose(Rendering.of(source, {}), encoder, judge_of(Referee(source, {}), encoder), CANDIDATES[:2])
    assert "'question, first, with a system prompt'" in str(refused.value)
    assert f"rendering {FIRST.name} differs" in str(refused.value)


LONG = CHATML_TOOLS + "{{ raise_exception('long') if messages|length == 3 and messages[1].content == '.' "


def test_probes_that_only_the_candidate_cannot_render_are_counted() -> None:
    only_ours = LONG + "and messages[2].content.endswith('5.') }}"
    usual, other = "question, after an answer", "question of two blocks, after a thought"
    trial = run_probes(only_ours.replace("5.", "7."), PROBES["question, first"], PROBES[other])
    assert [case.name for case in trial.passed] == ["question, first"]
    assert [name for name, _ in trial.refused] == [other]
    assert "long" in trial.refused[0][1]
    assert trial.unable == 1
    assert trial.difference is None
    with pytest.raises(TemplateError, match=f"shows the probe '{usual}', but no delta of it.*: long"):
        run_probes(only_ours, PROBES["question, first"], PROBES[usual])


def test_probes_that_the_template_refuses_do_not_count_against_a_candidate() -> None:
    trial = run_probes(
        CHATML_TOOLS + "{{ raise_exception('long') if messages|length == 5 }}",
        PROBES["question, first"],
        PROBES["question, after an answer"],
    )
    assert len(trial.refused) == 1
    assert "long" in trial.refused[0][1]
    assert trial.unable == 0


def test_a_template_that_refuses_every_probe_is_refused_with_its_reason() -> None:
    first = PROBES["question, first"]
    with pytest.raises(TemplateError, match="never"):
        run_probes(
            CHATML_TOOLS + "{{ raise_exception('never') if messages[0].content != '.' and messages|length > 1 }}", first
        )
    with pytest.raises(TemplateError, match="No probes"):
        run_probes(CHATML_TOOLS)


def test_refused_calls_are_not_a_difference() -> None:
    single = (
        CHATML_TOOLS + "{{ raise_exception('one call') if messages|selectattr('role', 'eq', 'tool')|list|length == 2 }}"
    )
    names = ("question, first", "result, first, with tools", "two results, first, with tools")
    trial = run_probes(single, *(PROBES[name] for name in names))
    assert trial.difference is None
    assert [case.name for case in trial.passed] == list(names[:2])
    [(refused, reason)] = trial.refused
    assert refused == names[2]
    assert reason.endswith("one call")
    assert trial.tools
    assert not run_probes(single, PROBES[names[0]]).tools


def test_a_template_that_was_only_tried_with_tools_needs_them() -> None:
    assert run_probes(CHATML_TOOLS, PROBES["question, first, with tools"]).needs_tools
    assert not run_probes(CHATML_TOOLS, PROBES["question, first, with tools"], PROBES["question, first"]).needs_tools


def test_a_truncated_turn_must_get_the_templates_closers() -> None:
    thought = "('<think>' + message.reasoning_content + {} if message.reasoning_content else '')"
    written = CHATML_TOOLS.replace(
        "header(message.role) + message.content", f"header(message.role) + {thought} + message.content"
    )
    name = "question after a cut thought, first"
    right = run_probes(written.replace("{}", "'</think>'"), PROBES[name])
    assert [case.name for case in right.passed] == [name]
    elsewhere = written.replace(
        "{}", "('</think>' if messages|length < 3 or messages[0].content == '.' else ' </think>')"
    )
    assert "' </think>" in difference(elsewhere, name)


def test_calls_without_text_and_with_an_empty_result_pass() -> None:
    trial = run_probes(
        CHATML_TOOLS, Case("calls", [user_message("a")], call_message(("look", {})), [result_message([])])
    )
    assert [case.name for case in trial.passed] == ["calls"]
