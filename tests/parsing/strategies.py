"""Hypothesis strategies for the calls of each format."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from parsing.families import GUARD, Call, Family

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
