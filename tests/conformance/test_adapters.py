"""LoRA adapters in the suite: sound servers pass, and each planted defect is found before any conversation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conformance.defects.adapters import ADAPTERS, NAMES
from conformance.defects.defect import SERVERS, SOUND, Defect
from conformance.defects.trial import target_of, try_defect
from conformance.test_scripted import SHORT, end
from support.scripted import tokenizer
from tito_conformance import fixed
from tito_conformance.checks import Tally
from tito_conformance.connection import connect

pytestmark = pytest.mark.suite


@pytest.mark.parametrize("wire", SERVERS)
async def test_answers_of_a_sound_server_are_those_of_their_adapters(wire: str) -> None:
    defect = replace(SOUND, adapters=NAMES)
    server = await connect(target_of(wire, defect, varied=True, adapters=NAMES))
    tally = Tally()
    await fixed.check_adapters(server, tally)
    assert tally.passed["adapted"] == 3 * fixed.ADAPTED_TOKENS + 6
    assert not tally.failed["adapted"]


@pytest.mark.parametrize(
    ("defect", "wire"),
    [  # `make test` takes each defect on one wire
        pytest.param(defect, wire, id=f"{defect.name}-{wire}")
        for one, defect in enumerate(ADAPTERS)
        for other, wire in enumerate(SERVERS)
    ],
)
def test_a_server_that_mixes_adapters_is_found(wire: str, defect: Defect) -> None:
    verdict = try_defect(defect, wire, tokenizer(), end(), SHORT)
    assert (verdict.caught_by, verdict.turns) == ("adapted", 0), verdict.problem
