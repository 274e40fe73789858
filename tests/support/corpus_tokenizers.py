"""The tokenizer of each template of the corpora: its family's real one where a package ships it, else a stand-in."""

from __future__ import annotations

import re
from copy import copy
from functools import cache
from typing import Any

from support import zoo
from support.stand_in import SPECIAL, stand_in

FAMILIES = (
    ("qwen3", re.compile(r"qwen|qwq|hermes(?!.*llama)|nex-agi|ornith", re.IGNORECASE)),
    ("llama3", re.compile(r"llama-?_?3|llama3", re.IGNORECASE)),
    ("gptoss", re.compile(r"gpt-?oss", re.IGNORECASE)),
    ("gemma3", re.compile(r"gemma-?[23]", re.IGNORECASE)),
    ("deepseek", re.compile(r"deepseek-?(?:ai-DeepSeek-)?(?:v3|r1)", re.IGNORECASE)),
)
"""Real tokenizers, each with the names of templates that are its family's."""


def family(name: str, template: str) -> str:
    """Give the name of the real tokenizer that knows all of a template's control tokens, or "" for a stand-in."""
    controls = set(SPECIAL.findall(template)) - {"<s>", "</s>"}
    for real, names in FAMILIES:
        if names.search(name) and controls <= _known(real):
            return real
    return ""


def tokenizer(name: str, template: str) -> Any:
    """Give a tokenizer with the template on it."""
    real = family(name, template)
    if not real:
        return stand_in(template)
    made = copy(zoo.real_tokenizer(real))  # the heavy backend stays one
    made.chat_template = template
    return made


@cache
def _known(real: str) -> frozenset[str]:
    return frozenset(zoo.real_tokenizer(real).get_added_vocab())
