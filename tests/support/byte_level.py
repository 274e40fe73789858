"""A small byte-level tokenizer with ChatML control tokens, made on the spot."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

NAMES = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>")
CHATML_TOOLS = """
{%- macro header(role) -%}{{- '<|im_start|>' + role + '\n' -}}{%- endmacro -%}
{%- if tools -%}
    {{- header('system') + 'Tools:' -}}
    {%- for tool in tools -%}{{- '\n' + tool.function | tojson -}}{%- endfor -%}
    {{- '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'tool' -%}
        {{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' else '' -}}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' -}}
        {{- '<|im_end|>\n' if loop.last or loop.nextitem.role != 'tool' else '' -}}
    {%- else -%}
        {{- header(message.role) + message.content -}}
        {%- for call in message.tool_calls or [] -%}
            {{- '\n' if message.content or not loop.first else '' -}}
            {{- '<tool_call>{"name": ' + call.function.name | tojson + ', "arguments": ' -}}
            {{- call.function.arguments | tojson + '}</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- header('assistant') -}}{%- endif -%}
"""
_MERGES = ["t h", "th e", "Ġ the", "Ċ Ċ", "Ġ Ġ", "i n", "a n", "e r", "o n", "< |", "| >", "i m", "im _", "Ã ©", "Ċ a"]


def byte_level(
    control: tuple[str, ...] = MARKUP,
    template: str = CHATML_TOOLS,
    special: tuple[str, ...] = SPECIAL,
    names: Mapping[str, str] = NAMES,
    **flags: bool,
) -> Any:
    """Make a tokenizer.

    Args:
        control: Added tokens that are not flagged special.
        template: Its chat template.
        special: Added tokens that are.
        names: What some of them are called, such as `eos_token`.
        flags: Flags of the special tokens, such as `rstrip=True`.
    """
    merges = [tuple(pair.split()) for pair in _MERGES]
    pieces = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    model = models.BPE({piece: i for i, piece in enumerate(dict.fromkeys(pieces))}, merges)
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, normalized=False, **flags) for text in special])
    backend.add_tokens([AddedToken(text, normalized=False) for text in control])
    return wrapped(backend, template, names)


def wrapped(backend: Tokenizer, template: str = CHATML_TOOLS, names: Mapping[str, str] = NAMES) -> Any:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    tokenizer.chat_template = template
    return tokenizer


@cache
def shared(markup: bool = True) -> Any:
    """Return one tokenizer for all tests; without `markup`, tool calls are plain text."""
    return byte_level(MARKUP if markup else ())
