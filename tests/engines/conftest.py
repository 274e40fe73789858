from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from support.fake_engine import FAKE, Variant
from tito_engines import EngineEnv, EngineSpec, ensure
from tito_engines.install import TORCH_INDEX_VARIABLE


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("TITO_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv(TORCH_INDEX_VARIABLE, raising=False)
    return tmp_path / "cache"


@pytest.fixture
def fake(cache: Path) -> EngineSpec:
    return FAKE


@pytest.fixture(scope="session")
def environments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of environments in which the fake engine is installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TITO_CACHE_DIR", str(tmp_path_factory.mktemp("installed")))
        return ensure(FAKE).root.parent


@pytest.fixture
def fake_env(environments: Path, cache: Path) -> EngineEnv:
    """The fake engine, installed in the test's own cache."""
    cache.mkdir()
    (cache / environments.name).symlink_to(environments)
    return ensure(FAKE)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny-model"
    folder.mkdir()
    return folder


@pytest.fixture
def variant(fake: EngineSpec) -> Variant:
    """The fake engine with some fields changed."""

    def make(**changes: object) -> EngineSpec:
        return replace(fake, **changes)  # type: ignore[arg-type]

    return make
