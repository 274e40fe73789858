"""What a refusal shows of a template whose delta is not its own rendering."""

from __future__ import annotations

from functools import cache

import pytest

from support.byte_level import CHATML_TOOLS, byte_level
from support.templates import template_of
from tito_core.chat.certify import AROUND, Difference, _difference, _moves, attempt
from tito_core.chat.delta import CANDIDATES, DeltaSource, Tail
from tito_core.chat.encoder import ContentSafeEncoder
from tito_core.chat.ending import Ending
from tito_core.chat.probes import Case, asked, called, cases, returned, said
from tito_core.chat.rendering import Rendering, TemplateError
from tito_core.chat.traced import Traced, concat

FIRST = CANDIDATES[0]
CASE = Case("a name", [asked("Why?")], said(), [asked("And?")])
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
    assert str(Difference("after a question", "result, first", expected, found)) == (
        f"on the probe 'result, first', rendering after a question differs at character {at}:\n"
        f"  template: '{shown[0]}'\n"
        f"  delta:    '{shown[1]}'"
    )


@cache
def source() -> DeltaSource:
    template = template_of("byte level")
    return DeltaSource.of(template.rendering, template.encoder, FIRST)


def text(*runs: str | tuple[str, int]) -> Traced:
    """Join scaffold, and content with its source."""
    whole = concat(run if isinstance(run, str) else Traced.content(*run) for run in runs)
    return whole if isinstance(whole, Traced) else Traced.of(whole, ())


SHOWN = text("<q>", (".", 0), "<a>", ("so", 1), "<e>", "<q>And?<p>")
TAIL = Tail(SHOWN, 1, str.index(SHOWN, "<e>") + 3, [], Ending((), frozenset(), frozenset(), {}))


@pytest.mark.parametrize(
    ("whole", "expected", "found"),
    [
        # The turn ends alike: what comes after it is compared.
        (text("<q>", ("Why?", 0), "<a>", ("so", 1), "<e>", "<u>And?"), "<u>And?", "<q>And?<p>"),
        # An answer before it ended alike too.
        (text("<a>", ("so", 0), "<e>", "<q>W<a>", ("so", 1), "<e>", "<u>And?"), "<u>And?", "<q>And?<p>"),
        # The turn is all there is before.
        (text(("so", 1), "<e>", "<u>And?"), "<u>And?", "<q>And?<p>"),
        # The turn ends otherwise: it is compared from its beginning.
        (text("<q>", ("Why?", 0), "<a>", ("so", 1), "<E>", ("so", 1), "<q>And?"), "so<E>so<q>And?", "so<e><q>And?<p>"),
        # It is not shown at all.
        (text("<q>", ("Why?", 0), "<a>", "<q>And?"), "<q>Why?<a><q>And?", "so<e><q>And?<p>"),
    ],
)
def test_like_is_compared_with_like(whole: Traced, expected: str, found: str) -> None:
    assert _difference(source(), CASE, whole, TAIL) == Difference("after a question", "a name", expected, found)


@pytest.mark.parametrize(
    ("whole", "moved"),
    [
        (text(("so", 1), "<c>", ("look", 1)), False),
        (text("<c>", ("look", 1), ":", ("so", 1)), True),
        (text("<c>", ("look", 1), ":", ("door", 1), ":", ("so", 1)), True),
        (text("<c>", ("look", 1), ":", ("so", 2)), False),
        (text("<c>", ("look", 1)), False),
    ],
)
def test_text_beside_calls_is_moved_where_it_comes_after_one(whole: Traced, moved: bool) -> None:
    assert _moves(whole, 1, "so") == moved


def made(source: str) -> DeltaSource:
    tokenizer = byte_level(template=source)
    return DeltaSource.of(Rendering.of(source, {}), ContentSafeEncoder(tokenizer), FIRST)


def difference(source: str, *names: str) -> str:
    trial = attempt(made(source), [PROBES[name] for name in names])
    assert [case.name for case in trial.passed] == list(names[:-1])
    return str(trial.difference)


def test_the_first_difference_is_the_templates_own_text_beside_ours() -> None:
    counted = CHATML_TOOLS + "{{ messages|length }}"
    assert difference(counted, "question, first", "question, after an answer") == (
        "on the probe 'question, after an answer', rendering after a question differs at character 60:\n"
        "  template: '\\n<|im_start|>user\\nAnd then?<|im_end|>\\n<|im_start|>assistant\\n5'\n"
        "  delta:    '\\n<|im_start|>user\\nAnd then?<|im_end|>\\n<|im_start|>assistant\\n3'"
    )


def test_what_the_delta_cannot_give_is_shown_as_refused() -> None:
    long = (
        CHATML_TOOLS + "{{ raise_exception('long') if messages|length == 3 and messages[-1].content == 'And then?' }}"
    )
    assert difference(long, "question, after an answer") == (
        "on the probe 'question, after an answer', rendering after a question differs at character 0:\n"
        "  template: '<|im_start|>user\\nWhy?<|im_end|>\\n<|im_start|>assistant\\nSeen i'\n"
        '  delta:    "refused: The chat template refused messages with roles [\'use"'
    )


def test_a_template_that_takes_no_question_is_refused_with_its_own_words() -> None:
    refuses = made(CHATML_TOOLS)
    first = PROBES["question, first"]
    never = Rendering.of("{{ raise_exception('never') }}", {})
    with pytest.raises(TemplateError, match="never"):
        attempt(DeltaSource(never, refuses.encoder, FIRST, refuses.answers, refuses.calls, refuses.opening), [first])


def test_calls_that_a_template_refuses_are_no_difference() -> None:
    single = (
        CHATML_TOOLS + "{{ raise_exception('one call') if messages|selectattr('role', 'eq', 'tool')|list|length == 2 }}"
    )
    names = ("question, first", "result, first, with tools", "two results, first, with tools")
    trial = attempt(made(single), [PROBES[name] for name in names])
    assert trial.difference is None
    assert [case.name for case in trial.passed] == list(names[:2])
    assert trial.refused == [
        (
            names[2],
            "The chat template refused messages with roles ['user', 'assistant', 'tool', 'tool']: one call.",
        )
    ]
    assert trial.tools
    assert not attempt(made(single), [PROBES[names[0]]]).tools


def test_a_turn_that_was_cut_off_must_be_closed_as_the_template_closes_it() -> None:
    thought = "('<think>' + message.reasoning_content + {} if message.reasoning_content else '')"
    written = CHATML_TOOLS.replace(
        "header(message.role) + message.content", f"header(message.role) + {thought} + message.content"
    )
    name = "question after a cut thought, first"
    right = attempt(made(written.replace("{}", "'</think>'")), [PROBES[name]])
    assert [case.name for case in right.passed] == [name]
    elsewhere = written.replace(
        "{}", "('</think>' if messages|length < 3 or messages[0].content == '.' else ' </think>')"
    )
    assert difference(elsewhere, name).startswith(f"on the probe '{name}', rendering after a question differs at")


def test_one_who_says_nothing_is_still_told_apart() -> None:
    trial = attempt(made(CHATML_TOOLS), [Case("calls", [asked("a")], called(("look", {})), [returned([])])])
    assert [case.name for case in trial.passed] == ["calls"]
