"""Small templates with the structure of families that no package ships: Mistral, Cohere, Phi, Granite."""

from __future__ import annotations

from functools import cache
from typing import Any

from support.zoo import of_structure
from tito_core.chat.template import ChatTemplate

MISTRAL = """
{{- bos_token -}}
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
  {%- if m.role == 'system' -%}[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]
  {%- elif m.role == 'user' -%}
    {%- if tools and loop.index0 == ns.last -%}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{%- endif -%}
    [INST]{{ m.content }}[/INST]
  {%- elif m.role == 'tool' -%}[TOOL_RESULTS]{{ {'content': m.content, 'id': m.tool_call_id} | tojson }}[/TOOL_RESULTS]
  {%- elif m.tool_calls -%}
    {{- m.content -}}
    {%- for c in m.tool_calls -%}[TOOL_CALLS]{{ c.function.name }}[ARGS]
      {{- c.function.arguments | tojson }}{%- endfor -%}
    {{- eos_token -}}
  {%- else -%}{{ m.content + eos_token }}
  {%- endif -%}
{%- endfor -%}
"""
COHERE = """
{{- bos_token -}}
{%- macro turn(role) -%}<|START_OF_TURN_TOKEN|>{{ role }}{%- endmacro -%}
{%- if tools -%}{{ turn('<|SYSTEM_TOKEN|>') }}{{ tools | tojson }}<|END_OF_TURN_TOKEN|>{%- endif -%}
{%- for m in messages -%}
  {%- if m.role == 'system' -%}{{ turn('<|SYSTEM_TOKEN|>') }}{{ m.content }}<|END_OF_TURN_TOKEN|>
  {%- elif m.role == 'user' -%}{{ turn('<|USER_TOKEN|>') }}{{ m.content }}<|END_OF_TURN_TOKEN|>
  {%- elif m.role == 'tool' -%}
    {{- turn('<|SYSTEM_TOKEN|>') if loop.previtem.role != 'tool' }}<|START_TOOL_RESULT|>
    {{- m.content }}<|END_TOOL_RESULT|>
    {{- '<|END_OF_TURN_TOKEN|>' if loop.last or loop.nextitem.role != 'tool' -}}
  {%- else -%}
    {{- turn('<|CHATBOT_TOKEN|>') -}}
    {%- if m.reasoning_content -%}<|START_THINKING|>{{ m.reasoning_content }}<|END_THINKING|>{%- endif -%}
    {%- if m.tool_calls -%}
      {{- m.content }}<|START_ACTION|>
      {%- for c in m.tool_calls -%}{{ c.function | tojson }}{%- endfor -%}
      <|END_ACTION|><|END_OF_TURN_TOKEN|>
    {%- else -%}<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|><|END_OF_TURN_TOKEN|>{%- endif -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ turn('<|CHATBOT_TOKEN|>') }}{%- endif -%}
"""
PHI = """
{%- for m in messages -%}
  {{- '<|' + {'tool': 'tool_response'}.get(m.role, m.role) + '|>' + m.content -}}
  {%- if m.role == 'system' and tools -%}<|tool|>{{ tools | tojson }}<|/tool|>{%- endif -%}
  {%- if m.tool_calls -%}<|tool_call|>
    {%- for c in m.tool_calls -%}{{ c.function | tojson }}{%- endfor -%}<|/tool_call|>
  {%- endif -%}
  <|end|>
{%- endfor -%}
{{- '<|assistant|>' if add_generation_prompt else eos_token -}}
"""
GRANITE = """
{%- macro role(name) -%}<|start_of_role|>{{ name }}<|end_of_role|>{%- endmacro -%}
{{- role('system') }}Today's Date: {{ strftime_now('%B %d, %Y') }}.<|end_of_text|>\n
{%- if tools -%}{{ '\n' + role('tools') + tools | tojson }}<|end_of_text|>{%- endif -%}
{%- for m in messages -%}
  {{- '\n' + role({'tool': 'tool_response'}.get(m.role, m.role)) + m.content -}}
  {%- for c in m.tool_calls or [] -%}<|tool_call|>{{ c.function.name }} {{ c.function.arguments }}{%- endfor -%}
  <|end_of_text|>
{%- endfor -%}
{{- '\n' + role('assistant') if add_generation_prompt -}}
"""
_COHERE = ("<|END_OF_TURN_TOKEN|>", "<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>",
           "<|SYSTEM_TOKEN|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_ACTION|>", "<|END_ACTION|>",
           "<|START_TOOL_RESULT|>", "<|END_TOOL_RESULT|>", "<|START_THINKING|>", "<|END_THINKING|>",
           "<BOS>")  # fmt: skip
_MISTRAL = ("</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[ARGS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "<s>")  # fmt: skip
_PHI = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|/tool|>", "<|tool_call|>",
        "<|/tool_call|>", "<|tool_response|>", "<|endoftext|>")  # fmt: skip
_GRANITE = ("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>")
STRUCTURES: dict[str, tuple[str, tuple[str, ...], str]] = {
    "mistral-like": (MISTRAL, _MISTRAL, "<s>"),
    "cohere-like": (COHERE, _COHERE, "<BOS>"),
    "phi-like": (PHI, _PHI, ""),
    "granite-like": (GRANITE, _GRANITE, ""),
}


@cache
def tokenizer(name: str) -> Any:
    source, special, bos = STRUCTURES[name]
    return of_structure(source, special, (), bos)


@cache
def template(name: str) -> ChatTemplate:
    return ChatTemplate.of(tokenizer(name))
