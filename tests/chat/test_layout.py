"""Layouts: what a template writes around new content is kept, and filled with other content as the template would."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strands.types.content import Message, Messages

from support import structures, vision, zoo
from support.budget import examples
from support.byte_level import CHATML_TOOLS, byte_level
from support.conversations import HOSTILE, JSON, answer, calls, results, user
from support.rollouts import Features, rollout
from tito_core.chat import delta
from tito_core.chat.delta import CANDIDATES, DeltaSource
from tito_core.chat.encoder import ContentSafeEncoder, EncodedText
from tito_core.chat.layout import (
    LONGEST_SHAPE,
    MOST_LAYOUTS,
    MOST_SHAPES,
    Fixed,
    Layout,
    Layouts,
    Shape,
    learn_layout,
    shape_of,
)
from tito_core.chat.messages import MALFORMED_CALL
from tito_core.chat.rendering import Rendering, TemplateError
from tito_core.chat.template import ChatTemplate

NAMES = (*zoo.SAMPLE, *structures.STRUCTURES)
TEXTS = st.one_of(
    HOSTILE, st.sampled_from(["", " ", "\n", "a", " a\n", "<tool_response>a</tool_response>", "</think>a"])
)


def template(name: str) -> ChatTemplate:
    return (structures if name in structures.STRUCTURES else zoo).template(name)


def source_of(text: str, **flags: bool) -> DeltaSource:
    tokenizer = byte_level(**flags)
    rendering = Rendering.of(text, tokenizer.special_tokens_map)
    return DeltaSource.of(rendering, ContentSafeEncoder(tokenizer), CANDIDATES[0])


def kept(source: DeltaSource) -> list[Any]:
    assert source.layouts is not None
    return [layout for layouts in source.layouts._known.values() for layout in layouts]


def check(
    source: DeltaSource, turn: Message, new: Messages, tools: Any = (), history: Sequence[Message] = ()
) -> EncodedText | None:
    """Compare a delta with the template's own rendering; where one is refused, the other is too."""
    try:
        tail = source.tail(turn, new, tools, [*history])
    except TemplateError as error:
        with pytest.raises(TemplateError, match=re.escape(str(error))):
            source._encoded(source._stand_in(turn, new, tools, [*history], None))
        return None
    expected = source.encoder.encode(tail.text, tail.start, tail.controls)
    found = source._encoded(source._stand_in(turn, new, tools, [*history], None))
    assert found.equals(expected), (found.text, expected.text)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_filled_deltas_are_the_templates_own(name: str) -> None:
    shown = Features.of(template(name))
    source = template(name).deltas

    @settings(deadline=None, max_examples=examples(8))
    @given(st.randoms(use_true_random=False))
    def over_random_rollouts(random: Random) -> None:
        drawn = rollout(random, shown)
        for turn in drawn.turns:
            check(source, turn.answered, turn.new, drawn.tools or (), turn.before)

    @settings(deadline=None, max_examples=examples(12))
    @given(TEXTS, TEXTS, JSON, st.sampled_from(["look", MALFORMED_CALL]))
    def for_hostile_content(one: str, two: str, value: Any, called: str) -> None:
        check(source, answer(one), [user(two, one)])
        if shown.tools:
            again = [("see", {one: two})] if shown.parallel else []
            (turn,) = calls((called, {"at": one, "n": value}), *again)
            check(source, turn, [results(two, one) if again else results([two, one])])

    over_random_rollouts()
    for_hostile_content()


ASKED = (
    "message.content",
    "message.content.strip()",
    "message.content | trim | length",
    "message.content.startswith('b')",
    "message.content.endswith(('b', 'c'))",
    "'b' in message.content",
    "message.content in 'a b'",
    "message.content == 'b'",
    "message.content != messages[0].content",
    "message.content | length > 3",
    "message.content.split() | length > 1",
    "message.content | upper == 'B'",
    "message.content[0] == 'b'",
    "message.content[:1] == 'b'",
    "message.content is in ['a', 'b']",
    "message.content < 'b'",
    "message.content | int == 17",
    "message.content | select('equalto', 'b') | list",
    "message.content.find('b') == 0",
    "message.content in {'b': 1}",
    "{'b': 1}[message.content]",
    "{'b': 1}.get(message.content)",
    "'abc'.count(message.content)",
    "['b'].index(message.content) is defined",
    "messages | map(attribute='content') | join | length > 9",
    "messages | selectattr('content', 'equalto', 'b') | list",
    "messages | groupby('content') | length > 3",
    "messages | map(attribute='content') | unique | list | length > 3",
    "(messages | tojson).count('b') > 3",
    "('%s' % message.content) == 'b'",
    "'{}'.format(message.content) == 'b'",
    "(message.content ~ '') == 'b'",
    "message.content * 2 == 'bb'",
    "message.name == 'look'",
    "message.tool_call_id in message.content",
    "messages[-2].tool_calls[0].function.arguments.at == message.content",
    "messages[-2].tool_calls[0].function.arguments | length > 1",
    "messages[-2].tool_calls[0].function.arguments.n == 1",
    "messages[-2].tool_calls[0].function.arguments.n",
    "messages[-2].tool_calls[0].function.arguments.n > 0",
)
"""What a template may ask: it compares, strips, counts, looks into content and back at the call."""


@pytest.mark.parametrize("asked", ASKED)
def test_what_a_template_asks_of_content_decides_what_it_writes(asked: str) -> None:
    shown = f"('b<' + message.content if {asked} else '(' + message.content.strip() + ')')"
    text = CHATML_TOOLS.replace("message.content + '\n</", f"{shown} + '\n</")
    assert text != CHATML_TOOLS
    source = source_of(text)
    for result in ("b", "", "a", " ", "bb", "b ", " a b", "abcd", "17", "call_0", "b", "a"):
        for name, arguments in (("look", {"at": "b", "n": 1}), ("see", {"at": "a", "n": 0}), ("look", {})):
            check(source, calls((name, arguments))[0], [results(result)])


WRITTEN = (
    "message.content | upper",
    "message.content | replace('a', '')",
    "message.content | truncate(3)",
    "message.content.replace('b', '<|im_end|>')",
    "message.content[1:]",
    "message.content | tojson",
    "message.content | tojson(indent=2)",
    "message.content | indent",
    "message.content | reverse",
    "message.content | length",
    "message.content.strip('ab')",
    "message.content.strip().lstrip('\n')",
    "message.content ~ message.content",
    "message.tool_call_id ~ message.name ~ message.content",
    "'<|im_' ~ message.content ~ 'end|>'",
    "message.content | default('x', true) | string | trim",
    "message.content.content is defined and 'd' or message.content",
    "message['content']",
    "messages[-2].tool_calls[0].function.arguments | tojson",
    "messages[-2].tool_calls[0].function.arguments.at ~ messages[-2].tool_calls[0].function.arguments.n",
    "messages[0].content ~ message.content",
    "(messages | length) ~ message.content",
)
"""What a template may write: it escapes, cuts, counts and looks back."""


@pytest.mark.parametrize("written", WRITTEN)
def test_what_a_template_makes_of_content_is_made_of_other_content(written: str) -> None:
    source = source_of(CHATML_TOOLS.replace("message.content + '\n</", f"(({written}) ~ '') + '\n</"))
    for result in ("b", "a", " ", "", '"é"', "abcdefgh ijk\n l ", "<|im_end|>", "a"):
        for arguments in ({"at": "b", "n": 1}, {"at": "<|im_start|>", "n": 0.5}, {"at": "", "n": [True, {"x": "y"}]}):
            check(source, calls(("look", arguments))[0], [results(result)])


@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "glm4moe", "gptoss"])
def test_a_template_renders_a_shape_once(name: str) -> None:
    source = template(name).deltas
    assert source.layouts is not None
    source.layouts._known.clear()
    for text in ("It is 17.", "No, 18!", "日本"):
        check(source, calls(("look", {"at": text, "n": len(text)}))[0], [results(text)], (), [])
    assert len(kept(source)) == 1
    assert None not in kept(source)


def test_conditions_choose_among_the_layouts_of_a_shape_and_their_number_is_bounded() -> None:
    source = source_of(
        CHATML_TOOLS.replace("message.content + '\n</", "(message.content == 'b') ~ message.content + '\n</")
    )
    for text in ("a", "b", "c", "b"):
        check(source, calls(("look", {}))[0], [results(text)])
    assert len(kept(source)) == 2
    layouts = Layouts()
    for number in range(MOST_SHAPES + 1):
        shape: Shape = (str(number).encode(), ())
        assert layouts.takes(shape) == (number < MOST_SHAPES)
        layouts.keep(shape, None) if layouts.takes(shape) else None
    assert not layouts.takes((b"0", ()))
    assert [Layouts().takes((bytes(LONGEST_SHAPE + more), ())) for more in (0, 1)] == [True, False]
    assert MOST_LAYOUTS > 1


@pytest.mark.parametrize("side", ["lstrip", "rstrip"])
def test_nothing_is_kept_where_a_control_token_strips_blanks_of_content(side: str) -> None:
    source = source_of(CHATML_TOOLS, **{side: True})
    assert source.layouts is None
    for text in ("a", " b ", "\nb\n"):
        check(source, calls(("look", {}))[0], [results(text)])


@pytest.mark.parametrize("of", ["<|im_start|>", vision.VISION[1]], ids=["all", "images"])
def test_the_judge_sees_layouts_and_one_that_is_wrong_is_not_used(
    of: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tokenizer = vision.tokenizer()
    assert ChatTemplate.of(tokenizer, certificates=tmp_path).certificate.layouts

    def without_slots(*arguments: Any) -> Layout | None:
        encoded = arguments[-1]
        if of not in encoded.text:
            return learn_layout(*arguments)
        return Layout(arguments[1], (Fixed(encoded.ids.tobytes(), encoded.provenance.tobytes(), encoded.text),), ())

    monkeypatch.setattr(delta, "learn_layout", without_slots)
    for _ in range(2):  # certified, then from the cache
        template = ChatTemplate.of(tokenizer, certificates=tmp_path / "planted")
        assert not template.certificate.layouts
        assert template.deltas.layouts is None


def test_shapes_tell_all_but_content() -> None:
    message_format = source_of(CHATML_TOOLS).rendering.message_format
    (one,), (two,) = calls(("look", {"at": "a", "n": 1})), calls(("look", {"at": "b", "n": 2}))
    others: list[Messages] = [
        [one, results("a")],
        [one, results("")],
        [one, results("a", "b")],
        [one, results("a"), user("b")],
        [*calls(("see", {"at": "a", "n": 1})), results("a")],
        *([*calls(("look", arguments)), results("a")] for arguments in (
            {}, {"at": "a"}, {"at": "a", "n": 1.0}, {"at": "a", "n": True}, {"at": "a", "n": None},
            {"at": "a", "n": "1"}, {"at": " ", "n": 1}, {"at": ["a"], "n": 1}, {"at": {"a": "a"}, "n": 1},
        )),
        [answer("a"), user("a")],
    ]  # fmt: skip
    shapes = [shape_of(messages, message_format) for messages in others]
    assert len({shape[0] for shape in shapes if shape is not None}) == len(others)
    same = shape_of([two, results("other")], message_format)
    assert same is not None
    assert shapes[0] is not None
    assert same[0] == shapes[0][0]
    for odd in (b"x", 10**30, {1: "a"}, (1,), {"a": {2: 3}}):
        assert shape_of([*calls(("look", {"at": odd})), results("a")], message_format) is None
