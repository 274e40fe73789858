"""Certified chat templates over the tests' tokenizers, cached because a copy of a real tokenizer takes a second."""

from __future__ import annotations

from functools import cache
from typing import Any

from support.byte_level import shared
from support.scripted import tokenizer
from tito_core.chat.template import ChatTemplate

NAMES = ("byte level", "text markup", "smollm2", "qwen3-tiny")
"""A byte-level tokenizer with markup as control tokens, one with markup as text, and real tokenizers."""


def tokenizer_of(name: str) -> Any:
    made = {"byte level": lambda: shared(), "text markup": lambda: shared(markup=False)}
    return made[name]() if name in made else tokenizer(name)


@cache
def template_of(name: str) -> ChatTemplate:
    return ChatTemplate.of(tokenizer_of(name))
