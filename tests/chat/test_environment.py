"""Templates over traced variables render the text of transformers, and no content loses its spans."""

from __future__ import annotations

from typing import Any

import jinja2
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from support.budget import examples
from support.origins import check_exact, check_nothing_lost, origins, plain, strings
from tito_core.chat.rendering import compile_template, render
from tito_core.chat.traced import Traced

EXACT = [
    "x{{ s }}y",
    "{{ s ~ o ~ 'x' }}",
    "{{ 'x' ~ s ~ 7 }}",
    "{{ s + o }}{{ 'x' + s }}{{ s + 'x' }}",
    "{{ [s, 'x', o]|join(p) }}",
    "{{ [s, o]|join }}",
    "{{ [{'k': s}, {'k': o}]|join(':', attribute='k') }}",
    "{{ ':'.join([s, 'x', o]) }}",
    "{{ p.join([s, o]) }}",
    "{{ s|replace('x', o) }}",
    "{{ 'xyxy'|replace('x', s, 1) }}",
    "{{ 'xyxy'.replace('x', s) }}{{ 'xyxy'|replace('x', s, 0) }}{{ '1x1'|replace(1, s) }}",
    "{{ s.replace('x', 'y') }}",
    "{{ s|trim }}{{ s|trim('x') }}{{ s.strip() }}{{ ' x '|trim }}",
    "{{ s|upper }}{{ s|lower }}{{ s.upper() }}",
    "{{ s|string }}{{ s|safe }}{{ s|default('x') }}{{ nothing|default(s) }}{{ nothing or s }}",
    "{{ [s, o]|first }}{{ [s, o]|last }}{{ s|first|default('x') }}{{ s|list|last|default('x') }}",
    "{{ [s, o]|map('upper')|join }}{{ [{'k': s}]|map(attribute='k')|join }}",
    "{{ [s, 'x']|select('string')|list|join }}{{ [s, o]|reverse|join }}",
    "{% for k, v in {'x': s, 'y': o}|dictsort %}{{ k }}{{ v }}{% endfor %}",
    "{% for k, v in {'x': s}.items() %}{{ k }}{{ v }}{% endfor %}{% for k, v in {'x': s}|items %}{{ v }}{% endfor %}",
    "{% for c in s %}{{ c }}:{% endfor %}{% for w in s.split() %}{{ w }}x{% endfor %}",
    "{{ s[1:] }}{{ s[:-1] }}{{ s[0] }}{{ s[99] }}",
    "{{ s.split('x')[-1] }}{{ s.rsplit('x', 1)[0] }}{{ s.partition('x')[2] }}",
    "{{ 'x%sy%%:%s' % (s, o) }}{{ 'x%s' % s }}",
    "{{ '%s:%s'|format(s, o) }}{{ '%(x)s:'|format(x=s) }}",
    "{{ 'x{}y{}{{}}'.format(s, o)|replace('{', '')|replace('}', '') }}{{ '{x}:'.format(x=s) }}",
    "{{ '{x}:'.format_map({'x': s}) }}{{ '%(k)s:' % {'k': s} }}",
    "{% macro m(obj, context='y') %}x{{ obj }}{{ context }}{% endmacro %}{{ m(s) }}{{ m(obj=o, context=s) }}",
    "{% macro m() %}x{{ caller() }}{% endmacro %}{% call m() %}{{ s }}{% endcall %}",
    "{% set b %}x{{ s }}{% endset %}{{ b }}{{ b|trim }}",
    "{% set n = namespace(t='x') %}{% for c in [s, o] %}{% set n.t = n.t ~ c %}{% endfor %}{{ n.t }}",
    "{% filter upper %}x{{ s }}{% endfilter %}",
    "{% set v = 'x' %}{% generation %}{% set v = 'y' %}{{ s }}{{ v }}{% endgeneration %}{{ v }}",
    "{% for c in [s, o] %}{% generation %}{{ c }}{{ loop.index }}{% endgeneration %}{% endfor %}",
    "{% for c in [s, o] %}{% if loop.last %}{% continue %}{% endif %}{{ c }}{{ loop.nextitem }}{% endfor %}",
    "{% if s == o or s in o or s.startswith('x') %}x{% else %}{{ s }}{% endif %}",
    "{% block b %}{{ s }}{% endblock %}{{ self.b() }}",
    "{% with t = s %}{{ t }}{% endwith %}{% if s is string %}{{ s|length }}{% endif %}",
    "{{ (s if s else o) }}{{ s and o }}{{ {'x': s}['x'] }}{{ {'x': s}.get('x') }}{{ nothing }}",
    "{{ {'items': s}.items is string }}{{ {'x': s}.y is defined }}{{ {'x': s}.y }}{{ {'get': s}['get'] }}{{ {}.x }}",
    "{{ s._x is defined }}{{ s.nothing is defined }}{{ s.x }}{% set n = namespace(x=s, y='x') %}{{ n.x }}{{ n.y }}",
    "{% for c in [s] %}{{ loop.nothing is defined }}{{ loop.length }}{{ loop.previtem is defined }}{% endfor %}",
    "{{ joiner(s)() }}{{ cycler(s, o).next() }}{{ dict(x=s).x }}",
    "{% set d = {'k': s, 'items': o} %}{{ d.k }}{{ d.items is string }}{{ d.z is defined }}{{ d.z }}",
    "{% set d = {'_k': s} %}{{ d._k }}{{ d._z is defined }}",
    "{% for d in [{'k': s}, {}, [s], s, 7, none] %}{{ d.k }}{{ d.k is defined }}{% endfor %}",
    "{% set loop = {'k': s} %}{{ loop.k }}{{ m.k.n }}{{ m.k.z is defined }}{{ (m.k).n }}{{ m['k'].n }}",
]
CAUTIOUS = [
    "{{ (s ~ '\n' ~ o)|indent }}{{ s|indent(2, first=true) }}",
    "{{ s|tojson }}{{ {'x': s}|tojson(indent=2) }}{{ [s]|tojson(separators=(',', ':'), sort_keys=true) }}",
    "{{ [s, o]|tojson(separators=[',', ':']) }}{{ [s, o]|tojson(separators=[', ', ': ']) }}{{ [s]|tojson(true) }}",
    "{{ {'x': s, 'y': [o]} }}{{ [s] }}{{ (s, o) }}{{ {'x': s}.values() }}{{ {'x': s}.items() }}",
    "{{ {'x': s}|string }}{{ 'x' ~ [s] }}{{ [[s], 'x']|join }}{{ [s]|trim }}{{ [s]|upper }}",
    "{{ s|title }}{{ s|capitalize }}{{ s|center(20) }}{{ s|wordwrap(3) }}{{ s|truncate(4, true) }}",
    "{{ s|e }}{{ s|forceescape }}{{ s|striptags }}{{ [s]|pprint }}{{ {'x': s}|xmlattr }}{{ s|urlize }}",
    "{{ s|reverse }}{{ s[::-1] }}{{ s[::2] }}{{ s * 2 }}{{ 2 * s }}",
    "{{ '%5s' % s }}{{ '%r' % s }}{{ '%s' % [s] }}{{ '%-9s:'|format(s) }}",
    "{{ '{:>9}'.format(s) }}{{ '{!r}'.format(s) }}{{ '{0[0]}'.format([s]) }}{{ '{}'.format([s]) }}",
    "{{ (s ~ '{}').format(o) }}{{ (s ~ '%s') % o }}",
    "{{ s.encode().decode() }}{{ s.center(30, 'x') }}{{ 'x'.center(30, ':') ~ s.title() }}",
    "{{ s.translate({120: o}) }}{{ 'x'.translate({120: s}) }}{{ 'x'.join(s) }}{{ 'x'.ljust(4, 'y') }}",
    "{{ [s, o]|unique|join }}{{ [s, o]|sort|join }}{{ [s, o]|max }}{{ [[s, o]|batch(1)|list] }}",
    "{{ namespace(x=s) }}{{ 'xy'|replace('', s) }}{{ 'xy'|replace('', s, 1) }}{{ 'xy'.replace('', s, 2) }}",
    "{{ '%s %(k)s' % {'k': s} }}{{ '%(k)3s' % {'k': s} }}{{ '{k:>3}'.format(k=s) }}{{ '{k!r}'.format_map({'k': s}) }}",
    "{{ {'é': s}|tojson(ensure_ascii=true) }}{{ {'y': 1, 'x': s}|tojson(sort_keys=true) }}",
]


def both(source: str, variables: dict[str, Any]) -> tuple[Traced, str]:
    (expected,), _ = render_jinja_template([[]], None, None, source, **plain(variables))
    return render(compile_template(source), {"messages": [], "tools": None, **variables}), expected


@pytest.mark.parametrize("source", EXACT)
def test_exactly_traced_expressions(source: str) -> None:
    @settings(deadline=None, max_examples=examples(15))
    @given(strings, strings, strings)
    def check(s: str, o: str, p: str) -> None:
        found, expected = both(source, {"s": s, "o": o, "p": p, "m": {"k": {"n": o}}})
        assert plain(found) == expected
        check_exact(found)

    check()


@pytest.mark.parametrize("source", CAUTIOUS)
def test_conservatively_traced_expressions_lose_no_content(source: str) -> None:
    @settings(deadline=None, max_examples=examples(15))
    @given(strings, strings)
    def check(s: str, o: str) -> None:
        found, expected = both(source, {"s": s, "o": o})
        assert plain(found) == expected
        check_nothing_lost(found)

    check()


@pytest.mark.parametrize(
    "source",
    [
        "{{ s + 1 }}",
        "{{ 'x' + [s] }}",
        "{{ s.index('?') }}",
        "{{ '%d' % s }}",
        "{{ s.join([1]) }}",
        "{{ s() }}",
        "{{ nobody.x }}",
        "{{ s.x.y }}",
    ],
)
def test_errors_are_those_of_plain_strings(source: str) -> None:
    with pytest.raises(Exception) as expected:
        both(source, {"s": "x"})
    with pytest.raises(expected.type):
        render(compile_template(source), {"s": Traced.content("x", 1)})


LOOKS = [
    "{{ x.NAME is defined }}{{ x['NAME'] is defined }}{{ x|attr('NAME') is defined }}",
    "{{ x.NAME is callable }}{{ x['NAME'] is callable }}{{ x|attr('NAME') is callable }}",
    "{{ (x ~ 'a').NAME is defined }}{{ x[0].NAME is callable }}{{ x.upper().NAME is defined }}",
    "{{ m.x.NAME is defined }}{{ m['x']['NAME'] is callable }}{{ (x if x else '').NAME is defined }}",
    "{{ ([x]|map(attribute='NAME')|first) is callable }}{{ ([x]|map('attr', 'NAME')|first) is defined }}",
    "{{ [x]|selectattr('NAME')|list|length }}{{ [x]|rejectattr('NAME', 'defined')|list|length }}",
    "{{ [x]|map(attribute='NAME')|join|length > 20 }}{{ [x]|unique(attribute='NAME')|list|length }}",
    "{% if x.NAME %}y{% endif %}{{ x.NAME|default('none')|string|length > 20 }}",
    "{{ [x]|groupby('NAME')|length }}",
    "{{ [x]|sort(attribute='NAME')|length }}",
    "{{ x.NAME() is string }}",
    "{{ x.NAME('a') is string }}",
    "{{ x.NAME.NAME is defined }}",
    "{{ [x]|sum(attribute='NAME', start=0) }}",
]
"""All ways to access an attribute of a text in a template."""
NAMES = [*dir(Traced), *(f"{name}_" for name in ("content", "spans", "of")), "text", "0"]
NAME = st.one_of(st.sampled_from(NAMES), st.from_regex(r"\A[a-z_][a-z0-9_]{0,8}\Z"))


def outcome(source: str, variables: dict[str, Any]) -> tuple[str, str]:
    """Return the results of transformers with plain text and of ours with traced text: rendering or error name."""
    found: list[str] = []
    for rendered in (
        lambda: render_jinja_template([[]], None, None, source, **plain(variables))[0][0],
        lambda: plain(render(compile_template(source), variables)),
    ):
        try:
            found.append(rendered())
        except Exception as error:  # whatever the template raises
            found.append(type(error).__name__)
    return found[0], found[1]


@pytest.mark.parametrize("look", LOOKS)
def test_traced_text_has_the_attributes_of_plain_text_only(look: str) -> None:
    @settings(deadline=None, max_examples=examples(30))
    @given(NAME)
    def check(name: str) -> None:
        text = Traced.content("ab", 1)
        expected, found = outcome(look.replace("NAME", name), {"x": text, "m": {"x": text}})
        assert found == expected

    for name in ("content", "spans", "of"):
        check = example(name)(check)
    check()


def test_templates_have_transformers_globals() -> None:
    with pytest.raises(jinja2.TemplateError, match="no such role"):
        render(compile_template("{{ raise_exception('no such role') }}"), {})
    assert both("{% for i in range(3) %}{{ i }}{% if i == 1 %}{% break %}{% endif %}{% endfor %}", {})[0] == "01"


@pytest.mark.parametrize("source", ["{{ s.__class__.__mro__ }}", "{{ {}.__class__.x }}", "{{ ''.__class__.x }}"])
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(jinja2.exceptions.SecurityError):
        render(compile_template(source), {"s": Traced.content("x", 1)})


def test_a_float_indent_is_an_error_after_an_equal_integer() -> None:
    for _ in range(2):
        assert str(render(compile_template("{{ [1]|tojson(indent=2) }}"), {})) == "[\n  1\n]"
        with pytest.raises(TypeError):
            render(compile_template("{{ [1]|tojson(indent=2.0) }}"), {})


def rendered(source: str, **variables: str) -> Traced:
    return render(compile_template(source), {name: Traced.content(text, 1) for name, text in variables.items()})


def test_text_that_resembles_an_inserted_value_is_content() -> None:
    # ".0" cuts the first value away, and the content spells what would have stood there.
    found = rendered("{{ '{:{}}{}'.format('a', '.0', s) }}", s="a.0")
    assert str.__str__(found) == "a.0"
    assert set(origins(found)) == {1}


def test_the_format_filter_takes_values_or_names() -> None:
    with pytest.raises(TypeError, match="positional or keyword"):
        rendered("{{ '%s'|format(s, k=s) }}", s="a")


def test_json_is_all_content_or_all_scaffold() -> None:
    for value, source in (("s", 1), ("'a<'", None)):
        found = rendered("{{ {'é': " + value + "}|tojson }}", s="a<")
        assert str.__str__(found) == '{"é": "a<"}'
        assert set(origins(found)) == {source}
