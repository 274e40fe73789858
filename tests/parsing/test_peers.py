"""What other parsers get wrong, format by format; the first test of each kind of failure, beside the properties."""

from __future__ import annotations

import re

import pytest

from parsing.families import FAMILIES, GUARD, NAMES, Call, dumps, ids_of, parse, plain, unguarded
from tito_core.parsing import CallStatus

OK, MALFORMED, TRUNCATED = CallStatus.OK, CallStatus.MALFORMED, CallStatus.TRUNCATED
CLOSING = {name: family.control[1] for name, family in FAMILIES.items() if len(family.control) > 1}
IN_JSON = [
    name
    for name, family in FAMILIES.items()
    if re.search(r'[:>}\]]? ?\{"at": "x"\}', family.render([("f", {"at": "x"})]))
]


@pytest.mark.parametrize("name", IN_JSON)
@pytest.mark.parametrize(
    "arguments", ['{"at": "x"', '{"at": x}', "{'at': 'x'}", '{"at": "x",}', '["x"]', '"x"', "null", ""]
)
def test_broken_arguments_are_not_read_as_none(name: str, arguments: str) -> None:
    """Elsewhere they become `{}`, and the tool runs with its defaults."""
    family = FAMILIES[name]
    said = family.render([("look", {"at": "x"})]).replace('{"at": "x"}', arguments)
    turn = parse(family, ids_of(family, said))
    assert [call.status for call in turn.calls] == [MALFORMED]
    assert turn.calls[0].name in (None, "look")


@pytest.mark.parametrize("name", sorted(CLOSING))
def test_a_string_may_spell_the_closing_tag(name: str) -> None:
    """Elsewhere the call is cut there."""
    family = FAMILIES[name]
    for tag in family.control:
        calls: list[Call] = [("look", {"at": f"say {tag[0]}{GUARD}{tag[1:]} now", "of": "b"})]
        turn = parse(family, ids_of(family, family.render(calls)), calls)
        assert [(call.status, call.arguments) for call in turn.calls] == [(OK, unguarded(calls[0][1]))]


@pytest.mark.parametrize("name", NAMES)
def test_a_call_that_does_not_end_is_no_answer(name: str) -> None:
    """Elsewhere a turn without its closing tag is a final answer."""
    family = FAMILIES[name]
    ids = ids_of(family, family.render([("look", {"at": "x"})]))
    assert [call.status for call in parse(family, ids[:-1]).calls] in ([MALFORMED], [MALFORMED, MALFORMED])
    assert [call.status for call in parse(family, ids[:-1], truncated=True).calls][-1:] in ([TRUNCATED], [OK])


@pytest.mark.parametrize("name", [name for name in NAMES if not FAMILIES[name].one])
def test_twelve_calls_keep_their_order(name: str) -> None:
    """Elsewhere ten or more are sorted as text."""
    family = FAMILIES[name]
    calls: list[Call] = [(f"tool_{i}", {"at": f"{i}"}) for i in range(12)]
    turn = parse(family, ids_of(family, family.render(calls)), calls)
    assert [(call.name, call.arguments) for call in turn.calls] == calls


@pytest.mark.parametrize("name", NAMES)
def test_a_tool_that_nobody_has_is_a_good_call(name: str) -> None:
    """Elsewhere it is dropped, and the policy never learns that it was wrong."""
    family = FAMILIES[name]
    turn = parse(family, ids_of(family, family.render([("nobody", {"at": "x"})])), [("look", {})])
    assert [(call.status, call.name, call.arguments) for call in turn.calls] == [(OK, "nobody", {"at": "x"})]


@pytest.mark.parametrize("name", [name for name in NAMES if FAMILIES[name].typed])
@pytest.mark.parametrize(
    "value", ["5", "true", "null", " x ", "\n\tdef f():\n\t\treturn 1\n", "[1]", '"x"', "", "0.10"]
)
def test_strings_stay_strings_to_the_last_blank(name: str, value: str) -> None:
    """Elsewhere "5" becomes a number, and indentation is lost."""
    family = FAMILIES[name]
    calls: list[Call] = [("look", {"at": value})]
    [call] = parse(family, ids_of(family, family.render(calls)), calls).calls
    assert call.arguments == {"at": value}
    assert plain(value) == value != dumps(value)


def test_a_bracket_in_an_argument_does_not_end_the_array() -> None:
    """Elsewhere Phi-4-mini's array is cut at the first `]`."""
    family = FAMILIES["phi4_mini"]
    calls: list[Call] = [("look", {"at": "a] b", "all": [[1], [2]]})]
    assert [call.arguments for call in parse(family, ids_of(family, family.render(calls))).calls] == [calls[0][1]]
