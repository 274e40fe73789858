"""Deltas replayed: the template's own for all content, by way of what it wrote around other content before."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strands.types.content import Message, Messages

from support import structures, zoo
from support.byte_level import CHATML_TOOLS, MARKUP, byte_level
from support.conversations import HOSTILE, LOOK, answer, asked, calls, results
from support.rollouts import Features, rollout
from tito_core.chat import replay
from tito_core.chat.delta import CANDIDATES, DeltaSource, Placed
from tito_core.chat.encoder import ContentSafeEncoder, EncodedText
from tito_core.chat.messages import MALFORMED_CALL
from tito_core.chat.rendering import Rendering, TemplateError
from tito_core.chat.replay import VARIANTS, Replay, Replays
from tito_core.chat.template import ChatTemplate
from tito_core.chat.traced import Traced

NAMES = (*zoo.NAMES, *structures.STRUCTURES)
LATER = next(each for each in CANDIDATES if each.later is not None)
THROUGH_ARGUMENTS = (
    "gemma4",
    "diffusion_gemma",
    "glm4moe",
    "lfm2_2_5",
    "lfm2_v2",
    "muse",
    "nemotron",
    "qwen3_5",
    "qwen3_6",
)
RENDERED = {name for name in NAMES if name.startswith((*THROUGH_ARGUMENTS, "qwen3_8", "mistral-like"))}
"""Templates that are rendered after each call: they go through its arguments, compare these, or show own tools."""


def template(name: str) -> ChatTemplate:
    return structures.template(name) if name in structures.STRUCTURES else zoo.template(name)


def source(name: str) -> DeltaSource:
    return template(name)._source


def counted(made: DeltaSource, monkeypatch: pytest.MonkeyPatch) -> list[Placed]:
    """List what is rendered from now on."""
    seen: list[Placed] = []
    whole = DeltaSource.rendered

    def rendered(self: DeltaSource, placed: Placed) -> Any:
        if self is made:
            seen.append(placed)
        return whole(self, placed)

    monkeypatch.setattr(DeltaSource, "rendered", rendered)
    return seen


def own(made: DeltaSource, placed: Placed) -> EncodedText:
    """Give the tokens of the template's own rendering."""
    tail = made.rendered(placed)
    return made.encoder.encode(tail.text, tail.start, tail.controls)


def check(made: DeltaSource, replays: Replays, placed: Placed) -> bool:
    """Hold a delta against the template's own; whichever is refused, the other is too."""
    try:
        wanted = own(made, placed)
    except TemplateError as error:
        refused = str(error)
    else:
        assert replays.encoded(placed).equals(wanted)
        return True
    with pytest.raises(TemplateError, match=re.escape(refused)):
        replays.encoded(placed)
    return False


def turns(random: Random, made: ChatTemplate) -> Iterator[tuple[Message, Messages, Any, Messages]]:
    drawn = rollout(random, Features.of(made))
    for turn in drawn.turns:
        yield turn.answered, turn.new, drawn.tools or (), turn.before


@pytest.mark.parametrize("name", NAMES)
def test_they_are_the_templates_own_over_random_rollouts(name: str) -> None:
    made = source(name)
    replays = Replays(made)

    @settings(deadline=None, max_examples=10)
    @given(st.randoms(use_true_random=False))
    def holds(random: Random) -> None:
        for turn in turns(random, template(name)):
            check(made, replays, made.placed(*turn))

    holds()


TEXTS = st.one_of(HOSTILE, st.sampled_from(["", " ", "\n", "a", "<tool_response>a</tool_response>", "</think>a"]))


@pytest.mark.parametrize("name", NAMES)
def test_they_are_for_hostile_content_that_follows_other_content(name: str) -> None:
    made = source(name)
    replays = Replays(made)
    shows_tools = template(name).certificate.tools
    several = Features.of(template(name)).parallel

    @settings(deadline=None, max_examples=25)
    @given(TEXTS, TEXTS, TEXTS, st.sampled_from(["look", MALFORMED_CALL]))
    def holds(one: str, two: str, three: str, called: str) -> None:
        if not shows_tools:
            check(made, replays, made.placed(answer(one), [asked(two, three)], (), []))
            return
        again = [("see", {one: two})] if several else []
        (turn,) = calls((called, {"at": one, "n": 1}), *again)
        shown = results(two, three) if several else results([two, three])
        check(made, replays, made.placed(turn, [shown], (), []))
        check(made, replays, made.placed(answer(one), [asked(two)], (), []))

    holds()


@pytest.mark.parametrize("name", NAMES)
def test_the_template_is_not_asked_again_what_it_writes_around_results(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = source(name)
    replays = Replays(made)
    seen = counted(made, monkeypatch)
    for text in ("It is 17.", "No, 18!", "日本"):
        if template(name).certificate.tools:
            (turn,) = calls(("look", {"at": text, "n": len(text)}))
            replays.encoded(made.placed(turn, [results(text)], (), []))
        else:
            replays.encoded(made.placed(answer("a"), [asked(text)], (), []))
    assert len(seen) == (3 if name in RENDERED else 1)


@pytest.mark.parametrize("name", ["qwen3", "deepseekv3", "glm4moe"])
def test_what_a_template_learns_of_content_is_a_guard(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = source(name)
    replays = Replays(made)
    placed = [
        made.placed(answer("a"), [asked(text)], (), [])
        for text in ("b", "<tool_response>b</tool_response>", "c", "<tool_response>c</tool_response>", "")
    ]
    wanted = [own(made, each) for each in placed]
    seen = counted(made, monkeypatch)
    assert all(replays.encoded(each).equals(own_) for each, own_ in zip(placed, wanted, strict=True))
    assert len(seen) == (3 if name == "qwen3" else 2)  # what is empty is always rendered


def test_messages_of_another_shape_are_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    made = source("qwen3")
    replays = Replays(made)
    (one,), (two,) = calls(("look", {"at": "a"})), calls(("look", {"at": "a"}), ("look", {"at": "b"}))
    (none,) = calls(("look", {}))
    question: Message = {"role": "user", "content": [*results("a")["content"], {"text": "b"}]}
    several: list[tuple[Message, Messages]] = [
        (answer("a"), [asked("b")]),
        (answer("a"), [asked("b"), asked("c")]),
        (one, [results("a")]),
        (two, [results("a", "b")]),
        (none, [results("a")]),
        (one, [question]),
    ]
    seen = counted(made, monkeypatch)
    for number, (answered, new) in enumerate(several, 1):
        for _ in range(2):
            replays.encoded(made.placed(answered, new, (), []))
        assert len(seen) == number


def test_a_shape_tells_all_but_content() -> None:
    content = Traced.content("a", 0)
    shapes = [
        replay._shape(items, [])
        for items in (
            [{"content": content}],
            [{"text": content}],
            [{"content": content, "text": content}],
            [{"content": [content]}],
            [{"content": "a"}],
            [{"content": content}, {"content": content}],
            [{"content": Traced.content("a", 1)}],
            [{content: content}],
            [{}],
            [[]],
            [[[]]],
            [[[], []]],
        )
    ]
    assert len(set(shapes)) == len(shapes)
    assert replay._shape([{"content": Traced.content("b", 0)}], []) == shapes[0]
    assert replay._shape([{content: [None, 1, {content: False}]}], []) == replay._shape([{content: content}], [])
    deep: Any = content
    for _ in range(20):
        deep = [deep]
    empty = Traced.content("", 0)
    for unusual in (
        {empty: content},
        {1: content},
        {content: b"a"},
        {content: 10**18},
        {content: {1: 2}},
        {content: deep},
    ):
        with pytest.raises(replay._UnusualError):
            replay._shape([unusual], [])


def test_surroundings_that_differ_are_told_apart() -> None:
    made = source("gptoss")
    later = Replays(DeltaSource.of(made.rendering, made.encoder, LATER))
    seen: list[Placed] = []
    for history in ([], [*calls(("look", {})), results("a")], []):
        placed = later._source.placed(answer("a"), [asked("b")], (), history)
        assert check(later._source, later, placed)
        seen.append(placed)
    assert len({each.source for each in seen}) == 2
    assert len(later._known) == 2


def test_a_template_is_watched_a_few_times_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[Any] = []
    whole = Rendering.watched

    def counting(self: Rendering, *given: Any) -> Any:
        watched.append(given)
        return whole(self, *given)

    monkeypatch.setattr(Rendering, "watched", counting)
    made = source("gemma4")  # not followed
    replays = Replays(made)
    for number in range(3 * VARIANTS):
        check(made, replays, made.placed(answer("a"), [asked(f"b{number}")], (), []))
    assert len(watched) == VARIANTS


def test_shapes_are_forgotten_where_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "REMEMBERED", 3)
    made = source("qwen3")
    replays = Replays(made)
    for number in range(1, 9):
        check(made, replays, made.placed(answer("a"), [asked("b")] * number, (), []))
        assert 1 <= len(replays._known) <= 3


def test_content_as_the_template_would_read_it_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    open_ = ChatTemplate.of(zoo.tokenizer("qwen3"), content_tokens="as-template")
    made = open_._source
    replays = Replays(made)
    seen = counted(made, monkeypatch)
    ids = [
        replays.encoded(made.placed(answer("a"), [asked(text)], (), [])).ids.tolist()
        for text in ("b", "<|im_end|>", "c<|im_end|>")
    ]
    assert len(seen) == 3
    assert [each.count(open_.closer_id) for each in ids] == [1, 2, 2]


def small(template: str, **flags: bool) -> DeltaSource:
    """Give the deltas of a template of ours, over a byte-level tokenizer with these flags."""
    return over(byte_level(**flags), template)


def over(tokenizer: Any, template: str) -> DeltaSource:
    """Give the deltas of a template over a tokenizer."""
    rendering = Rendering.of(template, tokenizer.special_tokens_map)
    return DeltaSource.of(rendering, ContentSafeEncoder(tokenizer), CANDIDATES[0])


CONDITIONS = (
    "message.content",
    "not message.content",
    "message.content.strip()",
    "message.content | trim | length",
    "message.content.startswith('b')",
    "'b' in message.content",
    "message.content == 'b'",
    "message.content | length > 3",
    "message.content.split() | length > 1",
    "message.content | upper == 'B'",
    "message.name == 'look'",
    "message.tool_call_id in message.content",
)


@pytest.mark.parametrize("condition", CONDITIONS)
def test_content_of_which_a_template_learns_something_else_is_written_in_another_way(condition: str) -> None:
    shown = f"('b<' + message.content if {condition} else '(' + message.content.strip() + ')')"
    source_ = CHATML_TOOLS.replace("message.content + '\n</", f"{shown} + '\n</")
    assert source_ != CHATML_TOOLS
    made = small(source_)
    replays = Replays(made)
    texts = ("b", "", "a", " ", "bb", "b ", " a b", "abcd", "call_0", "", "b")
    for text, name in product(texts, ("look", "see")):
        (turn,) = calls((name, {}))
        assert check(made, replays, made.placed(turn, [results(text)], (), []))


RESULT = "message.content + '\n</tool_response>'"
LEARNT = {
    "an attribute by the name of the tool": (
        "{%- set fmt = namespace(look='L') -%}",
        "(fmt[message.name] or '') ~ message.content",
        [("other", {}, "a"), ("look", {}, "a")],
    ),
    "an attribute by content": (
        "",
        "('d' if header[message.content] is defined else 'n') ~ message.content",
        [("look", {}, " a "), ("look", {}, "name")],
    ),
    "an attribute of a number": (
        "",
        "('d' if 5[message.content] is defined else 'n') ~ message.content",
        [("look", {}, " a "), ("look", {}, "real")],
    ),
    "a method that text has not": (
        "",
        "message.content if message.content.items is defined else message.content.strip()",
        [("look", {}, "a"), ("look", {}, " a ")],
    ),
    "an argument by the name of a method": (
        "{%- set n = namespace(x=false) -%}{%- for m in messages -%}{%- for c in m.tool_calls or [] -%}"
        "{%- set n.x = c.function.arguments.startswith is defined -%}{%- endfor -%}{%- endfor -%}",
        "('y' if n.x else 'n') ~ message.content",
        [("look", {"startswith": "x"}, "a"), ("look", {"b": "x"}, "a")],
    ),
    "arguments that are gone through twice": (
        "{%- set n = namespace(x=false) -%}{%- for m in messages -%}{%- for c in m.tool_calls or [] -%}"
        "{%- set i = c.function.arguments | items -%}{%- for k in i -%}{%- endfor -%}"
        "{%- for k in i -%}{%- set n.x = true -%}{%- endfor -%}{%- endfor -%}{%- endfor -%}",
        "message.content if n.x else message.content.strip()",
        [("look", {"a": "x"}, "b"), ("look", {"a": "x"}, " b ")],
    ),
    "whether there are arguments": (
        "{%- set n = namespace(x='') -%}{%- for m in messages -%}{%- for c in m.tool_calls or [] -%}"
        "{%- set n.x = 'L' if c.function.arguments is mapping else 'M' -%}{%- endfor -%}{%- endfor -%}",
        "'r' ~ n.x ~ message.content",
        [("look", {}, "a"), ("look", [[]], "a"), ("look", [], "a"), ("look", {"a": 1}, "a"), ("look", "x", "a")],
    ),
    "text of bytes": ("", "'t'.encode().decode() + message.content", [("look", {}, "he"), ("look", {}, "z")]),
    "a sum": (
        "",
        "([['t' ~ message.content]]|sum(start=[]))[0]",
        [("look", {}, "he"), ("look", {}, "z")],
    ),
    "content of ours": ("", "messages[0].content ~ message.content", [("look", {}, "\n\nhi"), ("look", {}, "1")]),
    "a number too long to be written": (
        "",
        "message.content",
        [("look", {"n": 1}, "a"), ("look", {"n": 10**5000}, "a")],
    ),
    "what is no JSON": (
        "",
        "message.content",
        [("look", {"a": ["x"]}, "a"), ("look", {"a": [b"x"]}, "a"), ("look", {"a": b"x"}, "a")],
    ),
}
"""What a template may learn in ways of its own: what stands first in it, what it writes of results, and histories."""


@pytest.mark.parametrize("learnt", LEARNT)
@pytest.mark.parametrize("tokenizer", ["byte level", "qwen3"])
def test_what_is_learnt_in_ways_that_are_not_followed_is_learnt_each_time(learnt: str, tokenizer: str) -> None:
    before, shown, turns_ = LEARNT[learnt]
    text = before + CHATML_TOOLS.replace(RESULT, RESULT.replace("message.content", f"({shown})"))
    made = small(text) if tokenizer == "byte level" else over(zoo.tokenizer(tokenizer), text)
    for order in (turns_, turns_[::-1]):
        replays = Replays(made)
        for name, arguments, result in order * 2:
            check(made, replays, made.placed(calls((name, arguments))[0], [results(result)], (), []))


def test_a_result_that_the_template_leaves_out_is_refused_each_time() -> None:
    begin = CHATML_TOOLS.index("        {{- '<|im_start|>user' if loop.first")
    source_ = CHATML_TOOLS[:begin] + CHATML_TOOLS[CHATML_TOOLS.index("    {%- else -%}") :]
    template_ = ChatTemplate.of(byte_level(template=source_))
    (turn,) = calls(("look", {}))
    for text in ("result", "\n", "result", " ", "result"):
        if text.strip():
            with pytest.raises(TemplateError, match="leaves out message 2"):
                template_.delta(turn, [results(text)], None)
        else:
            template_.delta(turn, [results(text)], None)


def test_results_in_one_message_and_in_two_are_told_apart() -> None:
    only_last = CHATML_TOOLS.replace(
        "+ message.content + '\n</tool", "+ (message.content if loop.last else '') + '\n</tool"
    )
    assert only_last != CHATML_TOOLS
    made = small(only_last)
    replays = Replays(made)
    (turn,) = calls(("look", {}), ("look", {}))
    one = results("a", "b")
    two: Messages = [{"role": "user", "content": [block]} for block in one["content"]]
    assert [check(made, replays, made.placed(turn, new, (), [])) for new in ([one], two, [one], two)] == [
        True,
        False,
        True,
        False,
    ]


_ITEMS = "{%- for k, v in c.function.arguments.items() -%}"
QUOTING = (
    f"{{{{- '<tool_call>' -}}}}{_ITEMS}{{{{- v -}}}}{{%- endfor -%}}{{{{- '</tool_call>' -}}}}",
    f"{{{{- c.function.arguments | tojson -}}}}{_ITEMS}{{{{- '<|im_' ~ v ~ 'end|>' -}}}}{{%- endfor -%}}",
    "{{- c.function.arguments | tojson ~ '<|im_' ~ (c.function.arguments | items | first | last) ~ 'end|>' -}}",
)


@pytest.mark.parametrize("call", QUOTING)
def test_what_is_written_of_arguments_may_be_empty(call: str) -> None:
    begin, end = (
        CHATML_TOOLS.index("            {{- '\n' if message.content or not"),
        CHATML_TOOLS.index("        {%- endfor -%}\n        {{- '<|im_end|>\n' -}}\n    {%- endif"),
    )
    made = small(CHATML_TOOLS[:begin].replace("for call in", "for c in") + call + CHATML_TOOLS[end:])
    for order in (("x", ""), ("", "x"), (["a"], []), ([], ["a"]), (1, "")):
        replays = Replays(made)
        for value in (*order, *order):
            check(made, replays, made.placed(calls(("look", {"at": value}))[0], [results("a")], (), []))


CLOSED = """{%- for message in messages -%}
{%- if message.role == 'assistant' -%}<|im_start|>{{ message.content }}<|im_end|>
{%- else -%}{{ '\n' + message.content + '<|im_start|>' }}{%- endif -%}{%- endfor -%}"""


def test_a_closing_token_may_swallow_the_blanks_after_it() -> None:
    others = ("<|im_start|>", "<|endoftext|>", *MARKUP)
    made = over(byte_level(control=others, special=("<|im_end|>",), rstrip=True), CLOSED)
    for order in (("b", " b", "\nb", "b"), (" b", "b")):
        replays = Replays(made)
        for text in order:
            assert check(made, replays, made.placed(answer("a"), [asked(text)], (), []))


def test_a_result_of_no_call_has_no_name() -> None:
    made = small(CHATML_TOOLS.replace("message.content + '\n</", "(message.name or 'nobody') + '\n</"))
    replays = Replays(made)
    (turn,) = calls(("look", {}))
    known, unknown = results("a", "b"), results("a", "b")
    known["content"][1]["toolResult"]["toolUseId"] = "call_0"
    texts = []
    for shown in (known, unknown, known):
        placed = made.placed(turn, [shown], (), [])
        assert check(made, replays, placed)
        texts.append(str.__str__(made.rendered(placed).text))
    assert [text.count("nobody") for text in texts] == [0, 1, 0]


def test_content_of_the_templates_own_keeps_its_provenance() -> None:
    """What is written of tools after the answer is content, and the same each time."""
    ending = CHATML_TOOLS.rindex("{%- if add_generation_prompt")
    source_ = f"{CHATML_TOOLS[:ending]}{{{{ messages[0].content + '<|im_end|>' }}}}{CHATML_TOOLS[ending:]}"
    made = small(source_)
    replays = Replays(made)
    for text in ("b", "c"):
        placed = made.placed(answer("a"), [asked(text)], (), [])
        assert check(made, replays, placed)
        assert str.__str__(made.opening[0]["content"]) in str.__str__(made.rendered(placed).text)


@pytest.mark.parametrize("side", ["lstrip", "rstrip"])
def test_a_control_token_may_swallow_the_blanks_of_content(side: str) -> None:
    made = small(CHATML_TOOLS, **{side: True})
    replays = Replays(made)
    for text in ("a", " b ", "\nb\n", "b", " "):
        (turn,) = calls(("look", {}))
        assert check(made, replays, made.placed(turn, [results(text)], (), []))
        assert check(made, replays, made.placed(answer("a"), [asked(text)], (), []))
    assert not any(each for known in replays._known.values() for each in known)


def test_the_tools_of_a_rollout_are_its_own() -> None:
    made = source("mistral-like")
    replays = Replays(made)
    other: Any = {**LOOK, "name": "see"}
    for tools in ([LOOK], [other], [], [LOOK]):
        assert check(made, replays, made.placed(answer("a"), [asked("b")], tools, []))
    assert not replays._known


def test_threads_share_what_is_known() -> None:
    made = source("qwen3")
    replays = Replays(made)
    drawn = [made.placed(answer("a"), [asked(f"b{i}")] * (i % 7 + 1), (), []) for i in range(300)]
    wanted = [own(made, each) for each in drawn]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(replays.encoded, drawn))
    assert all(one.equals(other) for one, other in zip(found, wanted, strict=True))


def test_a_replay_that_differs_from_the_rendering_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made = source("qwen3")
    replays = Replays(made)
    whole = Replay.encoded

    def off_by_one(self: Replay, values: Any) -> EncodedText | None:
        found = whole(self, values)
        return None if found is None else EncodedText(found.ids + 1, found.provenance)

    monkeypatch.setattr(Replay, "encoded", off_by_one)
    placed = made.placed(answer("a"), [asked("b")], (), [])
    for _ in range(3):
        assert check(made, replays, placed)
    assert [each for known in replays._known.values() for each in known] == [None] * 3
