"""Idioms of chat templates: certified ones render as transformers does, the others are refused."""

from __future__ import annotations

import pytest

from support.budget import PROVE
from support.plain_referee import judge
from support.stand_in import stand_in
from tito_core.chat.template import ChatTemplate, TemplateError

CALLS = (
    "{%- for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{%- endfor -%}'
)
THOUGHT = "{%- if m.reasoning_content -%}<think>\n{{ m.reasoning_content }}\n</think>\n\n{%- endif -%}"
RESULT = "<tool_response>\n{{ m.content }}\n</tool_response>"


def chatml(
    *, before: str = "", text: str = "{{ m.content }}", calls: str = CALLS, thought: str = "", result: str = RESULT,
    closer: str = "<|im_end|>\n", opener: str = "<|im_start|>{{ m.role }}\n", prompt: str = "add_generation_prompt",
) -> str:  # fmt: skip
    """Return a ChatML template with calls, with some parts replaced."""
    return (
        f"{{%- set ns = namespace(n=0, last=-1, seen='') -%}}{before}"
        "{%- if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif -%}"
        "{%- for m in messages -%}"
        "{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}"
        "{%- endfor -%}"
        f"{{%- for m in messages -%}}{opener}"
        f"{{%- if m.role == 'tool' -%}}{result}{{%- elif m.role == 'assistant' -%}}{thought}{text}{calls}"
        f"{{%- else -%}}{text}{{%- endif -%}}{closer}{{%- endfor -%}}"
        f"{{%- if {prompt} -%}}<|im_start|>assistant\n{{% endif -%}}"
    )


IDIOMS = {
    "plain": chatml(),
    "reasoning is kept": chatml(thought=THOUGHT),
    "reasoning of earlier rounds is stripped": chatml(
        thought="{%- if loop.index0 > ns.last -%}" + THOUGHT + "{%- endif -%}"
    ),
    "reasoning after the text": chatml(thought="", text="{{ m.content }}" + THOUGHT),
    "results are numbered over the conversation": chatml(result="{%- set ns.n = ns.n + 1 -%}[{{ ns.n }}] " + RESULT),
    "questions are numbered": chatml(
        opener="<|im_start|>{{ m.role }}\n"
        "{%- if m.role == 'user' -%}{%- set ns.n = ns.n + 1 -%}Q{{ ns.n }}: {% endif -%}"
    ),
    "the number of messages": chatml(before="<|im_start|>system\n{{ messages | length }} messages<|im_end|>\n"),
    "a date": chatml(before="<|im_start|>system\nToday is {{ strftime_now('%d %B %Y') }}.<|im_end|>\n"),
    "results are merged": chatml(
        opener="{%- if m.role != 'tool' or loop.previtem.role != 'tool' -%}<|im_start|>{{ m.role }}\n{% endif -%}",
        closer="{%- if m.role != 'tool' or loop.last or loop.nextitem.role != 'tool' -%}<|im_end|>\n{% endif -%}",
    ),
    "contents are parts": chatml(
        text="{%- for p in m.content -%}{{ p.text }}{%- endfor -%}",
        result="{%- for p in m.content -%}<tool_response>{{ p.text }}</tool_response>{%- endfor -%}",
    ),
    "strings and parts": chatml(
        text="{%- if m.content is string -%}{{ m.content }}{%- else -%}{{ m.content[0].text }}{%- endif -%}"
    ),
    "an attribute of a string is asked for": chatml(
        result="{%- if m.content.content is defined -%}{{ m.content.content }}{%- else -%}{{ m.content }}{%- endif -%}"
    ),
    "trimmed": chatml(text="{{ m.content | trim }}"),
    "the beginning only": chatml(text="{{ m.content[:12] }}"),
    "safe markup escapes what follows": chatml(result="{{ ('<b>' | safe) + m.content + '<i>' }}"),
    "results as JSON": chatml(result="{{ {'content': m.content, 'id': m.tool_call_id} | tojson }}"),
    "results name their call": chatml(
        result="{%- for o in messages -%}{%- for c in o.tool_calls or [] -%}{%- if c.id == m.tool_call_id -%}"
        "{{ c.function.name }}{%- endif -%}{%- endfor -%}{%- endfor -%}: " + RESULT
    ),
    "a repeated result is warned of": chatml(
        result=RESULT + "{%- if m.content in ns.seen -%}Again!{%- endif -%}{%- set ns.seen = ns.seen + m.content -%}"
    ),
    "the prompt is always written": chatml(prompt="true"),
    "two closers": chatml(closer="\n<|im_end|>\n<|im_end|>\n"),
    "another closer at the end": chatml(
        closer="{{- '<|return|>' if loop.last and m.role == 'assistant' else '<|im_end|>' -}}"
    ),
    "no closer": chatml(opener="<|{{ m.role }}|>", closer="").replace("<|im_start|>assistant\n{%", "<|assistant|>{%"),
    "empty results are left out": chatml(result="{%- if m.content -%}" + RESULT + "{%- endif -%}"),
    "ids of calls in the past only": chatml(
        calls=CALLS + "{%- if m.tool_calls and not loop.last -%}{{ m.tool_calls[0].id }}{%- endif -%}"
    ),
    "tools with the last question": chatml(
        text="{%- if tools and loop.index0 == ns.last -%}<|tools|>{{ tools | tojson }}{%- endif -%}{{ m.content }}"
    ),
}


CONVERSATIONS = 25 if PROVE else 6
TOKENIZERS = {name: stand_in(source) for name, source in IDIOMS.items()}


@pytest.mark.parametrize("name", IDIOMS)
def test_certified_idioms_render_as_transformers_does(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    try:
        template = ChatTemplate.of(tokenizer)
    except TemplateError:
        return
    verdict = judge(template, tokenizer, (f"{name} {seed}" for seed in range(CONVERSATIONS)))
    assert not verdict.differences, "\n".join(map(str, verdict.differences))
    assert verdict.tails, verdict


@pytest.mark.parametrize(
    "name",
    [
        "plain", "reasoning is kept", "reasoning of earlier rounds is stripped", "a date", "results are merged",
        "contents are parts", "strings and parts", "trimmed", "results as JSON", "two closers",
    ],
)  # fmt: skip
def test_usual_idioms_are_certified_with_tools(name: str) -> None:
    assert ChatTemplate.of(TOKENIZERS[name]).certificate.tools
