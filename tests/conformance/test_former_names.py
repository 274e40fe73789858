"""What users imported before the packages were separated is still importable, and imports nothing before it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.suite

USES = """
import sys
import strands_tito
assert not {"tito_conformance", "tito_engines", "hypothesis"} & sys.modules.keys()
import strands_tito.conformance, strands_tito.testing
from strands_tito import engines
from strands_tito.conformance.profiles import Profile
from strands_tito.conformance.suite import replay, run
from strands_tito.conformance.target import Target
from strands_tito.conformance.wire_reading import WireExchange, WireGeneration
from strands_tito.engines import install, models, running
from strands_tito.engines.models import load_tokenizer
from strands_tito.testing import Completion, WireKit, moves, scripted_server, strategies
from strands_tito.testing.pictures import picture
from strands_tito.testing.strategies import texts
import tito_conformance.testing, tito_conformance.wire, tito_engines.models
assert scripted_server is tito_conformance.testing.scripted_server
assert strands_tito.testing.moves is moves is tito_conformance.testing.moves
import strands_tito.compat.rollout, tito_compat.rollout
assert strands_tito.compat.rollout.Rollout is tito_compat.rollout.Rollout
assert WireGeneration is tito_conformance.wire.WireGeneration
assert models is engines.models is tito_engines.models
assert not hasattr(strands_tito.testing, "no_such_name")
"""


def test_names_of_before_are_importable_and_load_nothing_early() -> None:
    subprocess.run([sys.executable, "-c", USES], check=True)


@pytest.mark.parametrize("name", ["tito_conformance", "strands_tito.conformance"])
def test_the_suite_is_collected_under_both_names(name: str) -> None:
    listing = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "--pyargs", name, "-c", "/dev/null"],
        capture_output=True,
        text=True,
    )
    assert "test_the_law_holds[rendering]" in listing.stdout, listing.stdout + listing.stderr
