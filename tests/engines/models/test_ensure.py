"""Names, paths and hubs; and what a build asks of the engine's interpreter (a stand-in here: no torch)."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest

from tito_engines.models import (
    MODELS,
    ModelUnavailable,
    UnknownModel,
    ensure,
    ensure_tokenizer,
    load_tokenizer,
)
from tito_engines.models.recipe import ModelRecipe, TokenizerRecipe, model_directory

NO_PYTHON = Path("no-interpreter-is-needed")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, and a hub that is out of reach."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def _snapshot(hub: Path, repo: str, files: dict[str, str]) -> Path:
    revision = "0" * 40
    root = hub / f"models--{repo.replace('/', '--')}"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(revision)
    folder = root / "snapshots" / revision
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def _recipe(spec: dict[str, object] | None = None) -> ModelRecipe:
    def write(directory: Path, _say: object) -> None:
        (directory / "tokenizer.json").write_text("{}")

    return ModelRecipe("fake", "a fake one", TokenizerRecipe("fake", write, ("v1",)), spec or {"architecture": "None"})


def _interpreter(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_an_unknown_name_lists_the_known_ones() -> None:
    for ask in (lambda: ensure("smolm2", NO_PYTHON), lambda: ensure_tokenizer("./nowhere")):
        with pytest.raises(UnknownModel, match="qwen3-moe-tiny, qwen3-tiny, qwen3-vl-tiny, smollm2"):
            ask()


def test_a_directory_is_returned_as_it_is(tmp_path: Path) -> None:
    assert ensure(str(tmp_path), NO_PYTHON) == tmp_path
    assert ensure_tokenizer(str(tmp_path)) == tmp_path


def test_a_hub_name_is_found_in_the_hubs_cache(hub: Path) -> None:
    folder = _snapshot(hub, "org/tiny", {"config.json": "{}", "tokenizer_config.json": "{}", "model.safetensors": ""})
    assert ensure("org/tiny", NO_PYTHON) == folder
    assert ensure_tokenizer("org/tiny") == folder


def test_a_hub_snapshot_without_weights_will_do_for_a_tokenizer_only(hub: Path) -> None:
    folder = _snapshot(hub, "org/tiny", {"config.json": "{}", "tokenizer_config.json": "{}"})
    assert ensure_tokenizer("org/tiny") == folder
    with pytest.raises(ModelUnavailable, match="weights"):
        ensure("org/tiny", NO_PYTHON)


@pytest.mark.usefixtures("hub")
def test_a_hub_out_of_reach_says_what_else_to_give() -> None:
    with pytest.raises(ModelUnavailable, match=r"org/tiny .*path of a directory"):
        ensure("org/tiny", NO_PYTHON)


@pytest.mark.usefixtures("hub")
def test_without_npm_and_hub_the_error_names_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TITO_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("shutil.which", lambda _name: None)
    with pytest.raises(ModelUnavailable, match=r"install Node\.js.*Hub: Qwen/Qwen3-4B"):
        ensure_tokenizer("qwen3-tiny")


def test_the_hubs_cache_is_asked_first_for_the_qwen3_tokenizer(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = ensure_tokenizer("qwen3-tiny")  # from the package, in the user's own cache
    files = {name: (ours / name).read_text(encoding="utf-8") for name in ("tokenizer.json", "tokenizer_config.json")}
    _snapshot(hub, "Qwen/Qwen3-4B", files)
    monkeypatch.setenv("TITO_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("shutil.which", lambda _name: None)  # no npm
    assert (ensure_tokenizer("qwen3-moe-tiny") / "tokenizer.json").is_file()


def test_a_model_is_the_tokenizers_files_and_what_the_script_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TITO_CACHE_DIR", str(tmp_path / "cache"))
    python = _interpreter(
        tmp_path / "python",
        'case "$1" in *weights_script.py) ;; *) exit 9 ;; esac\n'
        'cp "$2" "$3/config.json"; echo noise; echo \'{"torch": "2"}\'',
    )
    directory = model_directory(_recipe({"architecture": "Tiny"}), python, print)
    assert sorted(os.listdir(directory)) == ["config.json", "tito_build.json", "tokenizer.json"]
    assert json.loads((directory / "config.json").read_text()) == {"architecture": "Tiny"}
    about = json.loads((directory / "tito_build.json").read_text())
    assert (about["model"], about["made_with"]) == ("fake", {"torch": "2"})
    assert model_directory(_recipe({"architecture": "Tiny"}), NO_PYTHON, print) == directory  # built once


def test_an_interpreter_without_torch_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TITO_CACHE_DIR", str(tmp_path / "cache"))
    python = _interpreter(tmp_path / "python", "echo \"No module named 'torch'\" >&2; exit 1")
    with pytest.raises(ModelUnavailable, match=r"status 1.*No module named 'torch'.*needs torch"):
        model_directory(_recipe(), python, print)
    with pytest.raises(ModelUnavailable, match="gone-python"):
        model_directory(_recipe(), tmp_path / "gone-python", print)
    assert not list((tmp_path / "cache" / "models").glob("fake-*"))


def test_any_change_of_a_recipe_changes_its_key() -> None:
    recipe = _recipe()
    keys = {
        recipe.key,
        dataclasses.replace(recipe, spec={"architecture": "Other"}).key,
        dataclasses.replace(recipe, tokenizer=dataclasses.replace(recipe.tokenizer, ingredients=("v2",))).key,
        *(model.key for model in MODELS.values()),
    }
    assert len(keys) == 3 + len(MODELS)
    assert _recipe().key == recipe.key


def test_a_copy_of_a_tokenizer_directory_loads_by_its_path(tmp_path: Path) -> None:
    copy = shutil.copytree(ensure_tokenizer("smollm2"), tmp_path / "copy")
    assert load_tokenizer(str(copy)).tokenize("10") == ["1", "0"]
