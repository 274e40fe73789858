"""Certificates: their printed lines, JSON round trip and cache."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import platformdirs
import pytest

from tito_core.chat import certify
from tito_core.chat.certify import Certificate, CertificateStore, Thinking, default_folder

CERTIFICATE = Certificate(
    template="aa",
    tokenizer="bb",
    arguments="[]",
    candidate="after a question",
    passed=("question, first", "result, first"),
    refused=(("two results", "one call at once"),),
    rewrites=("calls: anew", "date: frozen"),
    thinking=Thinking.KEPT,
    tools=True,
)


def test_a_certificate_says_all_that_was_found() -> None:
    assert list(CERTIFICATE.lines()) == [
        "template   sha256 aa",
        "tokenizer  sha256 bb",
        "delta      rendered after a question",
        "probes     2 equal to the template's own rendering, 0 different",
        "tools      yes",
        "images     no",
        "refuses    two results: one call at once",
        "rewrites   calls: anew",
        "rewrites   date: frozen",
        "reasoning  kept",
        "thinking   'keep' keeps it, as the template does; 'as-template' does the same",
        "content    inert: no control token comes from content",
    ]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"tools": False}, "tools      no: the template shows none"),
        ({"refused": (("a", "x"), ("b", "y"), ("c", "x"))}, "refuses    a, and 1 more: x"),
        ({"content_tokens": "as-template"}, "content    as-template: content may write tokens"),
        ({"thinking": Thinking.STRIPPED}, "reasoning  stripped at the next question"),
        (
            {"thinking": Thinking.STRIPPED},
            "thinking   'keep' keeps what was sampled, where the template would strip it; "
            "'as-template' branches at each question after an answer with reasoning",
        ),
        (
            {"thinking": Thinking.ALWAYS_STRIPPED},
            "thinking   'keep' keeps what was sampled, where the template would strip it; "
            "'as-template' branches after each answer with reasoning",
        ),
        (
            {"thinking": Thinking.NOT_SHOWN},
            "thinking   'keep' keeps what was sampled; 'as-template' branches after each answer with reasoning",
        ),
    ],
)
def test_what_else_it_may_say(changes: dict[str, Any], line: str) -> None:
    assert line not in list(CERTIFICATE.lines())
    assert line in list(replace(CERTIFICATE, **changes).lines())


@pytest.mark.parametrize("changes", [{}, {"thinking": Thinking.NOT_SHOWN}, {"arguments": "é\n"}])
def test_a_certificate_reads_back_as_it_was(changes: dict[str, Any], tmp_path: Path) -> None:
    certificate = replace(CERTIFICATE, **changes)
    read = Certificate.from_json(certificate.to_json())
    assert read == certificate
    assert type(read.thinking) is Thinking
    assert read.refused == (("two results", "one call at once"),)
    store = CertificateStore(tmp_path / "made" / "on the spot")
    assert store.load("key") is None
    store.save("key", certificate)
    assert store.load("key") == certificate
    assert [path.name for path in store.folder.iterdir()] == ["key.json"]


def test_a_certificate_is_json_that_people_can_read() -> None:
    text = replace(CERTIFICATE, arguments="é").to_json()
    assert json.loads(text)["refused"] == [["two results", "one call at once"]]
    assert '\n "arguments": "é",\n' in text


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ("[]", "TypeError('list indices must be integers or slices, not str')"),
        ("{}", "KeyError('passed')"),
        ("{", "Expecting property name"),
        (CERTIFICATE.to_json().replace('"tools"', '"tool"'), "unexpected keyword argument 'tool'"),
    ],
)
def test_from_json_refuses_other_json(broken: str, why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        Certificate.from_json(broken)


def test_the_default_folder_is_in_the_users_cache_or_in_tito_cache_dir(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TITO_CACHE_DIR", raising=False)
    assert default_folder() == Path(platformdirs.user_cache_dir("tito")) / "certificates"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TITO_CACHE_DIR", "~/kept")
    assert default_folder() == tmp_path / "kept" / "certificates"


def test_a_folder_that_cannot_be_used_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = CertificateStore(tmp_path / "file" / "inside")
    store.save("key", CERTIFICATE)
    assert store.load("key") is None


def test_keys_of_different_facts_and_of_other_code_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CertificateStore(tmp_path)
    facts = [("a",), ("a", ""), ("a", "b"), ("ab",), ("b", "a"), ("a", "\udcff")]
    keys = [store.key(*each) for each in facts]
    assert len(set(keys)) == len(facts)
    assert all(len(key) == 32 and key.isalnum() for key in keys)
    assert keys == [CertificateStore(tmp_path / "other").key(*each) for each in facts]
    monkeypatch.setattr(certify, "_code", lambda: "other")
    assert set(keys).isdisjoint(store.key(*each) for each in facts)


def test_a_store_without_a_folder_uses_the_default_one(certificate_folder: Path) -> None:
    assert CertificateStore().folder == certificate_folder
    assert CertificateStore(certificate_folder / "x").folder == certificate_folder / "x"
