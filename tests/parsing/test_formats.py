"""Properties of every format: valid calls round-trip, cut ones do not run, drafts in reasoning are no calls."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parsing.families import CALL_FAMILIES, GUARD, NAMES, Call, Family, ids_of, parse, unguarded
from support.growth import expect_linear, opcodes
from tito_core.parsing import CallStatus, ParsedTurn, known_tool_parsers
from tito_core.parsing import registry as parser_registry

OK, MALFORMED, TRUNCATED = CallStatus.OK, CallStatus.MALFORMED, CallStatus.TRUNCATED
LOOK: list[Call] = [("look", {"at": "x", "far": 5}), ("count", {"of": "b"})]


SHARED = re.compile(r"^[^\x00-\x7f]+")


def calls_for(family: Family) -> list[Call]:
    return LOOK[:1] if family.single_call else LOOK


def check_spans(tokenizer: Any, ids: list[int], turn: ParsedTurn, shared: bool = True) -> None:
    """Check that the tokens of each call are those of its text; `shared`: two calls may share a token."""
    at = 0
    decode = tokenizer.backend_tokenizer.decode
    for call in turn.calls:
        assert at <= call.start < call.stop <= len(ids)
        raw = SHARED.sub("", call.raw)  # a character of several tokens belongs to the last of them
        assert raw in decode(ids[call.start : call.stop], False)
        ends = [decode([ids[at]], False) for at in (call.start, call.stop - 1)]
        # A token that is not a whole character belongs to its neighbour.
        whole = all(end and "\ufffd" not in end for end in ends)
        if raw and whole and call.stop - call.start > 2:  # the first and last token may be shared with the text around
            assert raw not in decode(ids[call.start + 1 : call.stop - 1], False)
        at = call.stop - shared


def test_every_registered_format_is_a_family() -> None:
    known = {parser_registry._ALIASES.get(name, name) for name in known_tool_parsers()}
    assert {name for name in known if "test" not in name} == set(NAMES)


text = st.text("ab1é漢🙂 \n\"'\\{}[]:,<>/_=()", max_size=8)


def guarded(family: Family, control: bool) -> st.SearchStrategy[str]:
    """Return strings; with `control`, some of them spell the format's tags."""
    if not control or not family.control:
        return text
    spelled = st.sampled_from([f"{tag[0]}{GUARD}{tag[1:]}" for tag in family.control])
    if family.think_tokens:
        spelled |= st.sampled_from([f"{tag[0]}{GUARD}{tag[1:]}" for tag in family.think_tokens])
    return text | st.tuples(text, spelled, text).map("".join)


def arguments(family: Family, control: bool = True) -> st.SearchStrategy[dict[str, Any]]:
    strings = guarded(family, control)
    scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | strings
    if not family.nested:
        return st.dictionaries(st.from_regex(family.keys, fullmatch=True), scalars, max_size=3)
    values = st.recursive(
        scalars,
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(family.nested_keys, max_size=3), inner, max_size=3)
        ),
        max_leaves=6,
    )
    return st.dictionaries(st.from_regex(family.keys, fullmatch=True), values, max_size=3)


def turns(family: Family, control: bool = True) -> st.SearchStrategy[list[Call]]:
    calls = st.tuples(st.from_regex(r"[a-z_]{1,6}", fullmatch=True), arguments(family, control))
    return st.lists(calls, min_size=1, max_size=1 if family.single_call else 3, unique_by=lambda call: call[0])


@pytest.mark.parametrize("by_token", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_valid_calls_round_trip(name: str, by_token: bool) -> None:
    family = CALL_FAMILIES[name]
    before = ["", "\n", "So\n"] if family.text_before else [""]

    @settings(max_examples=20)
    @given(turns(family, by_token), st.sampled_from(before), st.sampled_from(["", "<|im_end|>"]))
    def check(calls: list[Call], completion: str, stop: str) -> None:
        ids = ids_of(family, completion + family.render(calls) + stop, by_token)
        turn = parse(family, ids, calls, by_token=by_token)
        assert [(c.status, c.name, c.arguments) for c in turn.calls] == [(OK, n, unguarded(a)) for n, a in calls]
        kinds = [[type(value) for value in (call.arguments or {}).values()] for call in turn.calls]
        assert kinds == [[type(value) for value in given.values()] for _, given in calls]
        assert turn.text == completion.strip()
        assert turn.reasoning == ""
        for call in turn.calls:
            assert (call.arguments_text is not None) == family.json_arguments
            assert call.arguments_text is None or call.arguments_text in call.raw
            assert call.arguments_text is None or json.loads(call.arguments_text) == call.arguments
        check_spans(family.tokenizer(by_token), ids, turn)

    check()


@pytest.mark.parametrize("name", NAMES)
def test_a_cut_turn_is_truncated_or_text_and_has_no_new_calls(name: str) -> None:
    """Every call read from a cut turn is one of the whole turn; without a token limit the cut is damage."""
    family, calls = CALL_FAMILIES[name], calls_for(CALL_FAMILIES[name])
    ids = ids_of(family, family.render(calls))
    opened = parse(family, ids, calls).calls[0].start
    for stop in range(len(ids)):
        cut = parse(family, ids[:stop], calls, truncated=True)
        sound = [(c.name, c.arguments) for c in cut.calls if c.status == OK]
        assert sound == calls[: len(sound)]
        assert all(call.status == TRUNCATED for call in cut.calls[len(sound) :])
        damaged = parse(family, ids[:stop], calls)
        kept = [(c.name, c.arguments) for c in damaged.calls if c.status == OK]
        assert kept == calls[: len(kept)]
        assert TRUNCATED not in [call.status for call in damaged.calls]
        if stop == len(ids) - 1:  # other parsers take a turn without its closing tag as the final answer
            assert {call.status for call in damaged.calls[len(kept) :]} == {MALFORMED}
        if stop > opened + max(1, len(family.bare_prefix)):
            assert damaged.calls, "Damage is unreported. If no control token begins the call, set Family.bare_prefix."


@pytest.mark.parametrize("name", [name for name in NAMES if CALL_FAMILIES[name].think])
def test_drafts_in_reasoning_are_not_calls(name: str) -> None:
    family, calls = CALL_FAMILIES[name], calls_for(CALL_FAMILIES[name])
    opened, closed = family.think or ("", "")
    draft, sound = family.render([("draft", {"at": "y"})]), family.render(calls)
    turn = parse(family, ids_of(family, f"{opened}Hm. {draft}{closed}{sound}"), calls)
    assert [(call.status, call.name) for call in turn.calls] == [(OK, n) for n, _ in calls]
    assert (turn.reasoning, turn.text, turn.reasoning_closed) == (f"Hm. {draft}", "", True)
    assert turn.suspects == ()
    turn = parse(family, ids_of(family, f"{opened}Hm. {draft}"), calls, truncated=True)
    assert (turn.calls, turn.reasoning, turn.reasoning_closed) == ((), f"Hm. {draft}", False)
    tail = ids_of(family, f"<|im_end|>a{opened}")
    turn = parse(family, ids_of(family, f"Hm. {draft}{closed}{sound}"), calls, tail=tail)
    assert [call.name for call in turn.calls] == [n for n, _ in calls]
    turn = parse(family, ids_of(family, f"Hm. {draft}"), calls, tail=tail, truncated=True)
    assert (turn.calls, turn.reasoning_closed) == ((), False)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("unit", ["a", "é ", "{", '"', "\n", "[", "<", "sound", "opening", "control"])
def test_time_grows_with_the_number_of_ids(name: str, unit: str) -> None:
    family = CALL_FAMILIES[name]
    sound = family.render(calls_for(family))
    text = {"sound": sound, "opening": sound[: len(sound) // 2], "control": "".join(family.control)}.get(unit, unit)
    ids = ids_of(family, text) or ids_of(family, "a")
    expect_linear(lambda count: parse(family, ids * (count * 2_500 // len(ids)), LOOK))


def test_time_grows_with_the_number_of_pieces() -> None:
    family = CALL_FAMILIES["xlam"]
    one, other = ids_of(family, "<think></think>\n"), ids_of(family, "a<think></think>")
    expect_linear(lambda count: parse(family, one * (1250 * count) + other * (1250 * count)))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=8)
@given(st.data())
def test_four_times_the_control_words_take_less_than_six_times_the_instructions(name: str, data: st.DataObject) -> None:
    family = CALL_FAMILIES[name]
    words = [*family.control, *(family.think or ()), "a", '{"name": "look"', "\n"]
    unit = data.draw(st.lists(st.sampled_from(words), min_size=1, max_size=3))
    ids = [token for word in unit for token in ids_of(family, word)]
    few, many = (opcodes(lambda n=n: parse(family, ids * n, LOOK)) for n in (60, 240))  # type: ignore[misc]
    assert many < 6 * few, (unit, few, many)
