"""A copy of a tokenizer in which no text spells a control token."""

from __future__ import annotations

import json
import uuid
from typing import Any

from tokenizers import AddedToken, Tokenizer


def without_added_tokens(backend: Tokenizer, template: str) -> Tokenizer:
    """Copy a tokenizer without added tokens, and without the specials its post-processor would put around.

    Control tokens that are pieces of the model's own vocabulary are renamed there, because some models (Unigram, BPE
    that looks words up whole) would find them in any text.

    Args:
        backend: The tokenizer.
        template: Source of the chat template; the added tokens in it are control tokens, as are all special ones.
    """
    definition = json.loads(backend.to_str())
    added = backend.get_added_tokens_decoder().values()
    _rename(definition["model"], {token.content for token in added if _is_control(token, template)})
    definition["added_tokens"] = []
    definition["post_processor"] = None
    definition["truncation"] = definition["padding"] = None
    # A stretch follows a control token, and the "first" scheme puts its blank at the start of the whole text only.
    return Tokenizer.from_str(json.dumps(definition).replace('"prepend_scheme": "first"', '"prepend_scheme": "never"'))


def _is_control(token: AddedToken, template: str) -> bool:
    return token.special or (token.content in template and not token.content.isspace())


def _rename(model: dict[str, Any], control: set[str]) -> None:
    """Give pieces of the vocabulary names that nobody can spell."""
    secret = uuid.uuid4().hex
    names = {piece: f"{secret}{piece}" for piece in control}
    if isinstance(model["vocab"], list):
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
        return
    model["vocab"] = {names.get(piece, piece): index for piece, index in model["vocab"].items()}
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [(a, b) for a, b in model["merges"] if not control & {a, b, a + b}]
