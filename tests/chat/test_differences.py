"""What a refusal shows of a template whose delta is not its own rendering."""

from __future__ import annotations

import pytest

from support.byte_level import CHATML_TOOLS, byte_level
from tito_core.chat.certify import Trial, attempt, choose, judge_of
from tito_core.chat.delta import CANDIDATES, DeltaSource
from tito_core.chat.encoder import ContentSafeEncoder
from tito_core.chat.probes import Case, call_message, cases, result_message, user_message
from tito_core.chat.referee import Referee
from tito_core.chat.rendering import Rendering, TemplateError
from tito_core.chat.verdict import AROUND, Difference

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
def test_a_difference_is_shown_at_its_place_with_little_around(
    expected: str, found: str, at: int, shown: tuple[str, str]
) -> None:
    assert AROUND == 60
    assert str(Difference(expected, found)) == (
        f"at character {at}:\n  template: '{shown[0]}'\n  delta:    '{shown[1]}'"
    )


def tried(source: str, *probes: Case) -> Trial:
    """Try the first candidate on some probes."""
    encoder = ContentSafeEncoder(byte_level(template=source))
    made = DeltaSource.of(Rendering.of(source, {}), encoder, FIRST)
    return attempt(made, judge_of(Referee(source, {}), encoder), probes)


def difference(source: str, *names: str) -> str:
    """Return how the last of these probes differs; the others pass."""
    trial = tried(source, *(PROBES[name] for name in names))
    assert [case.name for case in trial.passed] == list(names[:-1])
    assert trial.difference is not None
    name, found = trial.difference
    assert name == names[-1]
    return str(found)


def test_the_first_difference_is_the_templates_own_text_beside_ours() -> None:
    counted = CHATML_TOOLS + "{{ messages|length }}"
    assert difference(counted, "question, first", "question, after an answer") == (
        "at character 60:\n"
        "  template: '\\n<|im_start|>user\\nWhy n005.<|im_end|>\\n<|im_start|>assistant\\n5'\n"
        "  delta:    '\\n<|im_start|>user\\nWhy n005.<|im_end|>\\n<|im_start|>assistant\\n3'"
    )


def test_the_difference_of_the_candidate_that_came_furthest_is_shown() -> None:
    source = CHATML_TOOLS + "{{ messages|length if messages|length != 3 }}"
    encoder = ContentSafeEncoder(byte_level(template=source))
    with pytest.raises(TemplateError) as refused:
        choose(Rendering.of(source, {}), encoder, judge_of(Referee(source, {}), encoder), CANDIDATES[:2])
    assert f"on the probe 'question, first, with a system prompt', rendering {FIRST.name} differs" in str(refused.value)


LONG = CHATML_TOOLS + "{{ raise_exception('long') if messages|length == 3 and messages[1].content == '.' "


def test_what_only_the_delta_cannot_give_is_refused_and_counted() -> None:
    only_ours = LONG + "and messages[2].content.endswith('5.') }}"
    usual, other = "question, after an answer", "question of two blocks, after a thought"
    trial = tried(only_ours.replace("5.", "7."), PROBES["question, first"], PROBES[other])
    assert [case.name for case in trial.passed] == ["question, first"]
    assert [name for name, _ in trial.refused] == [other]
    assert "long" in trial.refused[0][1]
    assert trial.unable == 1
    assert trial.difference is None
    trial = tried(only_ours, PROBES["question, first"], PROBES[usual])
    assert trial.difference is not None
    assert trial.difference[0] == usual
    assert "long" in trial.difference[1].found


def test_what_the_template_refuses_as_a_whole_is_not_counted_against_a_candidate() -> None:
    trial = tried(
        CHATML_TOOLS + "{{ raise_exception('long') if messages|length == 5 }}",
        PROBES["question, first"],
        PROBES["question, after an answer"],
    )
    assert len(trial.refused) == 1
    assert "long" in trial.refused[0][1]
    assert trial.unable == 0


def test_a_template_that_takes_no_question_is_refused_with_its_own_words() -> None:
    first = PROBES["question, first"]
    with pytest.raises(TemplateError, match="never"):
        tried(
            CHATML_TOOLS + "{{ raise_exception('never') if messages[0].content != '.' and messages|length > 1 }}", first
        )
    with pytest.raises(TemplateError, match="no probe"):
        tried(CHATML_TOOLS)


def test_calls_that_a_template_refuses_are_no_difference() -> None:
    single = (
        CHATML_TOOLS + "{{ raise_exception('one call') if messages|selectattr('role', 'eq', 'tool')|list|length == 2 }}"
    )
    names = ("question, first", "result, first, with tools", "two results, first, with tools")
    trial = tried(single, *(PROBES[name] for name in names))
    assert trial.difference is None
    assert [case.name for case in trial.passed] == list(names[:2])
    [(refused, reason)] = trial.refused
    assert refused == names[2]
    assert reason.endswith("one call")
    assert trial.tools
    assert not tried(single, PROBES[names[0]]).tools


def test_a_template_that_was_only_tried_with_tools_needs_them() -> None:
    assert tried(CHATML_TOOLS, PROBES["question, first, with tools"]).needs_tools
    assert not tried(CHATML_TOOLS, PROBES["question, first, with tools"], PROBES["question, first"]).needs_tools


def test_a_turn_that_was_cut_off_must_be_closed_as_the_template_closes_it() -> None:
    thought = "('<think>' + message.reasoning_content + {} if message.reasoning_content else '')"
    written = CHATML_TOOLS.replace(
        "header(message.role) + message.content", f"header(message.role) + {thought} + message.content"
    )
    name = "question after a cut thought, first"
    right = tried(written.replace("{}", "'</think>'"), PROBES[name])
    assert [case.name for case in right.passed] == [name]
    elsewhere = written.replace(
        "{}", "('</think>' if messages|length < 3 or messages[0].content == '.' else ' </think>')"
    )
    assert "' </think>" in difference(elsewhere, name)


def test_one_who_says_nothing_is_still_told_apart() -> None:
    trial = tried(CHATML_TOOLS, Case("calls", [user_message("a")], call_message(("look", {})), [result_message([])]))
    assert [case.name for case in trial.passed] == ["calls"]
