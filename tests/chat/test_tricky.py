"""Templates that depend on what no probe covers: their deltas are right, or refused."""

from __future__ import annotations

from typing import Any

import pytest

from support.byte_level import CHATML_TOOLS, byte_level
from support.conversations import LOOK, calls, results, user
from tito_core.chat.ending import Opened
from tito_core.chat.template import ChatTemplate, TemplateError

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|eom|>",
    "<|turn|>",
    "<|said|>",
    "<|system|>",
    "<|call_end|>",
)
CALLED = "{%- for call in message.tool_calls or [] -%}"
CLOSED = "{{- '<|im_end|>\n' -}}\n    {%- endif -%}"


def of(source: str, control: tuple[str, ...] = ()) -> Any:
    return byte_level(control, source, SPECIAL, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"})


def test_a_closer_that_depends_on_the_tools_name_loses_no_result() -> None:
    by_name = "'<|eom|>' if message.tool_calls and message.tool_calls[-1].function.name == 'python' else '<|im_end|>'"
    source = CHATML_TOOLS.replace(CLOSED, "{{- (" + by_name + ") + '\n' -}}\n    {%- endif -%}")
    assert source != CHATML_TOOLS
    template = ChatTemplate.of(of(source))
    [called] = calls(("python", {"at": "it"}))
    with pytest.raises(TemplateError, match="does not end this answer with"):
        template.delta(called, [results("THE RESULT")], template.closer_id, tool_specs=[LOOK], history=[user("hi")])


def test_an_empty_system_block_does_not_make_a_part_of_the_closer_the_stop() -> None:
    source = (
        "<|turn|><|system|>{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}<|im_end|>"
        "{% for m in messages %}{% if m.role == 'user' %}<|turn|>user {{ m.content }}<|im_end|>"
        "{% elif m.role == 'assistant' %}<|turn|>assistant {{ m.content }}<|said|><|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|turn|>assistant {% endif %}"
    )
    tokenizer = of(source)
    assert ChatTemplate.of(tokenizer).stop_ids == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)


def test_a_word_in_the_templates_code_is_not_a_control_token() -> None:
    tokenizer = of(CHATML_TOOLS, control=("role",))
    template = ChatTemplate.of(tokenizer)
    own = tokenizer.apply_chat_template(
        [{"role": "user", "content": "which role?"}], add_generation_prompt=True, return_dict=False
    )
    assert template.first_prompt([user("which role?")], None, None).ids.tolist() == own


def test_a_call_truncated_after_its_own_end_gets_only_the_rest() -> None:
    source = CHATML_TOOLS.replace("+ '}</tool_call>' -}}", "+ '}<|call_end|></tool_call>' -}}")
    assert source != CHATML_TOOLS
    tokenizer = of(source, control=("</tool_call>",))
    template = ChatTemplate.of(tokenizer)
    ids = {text: tokenizer.convert_tokens_to_ids(text) for text in ("<|call_end|>", "</tool_call>", "<|im_end|>")}
    [called] = calls(("look", {"at": "it"}))
    for opened in (Opened.MESSAGE, Opened.CALL):
        found = template.delta(
            called, [results("x")], ids["<|call_end|>"], opened=opened, tool_specs=[LOOK], history=[user("hi")]
        ).ids.tolist()
        assert found[:2] == [ids["</tool_call>"], ids["<|im_end|>"]]
