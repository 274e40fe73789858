"""A small byte-level tokenizer with ChatML control tokens, made on the spot."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>")
CHATML_TOOLS = (files("tito_core.engine.models") / "smollm2_tools.jinja").read_text(encoding="utf-8")
_MERGES = ["t h", "th e", "Ġ the", "Ċ Ċ", "Ġ Ġ", "i n", "a n", "e r", "o n", "< |", "| >", "i m", "im _", "Ã ©", "Ċ a"]


def byte_level(control: tuple[str, ...] = MARKUP, template: str = CHATML_TOOLS, **flags: bool) -> Any:
    """Make a tokenizer.

    Args:
        control: Added tokens that are not flagged special.
        template: Its chat template.
        flags: Flags of the special tokens, such as `rstrip=True`.
    """
    merges = [tuple(pair.split()) for pair in _MERGES]
    pieces = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    model = models.BPE({piece: i for i, piece in enumerate(dict.fromkeys(pieces))}, merges)
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, normalized=False, **flags) for text in SPECIAL])
    backend.add_tokens([AddedToken(text, normalized=False) for text in control])
    return wrapped(backend, template)


def wrapped(backend: Tokenizer, template: str = CHATML_TOOLS) -> Any:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = template
    return tokenizer


@cache
def shared(markup: bool = True) -> Any:
    """Give one tokenizer to all tests; without `markup`, tool calls are plain text."""
    return byte_level(MARKUP if markup else ())
