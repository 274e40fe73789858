"""A pytest plugin: `pytest --pyargs tito_conformance --tito-backend=... --tito-base-url=...`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tito_conformance.suite import Outcome


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that name the server and the size of the run."""
    group = parser.getgroup("tito", "conformance of a server")
    group.addoption("--tito-backend", help="name of an installed backend")
    group.addoption("--tito-base-url", help="address of the server")
    group.addoption("--tito-tokenizer", help="name or folder of the model's tokenizer")
    group.addoption("--tito-parser", default="auto", help="tool-call format (default: auto)")
    profiles = ["quick", "standard", "deep", "production"]
    group.addoption("--tito-profile", default="standard", choices=profiles, help="size of the run (default: standard)")
    group.addoption("--tito-seed", default=0, type=int, help="seed of the random conversations (default: 0)")
    group.addoption("--tito-against-backend", help="backend of a second server with the same weights")
    group.addoption("--tito-against-url", help="address of a second server to compare with")
    group.addoption(
        "--tito-tolerance",
        default=None,
        type=float,
        help="largest difference between a logprob and a score, in nats (default: by the dtype)",
    )
    group.addoption("--tito-dtype", default="auto", help="dtype of the server's logits (default: measured)")
    group.addoption("--tito-require", action="append", default=[], help="name of a check that must run, too")
    group.addoption("--tito-not-require", action="append", default=[], help="name of a check that need not run")


@pytest.fixture(scope="session")
def tito_required(request: pytest.FixtureRequest) -> frozenset[str]:
    """The checks that must run; none where two servers are compared, as with `tito conformance`."""
    from tito_conformance.checks import CHECKS, REQUIRED

    more, fewer = (request.config.getoption(f"--tito-{name}") for name in ("require", "not-require"))
    if unknown := sorted({*more, *fewer} - CHECKS.keys()):
        pytest.fail(f"Unknown check {unknown[0]!r}. Available: {', '.join(CHECKS)}.", pytrace=False)
    if request.config.getoption("--tito-against-url"):
        return frozenset(more)
    return frozenset({*REQUIRED, *more} - set(fewer))


@pytest.fixture(scope="session")
def tito_outcome(request: pytest.FixtureRequest) -> Outcome:
    """The result of one run of the suite on the server that the options name."""
    from tito_conformance import suite
    from tito_conformance.checks import PROFILES
    from tito_conformance.target import Target

    options = {name: request.config.getoption(f"--tito-{name}") for name in ("backend", "base-url", "tokenizer")}
    missing = [f"--tito-{name}" for name, value in options.items() if not value]
    if missing:
        pytest.fail(f"No server to test. Pass {', '.join(missing)}.", pytrace=False)
    target = Target(
        options["backend"],
        options["base-url"],
        options["tokenizer"],
        request.config.getoption("--tito-parser"),
        tolerance_nats=request.config.getoption("--tito-tolerance"),
        dtype=request.config.getoption("--tito-dtype"),
        seed=request.config.getoption("--tito-seed"),
    )
    url = request.config.getoption("--tito-against-url")
    backend = request.config.getoption("--tito-against-backend") or target.backend
    against = replace(target, backend=backend, base_url=url) if url else None
    return suite.run(target, PROFILES[request.config.getoption("--tito-profile")], against=against)
