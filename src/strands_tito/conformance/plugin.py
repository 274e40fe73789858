"""A pytest plugin: `pytest --pyargs strands_tito.conformance --tito-backend=... --tito-base-url=...`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from strands_tito.conformance.suite import Outcome


def pytest_addoption(parser: pytest.Parser) -> None:
    """Say which server, and how much."""
    group = parser.getgroup("tito", "conformance of a server")
    group.addoption("--tito-backend", help="name of the backend, as installed")
    group.addoption("--tito-base-url", help="address of the server")
    group.addoption("--tito-tokenizer", help="name or folder of the model's tokenizer")
    group.addoption("--tito-parser", default="auto", help="tool-call format (default: auto)")
    group.addoption("--tito-profile", default="standard", help="quick, standard (default) or deep")
    group.addoption("--tito-seed", default=0, type=int, help="what is drawn is drawn from it (default: 0)")
    group.addoption("--tito-against-backend", help="backend of a second server of the same weights")
    group.addoption("--tito-against-url", help="its address: both play one script, and shall say the same")
    group.addoption("--tito-tolerance", default=0.05, type=float, help="nats between a logprob and a score")


@pytest.fixture(scope="session")
def tito_outcome(request: pytest.FixtureRequest) -> Outcome:
    """What one run of the suite on the server found."""
    from strands_tito.conformance import suite
    from strands_tito.conformance.profiles import PROFILES
    from strands_tito.conformance.target import Target

    said = {name: request.config.getoption(f"--tito-{name}") for name in ("backend", "base-url", "tokenizer")}
    missing = [f"--tito-{name}" for name, value in said.items() if not value]
    if missing:
        pytest.fail(f"Say which server to test: {', '.join(missing)}.", pytrace=False)
    target = Target(
        said["backend"],
        said["base-url"],
        said["tokenizer"],
        request.config.getoption("--tito-parser"),
        tolerance_nats=request.config.getoption("--tito-tolerance"),
        seed=request.config.getoption("--tito-seed"),
    )
    url = request.config.getoption("--tito-against-url")
    backend = request.config.getoption("--tito-against-backend") or target.backend
    against = replace(target, backend=backend, base_url=url) if url else None
    return suite.run(target, PROFILES[request.config.getoption("--tito-profile")], against=against)
