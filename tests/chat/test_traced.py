"""Traced strings against plain ones. The alphabets of the sources differ, so each character shows its source."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.budget import examples
from support.origins import check_exact, check_nothing_lost, origins, plain, strings, traced
from tito_core.chat.traced import Traced, concat, mark, mark_result, sources

numbers = st.integers(-7, 7)


def outcome(operation: Callable[..., Any], *args: Any) -> Any:
    try:
        return operation(*args)
    except (ValueError, TypeError, IndexError) as error:
        return type(error)


EXACT: dict[str, Callable[..., Any]] = {
    "add": lambda s, o, i, j: s + o,
    "strip": lambda s, o, i, j: s.strip(),
    "strip characters": lambda s, o, i, j: s.strip(o),
    "lstrip": lambda s, o, i, j: s.lstrip(o),
    "rstrip": lambda s, o, i, j: s.rstrip(),
    "removeprefix": lambda s, o, i, j: s.removeprefix(o[:2]),
    "removesuffix": lambda s, o, i, j: s.removesuffix(o[:2]),
    "split": lambda s, o, i, j: s.split(),
    "split at most": lambda s, o, i, j: s.split(None, i),
    "split at": lambda s, o, i, j: s.split(o[:1], i),
    "rsplit": lambda s, o, i, j: s.rsplit(maxsplit=i),
    "rsplit at": lambda s, o, i, j: s.rsplit(o[:1], i),
    "splitlines": lambda s, o, i, j: s.splitlines(),
    "splitlines with ends": lambda s, o, i, j: s.splitlines(True),
    "partition": lambda s, o, i, j: s.partition(o[:1]),
    "rpartition": lambda s, o, i, j: s.rpartition(o[:1]),
    "replace": lambda s, o, i, j: s.replace(o[:1] or "y", o),
    "replace some": lambda s, o, i, j: s.replace(o[:1] or "y", o[1:], i),
    "lower": lambda s, o, i, j: s.lower(),
    "upper": lambda s, o, i, j: s.upper(),
    "slice": lambda s, o, i, j: s[i:j],
    "slice open": lambda s, o, i, j: (s[i:], s[:j]),
    "index": lambda s, o, i, j: s[i],
    "wrong index": lambda s, o, i, j: s["x"],
    "iterate": lambda s, o, i, j: list(s),
    "reversed": lambda s, o, i, j: list(reversed(s)),
    "join": lambda s, o, i, j: s.join([o, s, o]),
    "copy": lambda s, o, i, j: copy.deepcopy([s, copy.copy(o)]),
}
CAUTIOUS: dict[str, Callable[..., Any]] = {
    "replace nothing": lambda s, o, i, j: s.replace("", o),
    "step": lambda s, o, i, j: s[i : j : i or 1],
    "backwards": lambda s, o, i, j: s[::-1],
    "times": lambda s, o, i, j: (s * i, j * s),
    "capitalize": lambda s, o, i, j: s.capitalize(),
    "title": lambda s, o, i, j: s.title(),
    "swapcase": lambda s, o, i, j: s.swapcase(),
    "casefold": lambda s, o, i, j: s.casefold(),
    "center": lambda s, o, i, j: s.center(15, ":"),
    "justify": lambda s, o, i, j: (s.ljust(15, o[:1] or "x"), s.rjust(15)),
    "zfill": lambda s, o, i, j: s.zfill(9),
    "expandtabs": lambda s, o, i, j: s.expandtabs(),
    "translate": lambda s, o, i, j: s.translate({ord("x"): o, ord("а"): "y"}),
    "percent": lambda s, o, i, j: (s + "%s") % o,
    "percent of": lambda s, o, i, j: "%s:" % s,  # noqa: UP031 - the operator is what is tested
    "format": lambda s, o, i, j: format(s, ""),
}
SAME: dict[str, Callable[..., Any]] = {
    "find": lambda s, o: (s.find(o), s.count(o), len(s), o in s),
    "compare": lambda s, o: (s == o, s != o, s < o, hash(s), {s: 1}.get(o), bool(s)),
    "affixes": lambda s, o: (s.startswith(o), s.endswith((o, "x")), s.isspace(), s.isupper(), s.encode()),
}


@pytest.mark.parametrize("name", EXACT)
def test_operations_keep_the_source_of_each_character(name: str) -> None:
    @settings(deadline=None, max_examples=examples(60))
    @given(traced, strings, numbers, numbers)
    def check(s: str, o: str, i: int, j: int) -> None:
        found = outcome(EXACT[name], s, o, i, j)
        assert plain(found) == outcome(EXACT[name], plain(s), plain(o), i, j)
        check_exact(found)

    check()


@pytest.mark.parametrize("name", CAUTIOUS)
def test_other_operations_lose_no_content(name: str) -> None:
    @settings(deadline=None, max_examples=examples(40))
    @given(traced, strings, numbers, numbers)
    def check(s: str, o: str, i: int, j: int) -> None:
        found = outcome(CAUTIOUS[name], s, o, i, j)
        assert plain(found) == outcome(CAUTIOUS[name], plain(s), plain(o), i, j)
        check_nothing_lost(found)

    check()


@pytest.mark.parametrize("name", SAME)
@settings(deadline=None, max_examples=13)
@given(s=strings, o=strings)
def test_predicates_return_the_same_as_for_plain_strings(name: str, s: str, o: str) -> None:
    assert SAME[name](s, o) == SAME[name](plain(s), plain(o))


def test_adding_another_type_is_a_type_error() -> None:
    with pytest.raises(TypeError):
        Traced.content("а", 1) + 1  # type: ignore[operator]
    with pytest.raises(TypeError):
        1 + Traced.content("а", 1)  # type: ignore[operator]


@pytest.mark.parametrize("text", ["ß", "ŉа", "İ", "ﬁ"])
def test_a_case_change_with_another_length_is_all_content(text: str) -> None:
    mixed = "x" + Traced.content(text, 1)
    for changed, expected in ((mixed.upper(), ("x" + text).upper()), (mixed.lower(), ("x" + text).lower())):
        assert plain(changed) == expected
        assert all(o is not None for o in origins(changed)[1:])


def test_a_traced_string_without_spans_is_content() -> None:
    assert origins(Traced("ab")) == [-1, -1]
    assert origins(Traced.of("ab", ())) == [None, None]
    assert Traced().spans == ()


@pytest.mark.parametrize(
    "holder",
    [
        [Traced.content("a", 4)],
        (("x", [Traced.content("a", 4)]),),
        {"x": {Traced.content("a", 4): 1}},
        {"x": Traced.content("a", 4)}.values(),
        {"x": Traced.content("a", 4)}.items(),
        {Traced.content("a", 4): "x"}.keys(),
        {Traced.content("a", 4)},
        frozenset([Traced.content("a", 4)]),
    ],
)
def test_content_is_found_anywhere_in_a_value(holder: Any) -> None:
    assert list(sources(holder)) == [4]
    assert origins(mark("<x>", holder)) == [4, 4, 4]


def test_opaque_objects_may_hold_content() -> None:
    assert list(sources([b"a", object()])) == [-1, -1]
    assert list(sources(["a", 1, 2.0, True, None])) == []


LETTERS = st.text("ab ,\n", max_size=12)


def numbered(text: str) -> Traced:
    """Return a string in which the source of each character is its position."""
    return Traced.of(text, ((i, i + 1, i) for i in range(len(text))))


@pytest.mark.parametrize("separator", [None, " ", ",", "a", "ab", "aa"])
@settings(deadline=None, max_examples=33)
@given(text=LETTERS, most=st.integers(-1, 3))
def test_equal_pieces_keep_their_positions(separator: str | None, text: str, most: int) -> None:
    whole = numbered(text)
    for pieces in (whole.split(separator, most), whole.rsplit(separator, most)):
        places = [origins(piece) for piece in pieces]
        assert ["".join(text[place or 0] for place in piece) for piece in places] == list(map(plain, pieces))
        in_order = [place for piece in places for place in piece if place is not None]
        assert in_order == sorted(set(in_order))
        if separator is not None:
            starts = [0, *(len(separator) for _ in pieces[1:])]
            assert sum(starts) + len(in_order) == len(text)
            assert all(text[piece[-1] + 1 :].startswith(separator) for piece in places[:-1] if piece)


@settings(deadline=None, max_examples=20)
@given(text=LETTERS, ends=st.booleans())
def test_equal_lines_keep_their_positions(text: str, ends: bool) -> None:
    at = 0
    for line in numbered(text).splitlines(ends):
        assert origins(line) == list(range(at, at + len(line)))
        at += len(line) + (not ends)
    assert at >= len(text)


def test_equality_ignores_the_source() -> None:
    first, second = Traced.content("a", 1), Traced.content("a", 2)
    assert first == second == "a"
    assert first != Traced.content("b", 1)
    assert {first: "x"}[second] == {first: "x"}["a"] == "x"


@pytest.mark.parametrize("count", [0, 1, 2, -1])
def test_replacing_the_empty_string_honours_the_count(count: int) -> None:
    found = numbered("ab").replace("", "-", count)
    assert plain(found) == "ab".replace("", "-", count)
    assert None not in origins(found)


def test_conservative_marks_every_string_of_a_result() -> None:
    content = Traced.content("a", 4)
    assert [origins(text) for text in mark_result(["xy", ["z"]], (content,))[0:1]] == [[4, 4]]
    nested = mark_result(["xy", ["z"], 1], ([content], {}))
    assert (plain(nested), origins(nested[0]), origins(nested[1][0])) == (["xy", ["z"], 1], [4, 4], [4])
    assert origins(mark_result("xy", ("b", 1))) == [None, None]
    assert mark_result(7, (content,)) == 7


def test_a_partly_traced_result_is_all_content() -> None:
    assert origins(mark_result(concat(["x", Traced.content("a", 4), "y"]), ())) == [4, 4, 4]


@given(strings, strings, st.text(max_size=4))
def test_addition_equals_joining(s: str, o: str, between: str) -> None:
    for left, right in ((s, o), (s, between), (between, o), (s, Traced.of(between, ())), (Traced.of(between, ()), o)):
        added, joined = left + right, concat((left, right))
        assert (type(added), plain(added)) == (type(joined), plain(joined))
        assert getattr(added, "spans", ()) == getattr(joined, "spans", ())


def test_one_piece_is_returned_unchanged() -> None:
    content = Traced.content("x", 1)
    assert concat([content]) is content
    assert type(concat([Traced.of("x", ())])) is str


class Name(str):
    """A string type of someone else's, as enumerations have."""


class Adds:
    """An object that knows itself how to be added to a string, as Jinja's undefined values do."""

    def __radd__(self, other: str) -> str:
        return "its own"


def test_other_types_of_strings_keep_the_trace_and_other_objects_add_themselves() -> None:
    content = Traced.content("а", 1)
    for found, expected in ((Name("x") + content, [None, 1]), (content + Name("x"), [1, None])):
        assert origins(found) == expected
        assert isinstance(found, Traced)
    assert content + Adds() == "its own"


@pytest.mark.parametrize("suffix", ["", "a", "ba", "x", "aba", "xaba"])
def test_a_removed_affix_takes_its_characters_and_no_others(suffix: str) -> None:
    for text in ("aba", "", "xyzaba"):
        ended, begun = numbered(text).removesuffix(suffix), numbered(text[::-1]).removeprefix(suffix[::-1])
        assert (plain(ended), plain(begun)) == (text.removesuffix(suffix), text[::-1].removeprefix(suffix[::-1]))
        assert origins(ended) == list(range(len(ended)))
        assert origins(begun) == list(range(len(text) - len(begun), len(text)))


def test_pieces_of_several_kinds_are_joined_with_their_places() -> None:
    pieces = ["x", Traced.content("ab", 1), Traced.of("y", ()), Name("z"), Traced.content("c", 2)]
    assert origins(concat(pieces)) == [None, 1, 1, None, None, 2]
    assert type(concat(["x", "y"])) is str
