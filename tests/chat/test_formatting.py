"""`%` and `format` in templates give Python's own text, with the spans of inserted values."""

from __future__ import annotations

from typing import Any

import pytest

from support.origins import origins
from tito_core.chat.rendering import compile_template, render
from tito_core.chat.traced import Traced


def rendered(source: str, **variables: str) -> Traced:
    return render(compile_template(source), {name: Traced.content(text, 1) for name, text in variables.items()})


@pytest.mark.parametrize(
    ("source", "text", "content"),
    [
        ("{{ 'x%sy' % s }}", "xay", "-1-"),
        ("{{ '%(k)s:' % {'k': s} }}", "a:", "1-"),
        ("{{ '%s%%' % s }}", "a%", "1-"),
        ("{{ '%s %(k)s' % {'k': s} }}", "{'k': 'a'} a", "1" * 10 + "-1"),
        ("{{ 'x{}y{}'.format(s, s) }}", "xaya", "-1-1"),
        ("{{ 'x{k}'.format(k=s) }}", "xa", "-1"),
        ("{{ 'x{k}'.format_map({'k': s}) }}", "xa", "-1"),
        ("{{ '%s'|format(s) }}{{ '%(k)s:'|format(k=s) }}", "aa:", "11-"),
    ],
)
def test_inserted_values_keep_their_spans(source: str, text: str, content: str) -> None:
    found = rendered(source, s="a")
    assert str.__str__(found) == text
    assert "".join("-" if origin is None else str(origin) for origin in origins(found)) == content


@pytest.mark.parametrize(
    "source",
    [
        "{{ (s ~ '%3s') % 7 }}",
        "{{ '%3s' % s }}",
        "{{ '%(k)3s' % {'k': s} }}",
        "{{ '{:>3}'.format(s) }}",
        "{{ '{k:>3}'.format(k=s) }}",
        "{{ '{k:>3}'.format_map({'k': s}) }}",
        "{{ (s ~ '{}').format('x') }}",
        "{{ '{k!r}'.format(k=s) }}",
        "{{ '{0[0]}'.format([s]) }}",
    ],
)
def test_reformatted_text_is_all_content(source: str) -> None:
    found = rendered(source, s="a")
    assert "a" in found
    assert set(origins(found)) == {1}


def test_text_that_resembles_an_inserted_value_is_content() -> None:
    # ".0" cuts the first value away, and the content spells what would have stood there.
    found = rendered("{{ '{:{}}{}'.format('a', '.0', s) }}", s="a.0")
    assert str.__str__(found) == "a.0"
    assert set(origins(found)) == {1}


def test_the_format_filter_takes_values_or_names() -> None:
    with pytest.raises(TypeError) as refused:
        rendered("{{ '%s'|format(s, k=s) }}", s="a")
    assert "positional or keyword" in str(refused.value)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'aXbXc'|replace('X', s) }}", "a-b-c"),
        ("{{ 'aXbXc'|replace('X', s, 1) }}", "a-bXc"),
        ("{{ 'aXbXc'|replace('X', s, 0) }}", "aXbXc"),
        ("{{ 'ab'|replace('', s) }}", "-a-b-"),
        ("{{ 'ab'|replace('', s, 1) }}", "-ab"),
        ("{{ 'ab'.replace('', s, 2) }}", "-a-b"),
        ("{{ '1a1'|replace(1, s) }}", "-a-"),
    ],
)
def test_replace_honours_the_count(source: str, text: str) -> None:
    assert str.__str__(rendered(source, s="-")) == text


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ {'é': s}|tojson }}", '{"é": "a<"}'),
        ("{{ {'é': s}|tojson(ensure_ascii=true) }}", '{"\\u00e9": "a<"}'),
        ("{{ {'y': 1, 'x': s}|tojson(sort_keys=true) }}", '{"x": "a<", "y": 1}'),
        ("{{ {'y': 1, 'x': s}|tojson }}", '{"y": 1, "x": "a<"}'),
        ("{{ [1, s]|tojson(separators=(',', ':')) }}", '[1,"a<"]'),
        ("{{ [s]|tojson(indent=1) }}", '[\n "a<"\n]'),
    ],
)
def test_json_equals_that_of_transformers_and_is_content(source: str, text: str) -> None:
    found = rendered(source, s="a<")
    assert str.__str__(found) == text
    assert set(origins(found)) == {1}
    without: Any = rendered(source.replace("s}", "'a<'}").replace("s]", "'a<']"))
    assert str.__str__(without) == text
    assert set(origins(without)) == {None}
