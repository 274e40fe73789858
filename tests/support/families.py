"""Small templates, each with an idiom of a model family that misled an earlier certification."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from support.zoo import of_structure

CHANNELS = """
{%- if tools -%}<|start|>system<|message|>{{ tools | tojson }}<|end|>{%- endif -%}
{%- for m in messages -%}
  {%- if m.role == 'tool' -%}<|start|>{{ m.name }} to=assistant<|message|>{{ m.content }}<|end|>
  {%- elif m.role == 'assistant' -%}
    {%- if m.thinking and (m.tool_calls or loop.last) -%}
      <|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>
    {%- endif -%}
    {%- if m.content and (not m.tool_calls) -%}
      <|start|>assistant<|channel|>final<|message|>{{ m.content }}
      {{- '<|end|>' if add_generation_prompt or not loop.last else '<|return|>' -}}
    {%- elif m.content -%}<|start|>assistant<|channel|>analysis<|message|>{{ m.content }}<|end|>{%- endif -%}
    {%- for c in m.tool_calls or [] -%}
      {{- raise_exception('one call a turn') if not loop.first -}}
      <|start|>assistant to={{ c.function.name }}<|channel|>commentary<|message|>
      {{- c.function.arguments | tojson }}<|call|>
    {%- endfor -%}
  {%- else -%}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}
"""
"""gpt-oss: a part of an answer ends as questions do; calls and the last answer end otherwise."""

ALWAYS_PROMPTS = """
{%- if tools -%}<|start|>system<|sep|>{{ tools | tojson }}<|end|>{%- endif -%}
{%- for m in messages -%}
  <|start|>{{ m.role }}<|sep|>{{ m.content }}
  {%- for c in m.tool_calls or [] -%}<|call|>{{ c.function.name }}{{ c.function.arguments | tojson }}{%- endfor -%}
  <|end|>
{%- endfor -%}
<|start|>assistant<|sep|>
"""
"""Always writes the generation prompt."""

CALL_CLOSERS = """
{%- if tools -%}<SPECIAL_10>System
{{ tools | tojson }}<SPECIAL_12>
{% endif -%}
{%- for m in messages -%}
  {%- if m.role == 'assistant' -%}
    {{- '<SPECIAL_11>Assistant\\n' + m.content -}}
    {%- if m.tool_calls -%}
      {{- '\\n' if m.content -}}<TOOLCALL>
      {%- for c in m.tool_calls -%}{{ c.function | tojson }}{%- endfor -%}</TOOLCALL>
      {{- '' if loop.last else '\\n' -}}
    {%- endif -%}
    {{- '<SPECIAL_12>\\n' -}}
  {%- elif m.role == 'tool' -%}
    {{- '<SPECIAL_11>User\\n' if loop.previtem.role != 'tool' -}}
    {{- '<TOOL_RESPONSE>' + m.content + '</TOOL_RESPONSE>' -}}
    {{- '<SPECIAL_12>\\n' if loop.last or loop.nextitem.role != 'tool' -}}
  {%- else -%}{{ '<SPECIAL_10>System\\n' if m.role == 'system' else '<SPECIAL_11>User\\n' }}{{ m.content }}<SPECIAL_12>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<SPECIAL_11>Assistant
{% endif -%}
"""
"""Nemotron: `</TOOLCALL>` closes the calls and `<SPECIAL_12>` the turn, behind a newline where a message follows."""

_FOLLOWED = " if loop.nextitem is defined and loop.nextitem.role == 'tool'"
IN_TURN = """
{%- if tools -%}<|developer_start|>{{ tools | tojson }}<|developer_end|>{%- endif -%}
{%- set ns = namespace(open=false) -%}
{%- for m in messages -%}
  {%- if m.role == 'assistant' -%}
    {{- '' if ns.open else '<|assistant_start|>' -}}
    {{- m.content -}}
    {%- set ns.open = false -%}
    {%- if m.tool_calls -%}
      <|tools_prefix|>{{ m.tool_calls | map(attribute='function') | list | tojson }}<|tools_suffix|>
      {%- set ns.open = (true if loop.nextitem is defined and loop.nextitem.role == 'tool') or false -%}
    {%- endif -%}
    {{- '' if ns.open else '<|assistant_end|>' -}}
  {%- elif m.role == 'tool' -%}
    {{- '[' if loop.previtem.role != 'tool' else ', ' -}}{{- m.content -}}
    {%- if loop.last or loop.nextitem.role != 'tool' -%}
      {{- ']' -}}
      {%- if not loop.last and loop.nextitem.role != 'assistant' -%}
        {{- '<|assistant_end|>' -}}{%- set ns.open = false -%}
      {%- endif -%}
    {%- endif -%}
  {%- else -%}{{ '<|' + m.role + '_start|>' + m.content + '<|' + m.role + '_end|>' }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and not ns.open -%}<|assistant_start|>{%- endif -%}
"""
"""Apertus: results stand within the assistant's turn, after `<|tools_suffix|>`."""

ENDS_BEHIND_RESULTS = """
{%- if tools -%}<|developer_start|>{{ tools | tojson }}<|developer_end|>{%- endif -%}
{%- for m in messages -%}
  {%- if m.role == 'assistant' -%}<|assistant_start|>{{ m.content }}
    {%- if m.tool_calls -%}<|tools_prefix|>{{ m.tool_calls | map(attribute='function') | list | tojson }}
    {%- else -%}<|assistant_end|>{%- endif -%}
  {%- elif m.role == 'tool' -%}
    {{- '[' if loop.previtem.role != 'tool' else ', ' -}}{{- m.content -}}
    {{- ']<|assistant_end|>' if loop.last or loop.nextitem.role != 'tool' -}}
  {%- else -%}{{ '<|' + m.role + '_start|>' + m.content + '<|' + m.role + '_end|>' }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant_start|>{%- endif -%}
"""
"""Ends a turn of calls behind their results, so that a delta from its end on has lost them."""

NUMBERED = """
{%- set ns = namespace(results=0, calls=0) -%}
{%- if tools -%}<|start|>system<|sep|>{{ tools | tojson }}<|end|>{%- endif -%}
{%- for m in messages -%}
  {%- if m.role == 'tool' -%}
    {{- '<|start|>results<|sep|>' if loop.previtem.role != 'tool' -}}
    {{- '[' ~ ns.results ~ '] ' ~ m.content ~ ';' -}}{%- set ns.results = ns.results + 1 -%}
    {{- '<|end|>' if loop.last or loop.nextitem.role != 'tool' -}}
  {%- else -%}
    <|start|>{{ m.role }}<|sep|>{{ m.content }}
    {%- for c in m.tool_calls or [] -%}
      <|call|>{{ c.function.name }}{{ c.function.arguments | tojson }}
    {%- endfor -%}
    <|end|>
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant<|sep|>{%- endif -%}
"""
"""Command R: results are numbered through the whole conversation."""

ASKS_FOR_PARTS = """
{%- macro text(content) -%}
  {{- content.content if content.content is defined else content -}}
{%- endmacro -%}
{%- if tools -%}<|start|>system<|sep|>{{ tools | tojson }}<|end|>{%- endif -%}
{%- for m in messages -%}
  <|start|>{{ m.role }}<|sep|>{{ text(m.content) if m.role == 'tool' else m.content }}
  {%- for c in m.tool_calls or [] -%}<|call|>{{ c.function.name }}{{ c.function.arguments | tojson }}{%- endfor -%}
  <|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant<|sep|>{%- endif -%}
"""
"""Asks whether a result's content is a mapping by looking for an item of it, which plain text has not."""

ENDS_BY_EOS = """
{%- if tools -%}<|start|>system<|sep|>{{ tools | tojson }}<|end|>{%- endif -%}
{%- for m in messages -%}
  {%- if m.role == 'assistant' -%}
    {%- if m.reasoning_content -%}<|start|>assistant<|think|>{{ m.reasoning_content }}<|end|>{%- endif -%}
    {%- if m.tool_calls -%}<|start|>assistant<|call|>
      {%- for c in m.tool_calls -%}{{ c.function.name }}{{ c.function.arguments | tojson }};{%- endfor -%}<|calls|>
    {%- else -%}<|start|>assistant<|sep|>{{ m.content }}<|end|>{%- endif -%}
  {%- else -%}<|start|>{{ m.role }}<|sep|>{{ m.content }}<|end|>
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}
"""
"""Solar: `<|end|>` closes reasoning and answers alike, and the end of sequence, which it never writes, a turn."""

NINE_CHARACTERS = """
{%- macro nine(id) -%}{{ id if id | length == 9 else raise_exception('nine characters') }}{%- endmacro -%}
{%- if tools -%}<|start|>system<|sep|>{{ tools | tojson }}<|end|>{%- endif -%}
{%- for m in messages -%}
  <|start|>{{ m.role }}<|sep|>{{ nine(m.tool_call_id) + ':' if m.role == 'tool' }}{{ m.content }}
  {%- for c in m.tool_calls or [] -%}
    <|call|>{{ nine(c.id) + ':' + c.function.name }}{{ c.function.arguments | tojson }}
  {%- endfor -%}
  <|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant<|sep|>{%- endif -%}
"""
"""Mistral: call ids have nine characters."""

_USUAL = ("<|end|>", "<|start|>", "<|sep|>", "<|call|>", "<|endoftext|>")
_SOLAR = ("<|eos|>", "<|start|>", "<|sep|>", "<|think|>", "<|call|>", "<|calls|>", "<|end|>", "<pad>")
_CHANNELS = ("<|return|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|endoftext|>")
_SPECIAL = ("<SPECIAL_12>", "<SPECIAL_10>", "<SPECIAL_11>", "<TOOLCALL>", "</TOOLCALL>", "<TOOL_RESPONSE>",
            "</TOOL_RESPONSE>", "<pad>")  # fmt: skip
_IN_TURN = ("<|assistant_end|>", "<|assistant_start|>", "<|user_start|>", "<|user_end|>", "<|system_start|>",
            "<|system_end|>", "<|developer_start|>", "<|developer_end|>", "<|tools_prefix|>", "<|tools_suffix|>",
            "<pad>")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Family:
    """A template with its control tokens; the first is the tokenizer's end of sequence."""

    source: str
    special: tuple[str, ...]

    def tokenizer(self) -> Any:
        return of_structure(self.source, self.special)


TEMPLATE_FAMILIES = {
    "parts end as questions do": Family(CHANNELS, _CHANNELS),
    "ignores add_generation_prompt": Family(ALWAYS_PROMPTS, _USUAL),
    "ignores add_generation_prompt but for the end": Family(
        ALWAYS_PROMPTS.replace(
            "{%- endfor -%}\n  <|end|>",
            "{%- endfor -%}\n  {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' -}}",
        ),
        (*_USUAL, "<|return|>"),
    ),
    "calls close before the turn": Family(CALL_CLOSERS, _SPECIAL),
    "results within a turn that has ended": Family(IN_TURN, _IN_TURN),
    "results before what ends the turn": Family(ENDS_BEHIND_RESULTS, _IN_TURN),
    "results within the turn": Family(IN_TURN.replace(_FOLLOWED, ""), _IN_TURN),
    "numbers all results": Family(NUMBERED, _USUAL),
    "asks for parts of text": Family(ASKS_FOR_PARTS, _USUAL),
    "ends by an end that it never writes": Family(ENDS_BY_EOS, _SOLAR),
    "ids of nine characters": Family(NINE_CHARACTERS, _USUAL),
}
