"""The judge accepts a delta that equals the plain rendering, and reports any difference."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from support.budget import examples
from support.byte_level import CHATML_TOOLS, byte_level
from support.families import TEMPLATE_FAMILIES
from support.talks import LOOK, Writer, after, numbers, talks
from support.zoo import of_structure
from tito_core.chat.certify import judge_of
from tito_core.chat.encoder import ContentSafeEncoder
from tito_core.chat.referee import Difference, Judge, JudgedTurn, Referee, RefusedError

CLOSER = "<|im_end|>"


class Bench:
    """A template's judge, and the expected tokens after a turn."""

    def __init__(self, tokenizer: Any, stops: tuple[str, ...]) -> None:
        self.tokenizer = tokenizer
        self.referee = Referee(tokenizer.chat_template, tokenizer.special_tokens_map)
        encoder = ContentSafeEncoder(tokenizer)
        self.judge: Judge = judge_of(self.referee, encoder)(tokenizer.convert_tokens_to_ids(list(stops)))

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def rest(self, turn: JudgedTurn) -> str:
        whole = self.referee.render([*turn.before, turn.answer, *turn.new], turn.system, turn.tools)
        return after(turn.answer, turn.new, whole)

    def best(self, turn: JudgedTurn) -> Callable[[int | None], list[int]]:
        """Return a function that returns the right delta after any stop."""
        ids = self.encode(self.rest(turn))
        end = self.tokenizer.convert_tokens_to_ids("<|end|>")  # gpt-oss replaces <|return|> by it if a message follows

        def delta(last: int | None) -> list[int]:
            written = last if last in ids else end
            return ids[ids.index(written) + 1 :] if written in ids else ids

        return delta

    def verdict(self, turn: JudgedTurn, text: str, *, cut: bool = False) -> Difference | None:
        """Judge a delta given as text, and check the stop for which it is requested."""
        requested: list[int | None] = []

        def delta(last: int | None) -> list[int]:
            requested.append(last)
            return self.encode(text)

        found = self.judge.difference(turn, delta)
        assert requested == [None if cut else self.tokenizer.convert_tokens_to_ids(CLOSER)]
        return found


@cache
def bench(source: str = CHATML_TOOLS) -> Bench:
    return Bench(byte_level(template=source), (CLOSER,))


@cache
def of_family(name: str, *stops: str) -> Bench:
    return Bench(TEMPLATE_FAMILIES[name].tokenizer(), stops)


def last_turn(messages: Any, *, completed: bool = True) -> JudgedTurn:
    return JudgedTurn(messages[:-2], messages[-2], messages[-1:], None, [LOOK], completed)


LONG = talks().filter(lambda messages: len(messages) > 2)
WITH_RESULTS = LONG.filter(lambda messages: "toolResult" in messages[-1]["content"][0])
WITH_TWO = LONG.filter(lambda messages: sum("toolResult" in block for block in messages[-1]["content"]) > 1)
RESULT = re.compile(r"\n<tool_response>\n.*?\n</tool_response>", re.DOTALL)


def right(turn: JudgedTurn) -> str:
    return bench().rest(turn).split(CLOSER, 1)[1]


@settings(max_examples=13)
@given(LONG)
def test_the_plain_rendering_itself_is_right(messages: Any) -> None:
    turn = last_turn(messages)
    assert bench().verdict(turn, right(turn)) is None


@settings(max_examples=13)
@given(LONG)
def test_a_truncated_turn_must_be_closed_first(messages: Any) -> None:
    turn = last_turn(messages, completed=False)
    whole = bench().rest(turn)
    assert bench().verdict(turn, whole, cut=True) is None
    assert isinstance(bench().verdict(turn, right(turn), cut=True), Difference)


@settings(max_examples=13)
@given(LONG, st.data())
def test_one_wrong_token_is_a_difference(messages: Any, data: Any) -> None:
    turn, made = last_turn(messages), bench()
    ids = made.encode(right(turn))
    at = data.draw(st.integers(0, len(ids) - 1))
    new = data.draw(st.lists(st.integers(0, len(made.tokenizer) - 1), max_size=2))
    wrong = [*ids[:at], *new, *ids[at + 1 :]]
    assume(wrong != ids)
    assert made.judge.difference(turn, lambda last: ids) is None
    assert isinstance(made.judge.difference(turn, lambda last: wrong), Difference)


def _swapped(text: str) -> str:
    one, other = RESULT.findall(text)[:2]
    return text.replace(one, "\0").replace(other, one).replace("\0", other)


@pytest.mark.parametrize(
    ("planted", "drawn"),
    [
        pytest.param(lambda text: RESULT.sub("", text, count=1), WITH_RESULTS, id="a lost result"),
        pytest.param(lambda text: RESULT.sub(lambda m: m[0] * 2, text, count=1), WITH_RESULTS, id="a doubled result"),
        pytest.param(_swapped, WITH_TWO, id="swapped results"),
        pytest.param(lambda text: text + text, LONG, id="all of it twice"),
        pytest.param(lambda text: "", LONG, id="nothing"),
        pytest.param(lambda text: re.sub(r"n\d{3}", "n999", text, count=1), LONG, id="another text"),
    ],
)
def test_a_planted_defect_is_a_difference(planted: Callable[[str], str], drawn: Any) -> None:
    @settings(max_examples=examples(10))
    @given(drawn)
    def check(messages: Any) -> None:
        turn = last_turn(messages)
        text = right(turn)
        wrong = planted(text)
        assert wrong != text
        found = bench().verdict(turn, wrong)
        assert found == Difference(text, wrong)

    check()


SHOWN = "message.content + '\\n</tool_response>' -}}".replace("\\n", "\n")


@pytest.mark.parametrize(
    "written",
    [
        pytest.param(("message.content + '", "'' + '"), id="leaves results out"),
        pytest.param(("message.content + '", "message.content * 2 + '"), id="repeats them"),
        pytest.param(("message.content + '", "(message.content if loop.last else '') + '"), id="shows the last only"),
    ],
)
def test_a_template_that_does_not_show_each_text_once_is_refused(written: tuple[str, str]) -> None:
    source = CHATML_TOOLS.replace("'\n<tool_response>\n' + " + written[0], "'\n<tool_response>\n' + " + written[1])
    assert source != CHATML_TOOLS
    writer = Writer(lambda: "So")
    messages = [writer.question(), writer.calls(2), writer.results(2)]
    turn = last_turn(messages)
    assert bench().judge.difference(turn, bench().best(turn)) is None
    if "''" in written[1] and "if" not in written[1]:  # without any result the template is refused in use as well
        with pytest.raises(RefusedError):
            bench(source).judge.difference(turn, lambda last: [])
    else:
        assert bench(source).judge.difference(turn, lambda last: []) is not None


def test_a_template_that_shows_results_in_another_order_is_refused() -> None:
    source = CHATML_TOOLS.replace("for message in messages", "for message in messages[:2] + messages[2:]|reverse|list")
    writer = Writer(lambda: "So")
    turn = last_turn([writer.question(), writer.calls(2), writer.results(2)])
    found = bench(source).judge.difference(turn, lambda last: [])
    assert found is not None
    assert found.found.index("n005") < found.found.index("n004")


@pytest.mark.parametrize(
    ("name", "stops", "others", "calls"),
    [
        # A token that closes a part of an answer is not a stop.
        ("parts end as questions do", ("<|return|>", "<|call|>"), ("<|end|>",), False),
        ("parts end as questions do", ("<|return|>", "<|call|>"), ("<|end|>",), True),
        ("calls close before the turn", ("<SPECIAL_12>",), ("</TOOLCALL>",), True),
        ("results within the turn", ("<|tools_suffix|>", "<|assistant_end|>"), ("<|tools_prefix|>",), True),
    ],
)
def test_a_stop_within_a_turn_is_a_difference(
    name: str, stops: tuple[str, ...], others: tuple[str, ...], calls: bool
) -> None:
    writer = Writer(lambda: "So")
    answered = writer.calls(thought=True, remark=True) if calls else writer.answer(thought=True)
    turn = last_turn([writer.question(), answered, writer.results() if calls else writer.question()])
    usual, early = of_family(name, *stops), of_family(name, *stops, *others)
    assert usual.judge.difference(turn, usual.best(turn)) is None
    found = early.judge.difference(turn, early.best(turn))
    assert found is not None
    assert others[0] in found.found


@pytest.mark.parametrize("calls", [False, True])
def test_an_opener_as_stop_is_a_difference_if_another_token_closes_the_turn(calls: bool) -> None:
    writer = Writer(lambda: "So")
    answered, new = (writer.calls(), writer.results()) if calls else (writer.answer(), writer.question())
    turn = last_turn([writer.question(), answered, new])
    usual, late = (of_family("ignores add_generation_prompt", stop) for stop in ("<|end|>", "<|start|>"))
    assert usual.judge.difference(turn, usual.best(turn)) is None
    found = late.judge.difference(turn, late.best(turn))
    assert found is not None
    assert "<|start|>" in found.found


def test_the_delta_is_requested_after_the_sampled_stop() -> None:
    channels = TEMPLATE_FAMILIES["parts end as questions do"]
    written = "{{ m.role }}<|message|>{{ m.content }}<|end|>"
    source = channels.source.replace(written, written.replace("<|end|>", "<|return|><|end|>"))
    assert source != channels.source
    made = Bench(of_structure(source, channels.special), ("<|return|>", "<|call|>", "<|end|>"))
    writer = Writer(lambda: "So")
    turn = last_turn([writer.question(), writer.answer(), writer.question()])
    best = made.encode(made.rest(turn).split("<|end|>", 1)[1])
    sampled = made.encode("<|return|>")
    assert made.judge.difference(turn, lambda last: best) is None
    wrong = made.judge.difference(turn, lambda last: best[1:] if [last] == sampled else best)
    assert isinstance(wrong, Difference)


def test_a_stop_outside_the_rendering_is_a_difference() -> None:
    writer = Writer(lambda: "So")
    turn = last_turn([writer.question(), writer.answer(), writer.question()])
    never = of_family("numbers all results", "<|call|>")
    assert isinstance(never.judge.difference(turn, never.best(turn)), Difference)


@settings(max_examples=10)
@given(st.integers(1, 3), st.booleans())
def test_results_lost_within_the_turn_are_a_difference(count: int, question: bool) -> None:
    writer = Writer(lambda: "So")
    turn = last_turn([writer.question(), writer.calls(count), writer.results(count, question)])
    made = of_family("results within the turn", "<|tools_suffix|>", "<|assistant_end|>")
    assert made.judge.difference(turn, made.best(turn)) is None
    text = made.rest(turn).split("<|tools_suffix|>", 1)[1]
    for lost in (text[text.index("]") + 1 :], text[text.index("]") :], ""):
        assert isinstance(made.judge.difference(turn, lambda last, lost=lost: made.encode(lost)), Difference)  # type: ignore[misc]


@settings(max_examples=10)
@given(st.integers(0, 5), st.integers(1, 3))
def test_results_numbered_over_the_conversation_are_right(earlier: int, count: int) -> None:
    writer = Writer(lambda: "So")
    messages = [writer.question()]
    for _ in range(earlier):
        messages += [writer.calls(), writer.results()]
    turn = last_turn([*messages, writer.calls(count), writer.results(count)])
    made = of_family("numbers all results", "<|end|>")
    text = made.rest(turn).split("<|end|>", 1)[1]
    assert f"[{earlier}] " in text
    for first in range(6):
        shown = re.sub(r"\[(\d+)\] ", lambda m, first=first: f"[{int(m[1]) - earlier + first}] ", text)  # type: ignore[misc]
        found = made.judge.difference(turn, lambda last, shown=shown: made.encode(shown))  # type: ignore[misc]
        assert (found is None) == (first == earlier)


def test_text_outside_the_conversation_is_a_difference() -> None:
    writer = Writer(lambda: "So")
    turn = last_turn([writer.question(), writer.calls(), writer.results()])
    text = right(turn)
    [number] = numbers(turn.new)
    method = text.replace(f"So {number}.", "<bound method Traced.content of <class 'tito_core.chat.traced.Traced'>>")
    assert method != text
    assert bench().verdict(turn, method) == Difference(text, method)


@pytest.mark.parametrize(
    ("text", "behind", "moved"),
    [
        ("header(message.role) + message.content", False, False),
        ("header(message.role)", False, False),
        ("header(message.role) + ('' if message.tool_calls else message.content)", True, True),
        ("header(message.role) + message.content + ('<|im_end|>' if message.tool_calls else '')", False, True),
    ],
    ids=["where it was sampled", "left out", "behind the calls", "a turn of its own"],
)
def test_moves_text(text: str, behind: bool, moved: bool) -> None:
    source = CHATML_TOOLS.replace("{{- header(message.role) + message.content -}}", "{{- " + text + " -}}")
    if behind:
        source = source.replace("{%- endfor -%}\n        {{- '<", "{%- endfor -%}{{- message.content + '<")
    writer = Writer(lambda: "So")
    turn = last_turn([writer.question(), writer.calls(2, remark=True), writer.results(2)])
    assert bench(source).judge.moves_text(turn) == moved
    without = last_turn([writer.question(), writer.calls(), writer.results()])
    assert not bench(source).judge.moves_text(without)
