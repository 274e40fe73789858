"""Calls against their tools' schemas, for every format: OK means that the arguments fit; what fits is OK."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parsing import schemas
from parsing.families import CALL_FAMILIES, NAMES, Family, ids_of, parse
from tito_core.parsing import CallStatus

OK, MALFORMED = CallStatus.OK, CallStatus.MALFORMED


def names_for(family: Family, rng: Random) -> Callable[[], str]:
    return lambda: rng.choice("abz_") + rng.choice("ab")


def same(one: Any, other: Any) -> bool:
    """Compare as JSON, in which 1 is not true, and 1.0 is 1."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def reads_as(written: Any, read: Any) -> bool:
    """Return whether a value and what was read differ only in strings that spell another value, or the reverse."""
    if isinstance(written, dict) and isinstance(read, dict):
        return written.keys() == read.keys() and all(reads_as(written[key], read[key]) for key in written)
    if isinstance(written, list) and isinstance(read, list) and written:
        return len(written) == len(read) and all(map(reads_as, written, read))
    if same(written, read):
        return True
    empty = ("", " ", [], {})
    return (
        (isinstance(written, str) and same(spelled(written), read))
        or (isinstance(read, str) and same(spelled(read), written))
        or (written in empty and read in empty)  # an empty element of MiniMax M3
    )


def spelled(text: str) -> Any:
    words = {"True": True, "False": False, "None": None}
    try:
        return words[text] if text in words else json.loads(text)
    except ValueError:
        with suppress(ValueError, SyntaxError):
            return ast.literal_eval(text)  # as Seed-OSS and Step 3 write lists
        return text


def outcome(family: Family, schema: Any, arguments: dict[str, Any]) -> str:
    """Write a call as the format does, parse it, and hold the result against the schema; return what happened."""
    text = family.render([("look", arguments)])
    turn = parse(family, ids_of(family, text), tools={"look": schema})
    [call] = turn.calls
    valid = schemas.is_valid(schema, arguments)
    if call.status == OK:
        assert schemas.is_valid(schema, call.arguments), (schema, text, call.arguments)
        if same(dict(call.arguments or {}), arguments):
            return "equal"
        # Another reading of the same text, which the schema allows too and which comes first.
        assert family.typed, (schema, text, call)
        assert reads_as(arguments, dict(call.arguments or {})), (schema, text, call)
        return "first of several readings" if valid else "another reading fits"
    assert (call.status, call.arguments) == (MALFORMED, None)
    assert not valid, (schema, text, call.reason)
    assert "The arguments do not fit the tool's schema" in call.reason
    return "refused"


@pytest.mark.parametrize("name", NAMES)
def test_a_call_is_ok_if_and_only_if_it_fits_a_generated_schema(name: str) -> None:
    family = CALL_FAMILIES[name]

    @settings(max_examples=15)
    @given(st.randoms(use_true_random=False))
    def check(rng: Random) -> None:
        names = names_for(family, rng)
        schema, arguments = schemas.tool(rng, names)
        assert outcome(family, schema, arguments) != "refused"
        for key in [*arguments, names()]:
            outcome(family, schema, {**arguments, key: schemas.value(rng, names)})
        if arguments:
            outcome(family, schema, dict(list(arguments.items())[1:]))

    check()
