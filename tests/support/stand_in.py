"""Byte-level stand-ins for tokenizers that no package ships, with every control token that a template writes."""

from __future__ import annotations

import re
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from support.byte_level import byte_level

SPECIAL = re.compile(
    r"<\|[^\s<>|]{1,60}\|>|<｜[^\s<>｜]{1,60}｜>|<\|[a-z_]{1,30}>|<[a-z_]{1,30}\|>|<\|\"\|>|"  # ChatML, Gemma 4
    r"\[/?[A-Z][A-Z_]{2,40}\]|\[\|/?[a-z]+\|\]|\[gMASK\]|<sop>|"  # Mistral, EXAONE, GLM
    r"</?s>|<bos>|<eos>|<pad>|<(?:start|end|begin)_of_[a-z_]+>|<end_of_utterance>|"  # Gemma, Idefics
    r"<(?!IMPORTANT>)[A-Z][A-Z_]{2,40}(?:_\d+)?>|<SPECIAL_\d+>|<(?:reserved|extra|extra_id|unused)_?\d+>|</?role>|"
    r"\]~!?b[\[\]]|\[e~\[|\]<\][a-z]+\[>\[|</?longcat_[a-z_]+>|</?start_[a-z_]+>|</?end_[a-z_]+>|"  # MiniMax, LongCat
    r"</?(?:seed|hy):[a-z]+>|<eos:[0-9a-f]+>|</?(?:assistant|user|system)>|<sep>"  # Seed, Hunyuan, Laguna, Reka
)
MARKUP = re.compile(r"</?(?:think|answer|tool_calls?|tool_response|arg_key|arg_value|minimax:tool_call)>")
_ENDS = (
    "<|im_end|>", "<|eot_id|>", "<|eot|>", "<｜end▁of▁sentence｜>", "<|end_of_text|>", "<|END_OF_TURN_TOKEN|>",
    "<|endofturn|>", "<end_of_turn>", "<|end|>", "<|return|>", "[e~[", "<seed:eos>", "<|role_end|>",
    "<|endoftext|>", "<eos>",
)  # fmt: skip
_BEGINS = {
    "<｜begin▁of▁sentence｜>": "<｜begin▁of▁sentence｜>",
    "<|start_header_id|>": "<|begin_of_text|>",
    "<start_of_turn>": "<bos>",
    "<|turn>": "<bos>",
    "<|START_OF_TURN_TOKEN|>": "<BOS_TOKEN>",
    "<|startoftext|>": "<|startoftext|>",
}
_QUESTION = {"role": "user", "content": "zq1v"}
_CALL = {"id": "c0000x000", "type": "function", "function": {"name": "look", "arguments": {"at": "zq2v"}}}
_TOOL = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}
_CONVERSATIONS: tuple[list[dict[str, Any]], ...] = (
    [_QUESTION, {"role": "assistant", "content": "zq2v"}, _QUESTION],
    [{"role": "system", "content": "zq0v"}, _QUESTION, {"role": "assistant", "content": "zq2v"}],
    [_QUESTION, {"role": "assistant", "content": "zq2v", "reasoning_content": "zq3v", "thinking": "zq3v"}],
    [
        _QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "content": "zq3v", "tool_call_id": "c0000x000", "name": "look"},
    ],
)


def stand_in(template: str) -> Any:
    """Return a tokenizer for a template, with the bos and eos of its family."""
    source_controls = set(SPECIAL.findall(template))
    begin = next((begin for sign, begin in _BEGINS.items() if sign in template), "<s>")
    end = _end(template, source_controls)
    texts = [template, *_renderings(template, begin, end)]
    special = {found for text in texts for found in SPECIAL.findall(text)} | {end}
    markup = {found for text in texts for found in MARKUP.findall(text)} - special
    names = {"eos_token": end, "pad_token": end}
    if begin in special or "bos_token" in template:
        names["bos_token"] = begin
    ordered = (end, *sorted(special - {end} | set(names.values()) - {end}))
    return byte_level(tuple(sorted(markup)), template, ordered, names)


def _end(template: str, controls: set[str]) -> str:
    """Return the token that ends an answer in the template, or its family's."""
    for conversation in _CONVERSATIONS[:2]:
        shown = _rendered(template, conversation, "<s>", "zq9v")
        after = shown.partition("zq2v")[2]
        found = SPECIAL.search(after)
        eos = after.find("zq9v")
        if found and (eos < 0 or found.start() < eos):
            return found[0]
    return next((end for end in _ENDS if end in controls), "</s>")


def _renderings(template: str, begin: str, end: str) -> list[str]:
    return [_rendered(template, conversation, begin, end) for conversation in _CONVERSATIONS]


def _rendered(template: str, messages: list[dict[str, Any]], begin: str, end: str) -> str:
    """Render as transformers does; return "" if the template refuses."""
    try:
        (shown,), _ = render_jinja_template(
            [messages], [_TOOL], None, template, add_generation_prompt=True, bos_token=begin, eos_token=end
        )
    except Exception:  # a template may raise any exception
        return ""
    return str(shown)
