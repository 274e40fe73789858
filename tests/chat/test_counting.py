"""Estimates of the tokens that messages add to a prompt."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.byte_level import CHATML_TOOLS, byte_level
from support.conversations import LOOK, answer, calls, results, user
from support.templates import template_of
from tito_core.chat.messages import UnsupportedContentError
from tito_core.chat.template import ChatTemplate

PLAIN = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
TEXTS = st.text(st.characters(codec="utf-8", categories=["L", "N", "P"]), min_size=1, max_size=40)


def added(template: ChatTemplate, answer_: Any, more: list[Any]) -> int:
    """Return the tokens that messages add after an answer, from the delta."""
    delta = template.delta(answer_, more, template.closer_id, tool_specs=[LOOK], history=[user("a")])
    generation_prompt = len(template.first_prompt([user("a")], None, [LOOK]).ids) - template.count_tokens(
        [user("a")], None, [LOOK]
    )
    return len(delta.ids) - generation_prompt


def _calls(count: int) -> Any:
    return calls(*[("look", {"at": "it"})] * count)[0]


@pytest.mark.parametrize("name", ["byte level", "qwen3-tiny"])
@settings(max_examples=20)
@given(text=TEXTS)
def test_the_estimate_for_a_question_is_exact(name: str, text: str) -> None:
    template = template_of(name)
    assert template.added_tokens([user(text)]) == added(template, answer("b"), [user(text)])


@pytest.mark.parametrize("name", ["byte level", "qwen3-tiny"])
@settings(max_examples=20)
@given(texts=st.lists(TEXTS, min_size=1, max_size=3))
def test_the_estimate_for_results_is_close(name: str, texts: list[str]) -> None:
    template = template_of(name)
    exact = added(template, _calls(len(texts)), [results(*texts)])
    # Templates may render the first result differently, and texts may merge with newlines.
    assert abs(template.added_tokens([results(*texts)]) - exact) <= 3 * len(texts)


@settings(max_examples=20)
@given(TEXTS)
def test_a_question_after_results_adds_its_own_tokens(text: str) -> None:
    template = template_of("byte level")
    results_alone, user_alone = template.added_tokens([results("4")]), template.added_tokens([user(text)])
    both: Any = {"role": "user", "content": [*results("4")["content"], *user(text)["content"]]}
    assert template.added_tokens([both]) == results_alone + user_alone
    assert template.added_tokens([results("4"), user(text)]) == results_alone + user_alone


def test_no_messages_add_no_tokens() -> None:
    assert template_of("byte level").added_tokens([]) == 0


def test_a_history_with_answers_is_rendered() -> None:
    template = template_of("byte level")
    history = [user("a"), answer("b"), user("c")]
    assert template.added_tokens(history) == template.count_tokens(history, None, None)


def test_a_role_that_the_template_refuses_raises_its_reason() -> None:
    template = ChatTemplate.of(
        byte_level(
            template=PLAIN.replace("{{", "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{{")
        )
    )
    assert template.added_tokens([user("a b")]) == added(template, answer("b"), [user("a b")])
    with pytest.raises(ValueError, match="no tools"):
        template.added_tokens([results("4")])


def test_content_in_parts_is_counted() -> None:
    parts = CHATML_TOOLS.replace("message.content", "message.content[0].text")
    template = ChatTemplate.of(byte_level(template=parts))
    assert template.rendering.message_format.parts
    assert template.added_tokens([user("two words")]) == template_of("byte level").added_tokens([user("two words")])


def test_unsupported_blocks_cannot_be_counted() -> None:
    video: Any = {"role": "user", "content": [{"video": {"format": "mp4", "source": {"bytes": b""}}}]}
    with pytest.raises(UnsupportedContentError, match="video"):
        template_of("byte level").added_tokens([video])
