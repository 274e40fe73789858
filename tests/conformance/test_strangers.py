"""Some defects of another author, who had not seen the suite; `tools/defects.py --strangers` runs all."""

from __future__ import annotations

import pytest

from conformance.defects.stranger_clients import CLIENTS
from conformance.defects.stranger_servers import SERVERS_DEFECTS
from conformance.defects.trial import try_defect
from support.scripted import tokenizer
from tito_conformance.checks import Profile

pytestmark = pytest.mark.suite

ALL = {defect.name: defect for defect in (*SERVERS_DEFECTS, *CLIENTS)}
SMALL = Profile("small", 2, 4, 2)


def test_names_are_unique_and_each_says_what_it_is_after() -> None:
    assert len(ALL) == len(SERVERS_DEFECTS) + len(CLIENTS)
    assert all(defect.what and defect.real and defect.wires for defect in ALL.values())
    assert all(defect.why for defect in ALL.values() if defect.hard)


@pytest.mark.parametrize(
    ("name", "wire"),
    [
        ("frequency-counts-once", "vllm-completions"),
        ("penalties-over-prompt", "vllm"),
        ("min-p-lost-with-seed", "vllm"),
        ("top-k-lost-with-top-p", "vllm-completions"),
        ("processed-when-streamed", "vllm"),
        ("zero-temperature-is-unset", "vllm"),
        ("seed-of-three-bits", "vllm"),
        ("own-stop-id-trimmed", "vllm"),
    ],
)
def test_one_that_went_unnoticed_at_first_is_noticed(name: str, wire: str) -> None:
    verdict = try_defect(ALL[name], wire, tokenizer(), int(tokenizer().eos_token_id), SMALL)
    assert verdict.caught_by is not None
    assert verdict.expected, verdict.problem
