"""Headers and annotations hold JSON: a copy that a file keeps exactly."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.drafts import make_draft
from tito_core import store
from tito_core.ledger import Annotation, Header, Ledger
from tito_core.ledger.turn import new_uuid


def through_a_file(ledger: Ledger, path: Path) -> Ledger:
    if not len(ledger):
        ledger.commit(make_draft(None, 0, [100], [200]))
    store.append(path / "rollouts.tito", [ledger])
    return store.read(path / "rollouts.tito")[0]


HUGE = 10**4300  # of more digits than Python writes
VALUES: list[tuple[Any, Any]] = [
    ((1, (2,)), [1, [2]]),
    (np.float64(0.5), 0.5),
    (np.float32(0.5), 0.5),
    (np.int64(3), 3),
    (np.bool_(True), True),
    (2**64 - 1, 2**64 - 1),
    (-(2**63), -(2**63)),
    ({"a": [2**64, -(2**63) - 1]}, {"a": [str(2**64), str(-(2**63) - 1)]}),
    (HUGE // 10, "1" + "0" * 4299),
    ({"a": {"ü\x00": [None, False]}}, {"a": {"ü\x00": [None, False]}}),
]


@pytest.mark.parametrize(("value", "kept"), VALUES, ids=str)
def test_values_come_back_from_a_file(tmp_path: Path, value: Any, kept: Any) -> None:
    given = {"x": value, "own": [1]}
    ledger = Ledger(user=given)
    ledger.annotate("score", value)
    given["own"].append(2)  # the caller's own value, not the ledger's
    for each in (ledger, through_a_file(ledger, tmp_path)):
        assert each.header.user == {"x": kept, "own": [1]}
        assert each.annotation("score") == kept
        assert type(each.annotation("score")) is type(kept)


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        ({1: 2}, TypeError, r"\['a'\].*\[1\].*string"),
        ({1}, TypeError, r"\['a'\].*\{1\}.*JSON"),
        ([0, b"x"], TypeError, r"\['a'\]\[1\].*b'x'.*JSON"),
        (object, TypeError, "JSON"),
        (datetime(2026, 1, 1), TypeError, "JSON"),
        (np.zeros(2), TypeError, "JSON"),
        pytest.param([0, HUGE], ValueError, r"\['a'\]\[1\] .* 14285 bits .*4300 digits", id="huge"),
        ("\ud800", UnicodeEncodeError, "surrogates"),
        ({"\ud800": 1}, UnicodeEncodeError, "surrogates"),
    ],
    ids=ascii,
)
def test_other_values_are_refused_with_their_place(value: Any, error: type[Exception], words: str) -> None:
    ledger = Ledger()
    with pytest.raises(error, match=words):
        Ledger(user={"a": value})
    with pytest.raises(error, match=words):
        ledger.annotate("b", {"a": value})
    assert ledger.annotations == ()


@pytest.mark.parametrize("name", ["group_id", "task_id", "tokenizer"])
def test_names_are_strings(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} is 42.*'42'"):
        Header(new_uuid(), **{name: 42})
    assert getattr(Header(new_uuid(), **{name: "é"}), name) == "é"
    with pytest.raises(UnicodeEncodeError):
        Header(new_uuid(), **{name: "\ud800"})


def test_an_annotation_has_a_string_for_a_name_and_json_for_a_value() -> None:
    with pytest.raises(TypeError, match="name is 1"):
        Annotation(1, 2)  # type: ignore[arg-type]
    with pytest.raises(UnicodeEncodeError):
        Annotation("\ud800", 1)
    with pytest.raises(TypeError, match=r"reward is \{1\}"):
        Annotation("reward", {1})
    with pytest.raises((TypeError, ValueError)):
        Ledger(user=[1])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "uuid",
    [
        "",
        "x",
        "00000000-0000-4000-8000-00000000000A",
        "{00000000-0000-4000-8000-000000000000}",
        "0" * 32,
        "urn:uuid:0",
        7,
        None,
    ],
)
def test_a_uuid_is_canonical(uuid: Any) -> None:
    with pytest.raises(ValueError, match=r"canonical UUID, such as [0-9a-f-]{36}\.$") as caught:
        Header(uuid)
    assert repr(uuid) in str(caught.value)


def test_a_certificate_is_copied_as_plain_json() -> None:
    given: dict[str, Any] = {"template": "t", "passed": np.int64(3)}
    header = Header(new_uuid(), certificate=given)
    given["template"] = "changed"
    assert header.certificate == {"template": "t", "passed": 3}
    assert header.certificate is not None
    assert type(header.certificate["passed"]) is int
    assert Header(new_uuid()).certificate is None
    assert Ledger(certificate=given).header.certificate == {"template": "changed", "passed": 3}
    assert Ledger().header.certificate is None
    with pytest.raises(TypeError, match=r"certificate\['a'\] is \{1\}"):
        Header(new_uuid(), certificate={"a": {1}})
