"""The names of built-in models as tokenizers: the entry-point group `tito.tokenizers`."""

from __future__ import annotations

import tomllib
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import pytest

from strands_tito import TITOModel
from support.scripted import Says, engine_of
from tito_conformance.testing import ScriptedServer
from tito_core.chat.tokenizer import GROUP, TokenizerError, load_tokenizer
from tito_engines.models import MODELS, ModelUnavailable, offered_tokenizer

ROOT = Path(__file__).parents[3]
POINTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry points of pyproject.toml, which an older installation may lack."""

    offers = [EntryPoint(name, value, GROUP) for name, value in POINTS.items()]
    found = {GROUP: offers, **{group: entry_points(group=group) for group in ("tito.backends", "tito.wires")}}
    monkeypatch.setattr("tito_core.entry_points.entry_points", lambda group: found.get(group, ()))


def test_every_built_in_model_is_offered() -> None:
    assert set(POINTS) == set(MODELS)


@pytest.mark.parametrize("name", ["smollm2", "qwen3-tiny"])
def test_a_built_in_name_loads_and_is_what_a_ledger_records(name: str, installed: None) -> None:
    loaded = load_tokenizer(name)
    assert loaded.name_or_path == name
    assert len(loaded) == len(load_tokenizer(offered_tokenizer(name)))
    assert len(load_tokenizer(name, local_files_only=True)) == len(loaded)


def test_a_folder_of_the_same_name_comes_first(
    installed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "smollm2").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TokenizerError, match="Cannot load a tokenizer from 'smollm2'"):
        load_tokenizer("smollm2")


def test_a_file_of_rollouts_that_names_it_downloads_nothing(
    installed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TITO_CACHE_DIR", str(tmp_path))
    with pytest.raises(TokenizerError, match=r"'smollm2'.*not on this machine"):
        load_tokenizer("smollm2", local_files_only=True)
    with pytest.raises(ModelUnavailable):
        offered_tokenizer("smollm2", local_files_only=True)
    assert not [*tmp_path.iterdir()]


def test_a_model_takes_the_name(installed: None) -> None:
    with ScriptedServer(engine_of("vllm", Says("Yes."))) as server:
        model = TITOModel(backend="vllm", base_url=server.base_url, tokenizer="smollm2")
    assert model.ledger.header.tokenizer == "smollm2"
