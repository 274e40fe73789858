"""Idioms of chat templates: certified ones render as transformers does, the others are refused."""

from __future__ import annotations

import pytest

from support.budget import PROVE
from support.families import TEMPLATE_FAMILIES
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
        f"{{%- set ns = namespace(n=0, seen='') -%}}{before}"
        "{%- if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif -%}"
        f"{{%- for m in messages -%}}{opener}"
        f"{{%- if m.role == 'tool' -%}}{result}{{%- elif m.role == 'assistant' -%}}{text}{calls}"
        f"{{%- else -%}}{text}{{%- endif -%}}{closer}{{%- endfor -%}}"
        "{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}"
    )


IDIOMS = {
    "reasoning after the text": chatml(text="{{ m.content }}" + THOUGHT),
    "questions are numbered": chatml(
        opener="<|im_start|>{{ m.role }}\n"
        "{%- if m.role == 'user' -%}{%- set ns.n = ns.n + 1 -%}Q{{ ns.n }}: {% endif -%}"
    ),
    "the number of messages": chatml(before="<|im_start|>system\n{{ messages | length }} messages<|im_end|>\n"),
    "contents are parts": chatml(
        text="{%- for p in m.content -%}{{ p.text }}{%- endfor -%}",
        result="{%- for p in m.content -%}<tool_response>{{ p.text }}</tool_response>{%- endfor -%}",
    ),
    "strings and parts": chatml(
        text="{%- if m.content is string -%}{{ m.content }}{%- else -%}{{ m.content[0].text }}{%- endif -%}"
    ),
    "trimmed": chatml(text="{{ m.content | trim }}"),
    "the beginning only": chatml(text="{{ m.content[:12] }}"),
    "safe markup escapes what follows": chatml(result="{{ ('<b>' | safe) + m.content + '<i>' }}"),
    "a repeated result is warned of": chatml(
        result=RESULT + "{%- if m.content in ns.seen -%}Again!{%- endif -%}{%- set ns.seen = ns.seen + m.content -%}"
    ),
    "two closers": chatml(closer="\n<|im_end|>\n<|im_end|>\n"),
    "empty results are left out": chatml(result="{%- if m.content -%}" + RESULT + "{%- endif -%}"),
    "ids of calls in the past only": chatml(
        calls=CALLS + "{%- if m.tool_calls and not loop.last -%}{{ m.tool_calls[0].id }}{%- endif -%}"
    ),
}
CERTIFIED = {
    "contents are parts": ("<|im_end|>",),
    "strings and parts": ("<|im_end|>",),
    "trimmed": ("<|im_end|>",),
    "two closers": ("<|im_end|>",),
    "parts end as questions do": ("<|return|>", "<|call|>"),
    "ignores add_generation_prompt": ("<|end|>",),
    "calls close before the turn": ("<SPECIAL_12>",),
    "results within the turn": ("<|assistant_end|>", "<|tools_suffix|>"),
    "numbers all results": ("<|end|>",),
    "asks for parts of text": ("<|end|>",),
    "ends by an end that it never writes": ("<|eos|>", "<|calls|>"),
    "ids of nine characters": ("<|end|>",),
}
"""Idioms that are certified with tools, and their stop tokens, the closer first."""
REFUSED = {
    "ignores add_generation_prompt but for the end": "after the next message",
    "results within a turn that has ended": "<|tools_suffix|>",
    "results before what ends the turn": "does not end this answer with",
}
CONVERSATIONS = 25 if PROVE else 6
TOKENIZERS = {name: stand_in(source) for name, source in IDIOMS.items()} | {
    name: family.tokenizer() for name, family in TEMPLATE_FAMILIES.items()
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_an_idiom_renders_as_transformers_does_or_is_refused(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    assert name in {**IDIOMS, **CERTIFIED, **REFUSED}
    try:
        template = ChatTemplate.of(tokenizer)
    except TemplateError as error:
        refused = str(error)
    else:
        refused = ""
    if refused or name in REFUSED:
        assert name not in CERTIFIED
        assert refused
        assert REFUSED.get(name, "") in refused
        return
    if stops := CERTIFIED.get(name):
        assert template.certificate.tools
        assert template.stop_ids == tuple(tokenizer.convert_tokens_to_ids(stops))
        assert template.closer_id == template.stop_ids[0]
        own = "messages like the rollout's own" in template.certificate.candidate
        assert own == (name == "numbers all results")
    verdict = judge(template, tokenizer, (f"{name} {seed}" for seed in range(CONVERSATIONS)))
    assert not verdict.differences, "\n".join(map(str, verdict.differences))
    assert verdict.tails, verdict
