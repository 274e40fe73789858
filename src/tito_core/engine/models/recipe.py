"""What it takes to build a model, and a key that changes when any of it changes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tito_core.engine.models.fetch import Package
from tito_core.engine.models.once import Say

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
