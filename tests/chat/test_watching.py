"""What a template did with opaque content holds for other content, whatever of Jinja and of `str` it used."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.filters import FILTERS
from jinja2.tests import TESTS

from chat.test_environment import CAUTIOUS, EXACT
from tito_core.chat.environment import compile_template, render
from tito_core.chat.opaque import Guard, Leaf, Watch
from tito_core.chat.traced import Traced
from tito_core.chat.watching import watch_render

Arguments = dict[str, Any]
VALUES: list[tuple[tuple[str, str, str], Arguments]] = [
    (("xyZ", "xx", ":"), {"x": "y", "n": 1, "f": True, "z": None, "l": [1], "e": "e"}),
    (("x", "x", "x"), {"k": "x", "x": 2, "get": False, "items": None, "m": ["x"], "q": ""}),
    ((" \n", "7", "%s"), {"n": " ", "a": 0, "b": True, "c": None, "d": [], "x": "<b>"}),
    (("a{}b", "Z x", "xyZ:x"), {"A": "1", "B": -3, "C": False, "D": None, "E": [[]], "F": "x"}),
    (("1", "True", "é日"), {"1": "x", "2": 17, "3": True, "4": None, "5": ["a", "b"], "6": "y"}),
]
STRINGS = sorted(name for name in dir(str) if not name.startswith("_"))
GIVEN = ("", "'x'", "o", "'x', 'y'", "1", "s, o")
OPERATORS = ("+", "~", "*", "%", "==", "!=", "<", ">=", "in", "not in", "and", "or", "//")
OPERANDS = ("'x'", "'xyZ'", "''", "o", "1", "none", "true", "['x', s]", "[o]", "{'x': 1}", "a", "nothing")


RANDOM = {"random"}
"""What is another thing each time has no rendering to be equal to."""


def _snippets() -> list[str]:
    found = []
    for name, given_ in product(sorted(FILTERS.keys() - RANDOM), GIVEN):
        called = f"{name}({given_})" if given_ else name
        found += [f"{{{{ s|{called} }}}}", f"{{{{ a|{called} }}}}", f"{{{{ [s, o]|{called} }}}}"]
        found += [f"{{% if s|{called} %}}A{{% endif %}}", f"{{{{ 'xyx'|{called} }}}}"]
    for name in sorted(FILTERS.keys() - RANDOM):
        found += [
            f"{{{{ [s, o]|map('{name}')|list|join('.') }}}}",
            f"{{% filter {name} %}}x{{{{ s }}}}{{% endfilter %}}",
        ]
    for name, given_, of in product(sorted(TESTS), ("", "o", "'x'", "s"), ("s", "a", "'x'", "[s]", "nothing")):
        found.append(f"{{{{ 'A' if {of} is {name}({given_}) else 'B' }}}}" if name[0].isalpha() else "")
    for name, chosen in product(sorted(TESTS), ("select", "reject")):
        found += [f"{{{{ [s, o, 'x', 7]|{chosen}('{name}')|list|length }}}}"]
        found += [f"{{{{ [s, o]|{chosen}('{name}', 'x')|list|join }}}}"]
        found += [f"{{{{ [{{'k': s}}, {{'k': 'x'}}]|{chosen}attr('k', '{name}')|list|length }}}}"]
    for name, given_ in product(STRINGS, GIVEN):
        found += [f"{{{{ s.{name}({given_}) }}}}", f"{{% if s.{name}({given_}) %}}A{{% endif %}}"]
        found += [f"{{{{ ('x' ~ s).{name}({given_}) }}}}", f"{{{{ 'xyx'.{name}({given_}) }}}}"]
        found += [f"{{{{ (s|tojson).{name}({given_}) }}}}", f"{{{{ s.strip().{name}({given_}) }}}}"]
    for operator, operand in product(OPERATORS, OPERANDS):
        found += [f"{{{{ s {operator} {operand} }}}}", f"{{{{ {operand} {operator} s }}}}"]
        found += [f"{{{{ 'A' if (s ~ 'x') {operator} {operand} else 'B' }}}}"]
        found += [f"{{{{ 'A' if (a|tojson) {operator} {operand} else 'B' }}}}", f"{{{{ a {operator} {operand} }}}}"]
    return [each for each in found if each]


MORE = [
    "{{ s[0] }}",
    "{{ s[1:] }}",
    "{{ s.x }}",
    "{{ s['x'] is defined }}",
    "{{ -s }}",
    "{{ not s }}",
    "{{ not a }}",
    "{{ s() }}",
    "{{ {s: 'x'} }}",
    "{{ {'xyZ': 'A'}[s] }}",
    "{{ {'xyZ': 'A'}.get(s, 'B') }}",
    "{{ 'xyZ'[s] }}",
    "{{ range(s|int) }}",
    "{{ 'A' if [s] == ['xyZ'] else 'B' }}",
    "{{ 'A' if {'k': s} == {'k': o} else 'B' }}",
    "{{ 'A' if s == s else 'B' }}",
    "{{ 'A' if s.strip() == o.strip() else 'B' }}",
    "{{ raise_exception(s) }}",
    "{{ raise_exception('x') if 'xyZ' in s }}",
    "{{ strftime_now(s) }}",
    "{% for c in s %}{{ c }}{% endfor %}",
    "{% for k in a %}{{ k }}{% endfor %}",
    "{% for k, v in a.items() %}{{ loop.index }}{% endfor %}",
    "{% for k, v in a|items %}{{ 'A' if v is string else 'B' }}{{ 'C' if v is none }}{{ loop.last }}{% endfor %}",
    "{% for k, v in a.items() %}{{ 'A' if v else 'B' }}{% endfor %}",
    "{% for k, v in a.items() %}{{ 'A' if k == 'x' else 'B' }}{% endfor %}",
    "{% for k, v in a.items() %}{{ v is true }}{{ v is mapping }}{{ v is boolean }}{{ v is number }}{% endfor %}",
    "{% for k, v in a.items() %}{{ v == none }}{{ v != none }}{{ none == v }}{{ v in [none] }}{% endfor %}",
    "{{ s == none }}{{ a == none }}{{ none != s }}{{ s is not none }}{{ (s ~ o) == none }}",
    "{{ 'A' if s.items is defined else 'B' }}{{ 'A' if s.items else 'B' }}{{ s.items }}",
    "{{ 'A' if a.strip is defined else 'B' }}{{ a.startswith is defined }}{{ a.x is defined }}",
    "{% set n = namespace(xyZ='A', x='B') %}{{ n[s] }}",
    "{% set n = namespace(xyZ='A', x='B') %}{{ n[s] is defined }}",
    "{% for i in [1] %}{{ loop[s] }}{{ loop[o] is defined }}{% endfor %}",
    "{% macro xyZ() %}{% endmacro %}{{ xyZ[s] }}{{ xyZ[s] is defined }}",
    "{{ 5[s] is defined }}{{ true[s] is defined }}{{ 1.5[s] is defined }}{{ none[s] is defined }}{{ nothing[s] }}",
    "{{ [1][s] is defined }}{{ (1, 2)[o] is defined }}{{ 'xyZ'[o] is defined }}{{ range(3)[s] is defined }}",
    "{{ [s][0] }}{{ {'k': s}['k'] }}{{ (s, o)[1] }}{{ {'k': [s]}.k[0] }}",
    "{% set i = a|items %}{% for x in i %}{% endfor %}{% for x in i %}A{% endfor %}",
    "{{ 'A' if a.items() is sequence else 'B' }}{{ 'A' if (a|items) is sequence else 'B' }}",
    "{{ a.items()[0] }}{{ (a|items)|first }}{{ a|dictsort|first|first }}",
    "{{ 'A' if a == {} else 'B' }}{{ 'A' if a is mapping else 'B' }}{{ 'A' if a != none else 'B' }}",
    "{{ 't'.encode().decode() ~ s }}{{ 't'.encode().decode() + s }}",
    "{{ ([['t' ~ s]]|sum(start=[]))[0] }}",
    "{{ ([s]|map('trim')|list)[0] }}{{ [[s]|map('upper')|list]|sum(start=[])|list|join }}",
    "{% for c in [s, o] %}{{ loop.changed(c) }}{% endfor %}",
    "{% for c in [s, o, s] %}{{ loop.previtem == c }}{{ loop.previtem is defined }}{% endfor %}",
    "{{ [s, o].index(o) }}{{ [s, o].count('x') }}{{ (s, o).index(s) }}",
    "{{ {'k': s} | tojson }}{{ [s, {'k': [o]}] | tojson(indent=1) }}{{ ({'k': a} | tojson) ~ s }}",
    "{{ s.is_text }}",
    "{{ s.parts }}",
    "{{ s.parts is defined }}",
    "{{ s._watch is defined }}",
    "{{ a.count is defined }}",
    "{% for k, v in a.items() %}{{ v|length }}{% endfor %}",
    "{% for k, v in a.items() %}{{ v|string ~ k }}{% endfor %}",
    "{% for k, v in a.items() %}{% for w in v %}{{ w }}{% endfor %}{% endfor %}",
    "{% for k, v in a|dictsort %}{{ 'A' if v is string else 'B' }}{% endfor %}",
    "{{ a|length }}{{ 'A' if a|length > 2 else 'B' }}",
    "{{ a.x }}{{ a['x'] }}{{ a.get('x') }}",
    "{{ 'x' in a }}",
    "{{ a.keys()|list }}{{ a.values()|list|length }}",
    "{{ 'A' if (a|tojson) else 'B' }}{{ 'A' if a|string else 'B' }}",
    "{% block b %}{{ 'A' if s is string else 'B' }}{% endblock %}",
    "{% autoescape true %}{{ s }}{% endautoescape %}",
    "{% if s is string %}{{ s }}{% else %}{{ s|tojson }}{% endif %}",
    "{% if s.startswith('x') and not s.endswith('y') %}{{ s.strip() }}{% else %}{{ s|tojson }}{% endif %}",
    "{% set n = namespace(x=s) %}{{ 'A' if n.x in ['x', o] else 'B' }}{{ n.x|trim('x') }}",
    "{% macro m(t) %}{{ 'A' if t is string and t != 'x' else 'B' }}{{ t }}{% endmacro %}{{ m(s) }}{{ m(s).strip() }}",
]
FOLLOWED = {
    "{{ s }}": 3,
    "{{ s|trim('y') }}{{ o.strip('y') }}": 3,
    "{{ 'A' if s.startswith('x') else 'B' }}": 3,
    "{{ 'A' if 'Z' in s and s is string and s != o else 'B' }}": 3,
    "{{ s|tojson }}": 3,
    "{{ [s, o]|select('string')|list|length }}": 3,
    "{% for k, v in a.items() %}{{ 'A' if v is string else 'B' }}{% endfor %}": 0,
    "{% for k, v in a|items %}{{ v }}{% endfor %}": 0,
    "{{ 'A' if a else 'B' }}{{ 'A' if a is mapping else 'B' }}{{ 'A' if (a|tojson) else 'B' }}": 3,
    "{% generation %}{{ s ~ 'x' }}{% endgeneration %}": 3,
    "{{ 'A' if s == none or none == a else 'B' }}": 3,
    "{{ a }}{{ a ~ s }}": 3,
    "{% block b %}{{ s }}{% endblock %}": 0,
}
"""Snippets, and on how many of the first three contents they are."""

Watched = tuple[Sequence[str | Leaf], Sequence[Guard]]


def watched(template: Any, values: Sequence[str]) -> Watched | None:
    """Render with opaque content; give what was written, and the guards."""
    watch = Watch(values)
    s, o, p = map(watch.content, range(3))
    variables = {"s": s, "o": o, "p": p, "m": {"k": {"n": o}}, "a": watch.arguments()}
    parts = watch_render(template, variables, watch)
    return None if parts is None else (parts, watch.guards)


def replayed(found: Watched, values: Sequence[str]) -> tuple[str, list[bool]] | None:
    """Write around other content; None where that is not known, or the template would learn something else."""
    parts, guards = found
    if any(guard.learnt(values) is not guard.outcome for guard in guards):
        return None
    if any(isinstance(part, Leaf) and not part.is_known for part in parts):
        return None
    text, content = "", list[bool]()
    for part in parts:
        piece = Traced.content(part.of(values), 1) if isinstance(part, Leaf) else part
        assert piece or not isinstance(part, Leaf)
        content += marked(piece)
        text += str.__str__(piece)
    return text, content


def marked(text: str) -> list[bool]:
    """Tell which characters are content."""
    content = [False] * len(text)
    for start, stop, _ in text.spans if isinstance(text, Traced) else ():
        content[start:stop] = [True] * (stop - start)
    return content


def traced(value: Any) -> Any:
    """Mark strings as content, as `messages.trace` does."""
    if isinstance(value, str):
        return Traced.content(value, 1)
    if isinstance(value, dict):
        return {traced(key): traced(item) for key, item in value.items()}
    return [traced(item) for item in value] if isinstance(value, list) else value


def rendered(template: Any, values: Sequence[str], arguments: Arguments) -> tuple[str, list[bool]]:
    """Render with that content itself."""
    s, o, p = map(traced, values)
    text = render(template, {"s": s, "o": o, "p": p, "m": {"k": {"n": o}}, "a": traced(arguments)})
    return str.__str__(text), marked(text)


def check(source: str) -> int:
    """Watch a snippet at each content, and hold what was written around each other one against its rendering.

    Returns:
        How often what was written around other content was known.
    """
    try:
        template = compile_template(f"{source}|{{{{ o }}}}")
    except Exception:
        return 0  # no such filter, or arguments that it does not take
    known = 0
    for values, _ in VALUES:
        found = watched(template, values)
        for others, more in VALUES if found is not None else ():
            again = None if found is None else replayed(found, others)
            if again is not None:
                wanted = rendered(template, others, more)
                known += 1
                # A generator that is written out shows its address.
                assert again == wanted or " at 0x" in wanted[0], (source, values, others)
    return known


SNIPPETS = [*_snippets(), *MORE, *EXACT, *CAUTIOUS]


@pytest.mark.parametrize("part", range(20))
def test_what_was_written_around_content_is_written_around_other_content(part: int) -> None:
    known = sum(bool(check(source)) for source in SNIPPETS[part::20])
    assert known > 10


def test_there_are_thousands_of_snippets() -> None:
    assert len(SNIPPETS) > 4000


@pytest.mark.parametrize("source", FOLLOWED)
def test_what_templates_usually_do_is_followed(source: str) -> None:
    template = compile_template(f"{source}|{{{{ o }}}}")
    found = [watched(template, values) for values, _ in VALUES[:3]]
    assert sum(each is not None for each in found) == FOLLOWED[source]


LETTERS = st.text("xyZ :7{%\n", min_size=1, max_size=5)


@pytest.mark.parametrize("source", [*MORE, *EXACT, *FOLLOWED])
def test_so_it_is_around_any_content(source: str) -> None:
    template = compile_template(f"{source}|{{{{ o }}}}")

    @settings(deadline=None, max_examples=15)
    @given(st.tuples(LETTERS, LETTERS, LETTERS), st.tuples(LETTERS, LETTERS, LETTERS), st.sampled_from(["y", "x", ""]))
    def holds(values: tuple[str, ...], others: tuple[str, ...], other: str) -> None:
        found = watched(template, values)
        for content in (values, others):
            again = None if found is None else replayed(found, content)
            assert again is None or again == rendered(template, content, {"x": other})

    holds()


def test_what_was_refused_is_void_though_the_error_was_swallowed() -> None:
    template = compile_template("{{ s }}")
    template.environment.filters["quiet"] = _quiet
    swallowing = template.environment.from_string("{{ 'x' if [s]|quiet else 'y' }}{{ o }}")
    assert watched(swallowing, VALUES[0][0]) is None


def _quiet(value: list[Any]) -> bool:
    try:
        return len(value[0]) > 2
    except Exception:
        return False
