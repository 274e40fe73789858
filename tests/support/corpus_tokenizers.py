"""The tokenizer of each template of the corpora: its family's real one if a package ships it, else a stand-in."""

from __future__ import annotations

import re
from copy import copy
from functools import cache
from typing import Any

from support import corpora, zoo
from support.gguf_tokenizer import from_gguf
from support.stand_in import SPECIAL, stand_in

TOKENIZER_FAMILIES = {
    "qwen3": r"qwen|qwq|hermes(?!.*llama)|nex-agi|ornith",
    "llama3": r"llama-?_?3|llama3",
    "gptoss": r"gpt-?oss",
    "gemma3": r"gemma-?[23]",
    "deepseek": r"deepseek-?(?:ai-DeepSeek-)?(?:v3|r1)",
}
"""Real tokenizers of `zoo`, each with a pattern of its family's template names."""
VOCABULARIES = {
    "command-r": r"command-?r",
    "gemma-4": r"gemma-?4",
    "phi-3": r"phi-?3",
    "qwen35": r"qwen-?3[._]?[56]",
    "llama-spm": r"llama-?2|vicuna|zephyr|tinyllama|mistral-7b-instruct-v0.[12]|mixtral",
    "deepseek-coder": r"deepseek-coder-(?!v2)",
    "starcoder": r"granite.*20b|starcoder",
    "falcon": r"falcon-",
}
"""The same for llama.cpp's vocabularies, which are in the heavy archives only."""
TEXT = {"llama-spm": {"[INST]", "[/INST]"}, "gptoss": {"<|final|>"}}
"""Texts that look like control tokens but are ordinary text in these vocabularies."""


def family(name: str, template: str, *, light: bool = True) -> str:
    """Return the name of the real tokenizer that has all of a template's control tokens, or "" for a stand-in."""
    controls = set(SPECIAL.findall(template)) - {"<s>", "</s>"}
    for real, names in {**({} if light else VOCABULARIES), **TOKENIZER_FAMILIES}.items():
        if re.search(names, name, re.IGNORECASE) and controls - TEXT.get(real, set()) <= _known(real):
            return real
    return ""


def tokenizer(name: str, template: str, *, light: bool = True) -> Any:
    """Return a tokenizer with the template on it."""
    real = family(name, template, light=light)
    if not real:
        return stand_in(template)
    made = copy(_real(real))  # shares the heavy backend
    made.chat_template = template
    return made


@cache
def _real(name: str) -> Any:
    return zoo.real_tokenizer(name) if name in TOKENIZER_FAMILIES else from_gguf(corpora.vocabulary(name))


@cache
def _known(real: str) -> frozenset[str]:
    return frozenset(_real(real).get_added_vocab())
