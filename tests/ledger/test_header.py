"""What a user says of a rollout is JSON, is copied, and comes back from a file as it was said."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.drafts import make_draft
from tito_core import store
from tito_core.ledger import Header, Ledger
from tito_core.ledger.header import new_uuid


def through_a_file(ledger: Ledger, path: Path) -> Ledger:
    if not len(ledger):
        ledger.commit(make_draft(None, 0, [100], [200]))
    store.append(path / "rollouts.tito", [ledger])
    return store.read(path / "rollouts.tito")[0]


VALUES: list[tuple[Any, Any]] = [
    ((1, (2,)), [1, [2]]),
    (np.float64(0.5), 0.5),
    (np.float32(0.5), 0.5),
    (np.int64(3), 3),
    (np.bool_(True), True),
    (2**64 - 1, 2**64 - 1),
    (-(2**63), -(2**63)),
    ({"a": {"ü\x00": [None, False]}}, {"a": {"ü\x00": [None, False]}}),
]


@pytest.mark.parametrize(("said", "kept"), VALUES, ids=str)
def test_what_is_said_comes_back(tmp_path: Path, said: Any, kept: Any) -> None:
    ledger = Ledger(user={"x": said})
    ledger.annotate("reward", said)
    for found in (ledger, through_a_file(ledger, tmp_path)):
        assert found.header.user == {"x": kept}
        assert found.annotation("reward") == kept
        assert type(found.annotation("reward")) is type(kept)


def test_nan_and_infinity_come_back(tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.annotate("reward", [math.nan, -math.inf])
    nan, infinity = through_a_file(ledger, tmp_path).annotation("reward")
    assert math.isnan(nan)
    assert infinity == -math.inf


@pytest.mark.parametrize(
    ("said", "error", "words"),
    [
        ({1: 2}, TypeError, r"\['a'\] has the keys \[1\]; in JSON a key is a string"),
        ({1}, TypeError, r"\['a'\] is \{1\}, which is not JSON"),
        (b"x", TypeError, "not JSON"),
        (object, TypeError, "not JSON"),
        (datetime(2026, 1, 1), TypeError, "not JSON"),
        (np.zeros(2), TypeError, "not JSON"),
        (2**64, ValueError, "more than 64 bits"),
        (-(2**63) - 1, ValueError, "more than 64 bits"),
        ("\ud800", ValueError, "surrogates not allowed"),
        ({"\ud800": 1}, ValueError, "surrogates not allowed"),
    ],
    ids=ascii,
)
def test_what_is_no_json_is_refused_where_it_is_said(said: Any, error: type[Exception], words: str) -> None:
    ledger = Ledger()
    with pytest.raises(error, match=words):
        Ledger(user={"a": said})
    with pytest.raises(error, match=words):
        ledger.annotate("b", {"a": said})
    assert ledger.annotations == ()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Ledger(task_id=42),  # type: ignore[arg-type]
        lambda: Ledger(group_id=b"g"),  # type: ignore[arg-type]
        lambda: Ledger(tokenizer=object()),  # type: ignore[arg-type]
        lambda: Ledger().annotate(1, 2),  # type: ignore[arg-type]
        lambda: Ledger(user=[1]),  # type: ignore[arg-type]
    ],
)
def test_what_no_file_gives_back_is_refused_at_once(wrong: Callable[[], object]) -> None:
    with pytest.raises((TypeError, ValueError)):
        wrong()


@pytest.mark.parametrize(
    "uuid",
    ["x", "00000000-0000-4000-8000-00000000000A", "{00000000-0000-4000-8000-000000000000}", "0" * 32, "urn:uuid:0"],
)
def test_an_identity_has_one_form(uuid: str) -> None:
    with pytest.raises(ValueError, match="not a canonical UUID"):
        Ledger(uuid)


def test_what_was_said_does_not_change_afterwards() -> None:
    said: dict[str, Any] = {"a": [1]}
    ledger = Ledger(user=said)
    ledger.annotate("scores", said["a"])
    said["a"].append(2)
    assert ledger.header.user == {"a": [1]}
    assert ledger.annotation("scores") == [1]


def test_a_certificate_is_kept_as_plain_json_of_its_own() -> None:
    given: dict[str, Any] = {"template": "t", "passed": np.int64(3)}
    header = Header(new_uuid(), certificate=given)
    given["template"] = "changed"
    assert header.certificate == {"template": "t", "passed": 3}
    assert header.certificate is not None
    assert type(header.certificate["passed"]) is int
    assert Header(new_uuid()).certificate is None
    with pytest.raises(TypeError, match=r"^certificate\['a'\] is \{1\}, which is not JSON\.$"):
        Header(new_uuid(), certificate={"a": {1}})
