"""A page is inert: a rollout's content is data, and never runs, is styled or is fetched."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from importlib.resources import files
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strands_tito.viewer.data import Evidence, TokenText, ledger_data
from strands_tito.viewer.site import as_inert_json, page
from support.shown import ATTACKS, data_of, elements, hostile, hostile_tokenizer

STATIC = files("strands_tito.viewer") / "static"
OWN = ["html", "head", "meta", "meta", "meta", "meta", "title", "link", "style", "body", "main", "noscript", "script"]
VALUES = st.recursive(
    st.text() | st.sampled_from(ATTACKS) | st.none() | st.integers(-(2**53), 2**53),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.sampled_from(ATTACKS), inner, max_size=3)
    ),
)


def policies(content: str) -> dict[str, str]:
    rules = content.split("; ")
    return dict(rule.partition(" ")[::2] for rule in rules)


@settings(max_examples=30)
@given(VALUES)
def test_json_holds_no_markup_characters_and_round_trips(value: Any) -> None:
    encoded = as_inert_json(value)
    assert not set(b"<>&") & set(encoded)
    assert json.loads(encoded) == value


@settings(max_examples=30)
@given(VALUES)
def test_no_content_adds_an_element(value: Any) -> None:
    made = page("rollout", {"title": "t", "value": value})
    found = [name for name, _ in elements(made.decode())]
    assert found == [*OWN, "script"]
    assert data_of(made)["value"] == value


def test_a_hostile_rollout_is_in_the_data_only() -> None:
    data = ledger_data(hostile(), Evidence(TokenText(hostile_tokenizer()))) | {"title": ATTACKS[0]}
    made = page("rollout", data)
    assert [name for name, _ in elements(made.decode())] == [*OWN, "script"]
    shown = data_of(made)
    assert shown["pieces"]["0"] == ATTACKS[0]
    assert ATTACKS[3] in shown["turns"][0]["calls"][0]["reason"]


@pytest.mark.parametrize("is_served", [False, True])
def test_the_policy_allows_only_the_pages_own_script_and_style(is_served: bool) -> None:
    made = page("rollout", {}, is_served=is_served).decode()
    rules = policies(next(a["content"] or "" for name, a in elements(made) if "http-equiv" in a and name == "meta"))
    for kind, rule in (("style", "style-src"), ("script", "script-src")):
        (content,) = re.findall(rf"<{kind}>(.*?)</{kind}>", made, re.DOTALL)
        assert rules[rule] == f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert rules.get("connect-src") == ("'self'" if is_served else None)
    assert rules["img-src"] == "data:"


def test_the_script_never_makes_markup_from_text_and_names_no_address() -> None:
    for file in STATIC.iterdir():
        text = file.read_text("utf-8")
        for word in (
            "innerHTML",
            "outerHTML",
            "insertAdjacent",
            "document.write",
            "eval(",
            "Function(",
            "DOMParser",
            "import(",
        ):
            assert word not in text, (file.name, word)
        addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*|url\([^)]*\)|@import[^;]*", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}, (file.name, addresses)


def test_every_script_is_in_the_page() -> None:
    made = page("rollout", {}).decode()
    for file in STATIC.iterdir():
        if file.name.endswith((".js", ".css")):
            assert file.read_text("utf-8") in made, file.name
