"""The models that can be asked for by name."""

from __future__ import annotations

from tito_core.engine.models import qwen3, smollm2

MODELS = {recipe.name: recipe for recipe in (smollm2.MODEL, qwen3.TINY, qwen3.MOE_TINY)}
TOKENIZERS = {name: recipe.tokenizer for name, recipe in MODELS.items()}
