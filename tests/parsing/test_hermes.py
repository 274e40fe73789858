"""The Hermes parser in real vocabularies, with its tags as tokens and as text: exactly what was sampled (law 9)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parsing.test_formats import check_spans
from support.byte_level import byte_level
from support.templates import NAMES, template_of, tokenizer_of
from tito_core.parsing import CallStatus, ParsedTurn, get_tool_parser

OK, MALFORMED, TRUNCATED = CallStatus.OK, CallStatus.MALFORMED, CallStatus.TRUNCATED
BY_TOKEN = ["byte level", "qwen3-tiny"]
BY_TEXT = ["text markup", "smollm2"]
SOUND = '{"name": "look", "arguments": {"at": "x"}}'
LOOK = f"<tool_call>{SOUND}</tool_call>"

# SmolLM2's vocabulary has no token for some bytes, and `encode` drops them.
text = st.text("ab1é漢 \n\"'\\{}[]:,<>/_", max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(text, values, max_size=3)
names = st.text("abé_", min_size=1, max_size=5)


def parse(name: str, completion: str | list[int], *, truncated: bool = False, tail: str = "") -> ParsedTurn:
    tokenizer = tokenizer_of(name)
    ids = tokenizer.encode(completion, add_special_tokens=False) if isinstance(completion, str) else completion
    session = get_tool_parser("hermes", tokenizer).start(tokenizer.encode(tail, add_special_tokens=False))
    session.feed(ids)
    return session.finish(truncated=truncated)


def spelled(name: str, completion: str) -> list[int]:
    """Return ids that spell a text without control tokens."""
    return list(template_of(name).encoder._inert_tokenizer.encode(completion).ids)


@pytest.mark.parametrize("name", NAMES)
def test_valid_calls_round_trip(name: str) -> None:
    tokenizer = tokenizer_of(name)

    @settings(deadline=None, max_examples=20)
    @given(st.lists(st.tuples(names, arguments), max_size=3), st.sampled_from(["", "\n", "So "]), st.booleans())
    def check(calls: list[tuple[str, dict[str, Any]]], between: str, escaped: bool) -> None:
        bodies = [json.dumps({"name": n, "arguments": a}, ensure_ascii=escaped) for n, a in calls]
        completion = between.join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)
        ids = tokenizer.encode(completion, add_special_tokens=False)
        turn = parse(name, ids)
        assert [(c.status, c.name, c.arguments) for c in turn.calls] == [(OK, n, a) for n, a in calls]
        assert turn.text == (between * (len(calls) - 1)).strip()
        check_spans(tokenizer, ids, turn, shared=name in BY_TEXT)

    check()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("completion", "reasoning", "shown", "statuses", "closed"),
    [
        ("Hello.", "", "Hello.", [], True),
        ("", "", "", [], True),
        (LOOK, "", "", [OK], True),
        (f"Let me see.\n{LOOK}\n{LOOK} Done.", "", "Let me see.\n\n Done.", [OK, OK], True),
        (f"<think>\nHm.\n</think>\n\n{LOOK}", "Hm.", "", [OK], True),
        (f"<think>{LOOK}</think>No.", LOOK, "No.", [], True),
        (f"<think>{LOOK}", "", "", [MALFORMED], False),
        (f"<think>{LOOK} Hm.", f"{LOOK} Hm.", "", [], False),
        (f"Well. <think>{LOOK}</think>No.", LOOK, "Well. No.", [], True),
        (f"{LOOK}<think>{LOOK}</think>{LOOK}<think>b", f"{LOOK}\nb", "", [OK, OK], False),
        ("<think></think>a", "", "a", [], True),
        (f"<tool_call>{SOUND}", "", "", [MALFORMED], True),
        (f"<tool_call>{SOUND}<tool_call>{SOUND}</tool_call>", "", "", [MALFORMED, OK], True),
        ("<tool_call></tool_call>", "", "", [MALFORMED], True),
        (f"{LOOK}<|im_end|>", "", "", [OK], True),
        ("Hello.<|im_end|><|endoftext|>", "", "Hello.", [], True),
    ],
)
def test_turns(
    name: str, completion: str, reasoning: str, shown: str, statuses: list[CallStatus], closed: bool
) -> None:
    turn = parse(name, completion)
    assert (turn.reasoning, turn.text, turn.reasoning_closed) == (reasoning, shown, closed)
    assert [call.status for call in turn.calls] == statuses


@pytest.mark.parametrize("name", BY_TOKEN)
def test_spelled_markup_is_text_where_there_are_control_tokens(name: str) -> None:
    assert parse(name, spelled(name, f"<think>{LOOK}</think>")).text == f"<think>{LOOK}</think>"
    tokenizer = tokenizer_of(name)
    start, stop = (tokenizer.convert_tokens_to_ids(tag) for tag in ("<tool_call>", "</tool_call>"))
    completion = json.dumps({"name": "look", "arguments": {"at": "</tool_call><tool_call></think>"}})
    [call] = parse(name, [start, *spelled(name, completion), stop]).calls
    assert (call.status, call.arguments) == (OK, json.loads(completion)["arguments"])
    assert (call.start, call.stop) == (0, len(spelled(name, completion)) + 2)


@pytest.mark.parametrize("name", BY_TOKEN)
def test_broken_bytes_before_a_call_do_not_move_it(name: str) -> None:
    tokenizer = tokenizer_of(name)
    broken = spelled(name, "\U00012000")[:1]
    turn = parse(name, [*broken, *tokenizer.encode(LOOK, add_special_tokens=False)])
    [call] = turn.calls
    assert (call.status, call.raw, call.start, turn.text) == (OK, LOOK, 1, "\ufffd")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("tail", "reasoning"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n", False),
        (
            "<|im_start|>assistant\n<think>cut off<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n",
            False,
        ),
        ("<think>\n", True),
        ("</think><think>", True),
        ("", False),
    ],
)
def test_reasoning_that_the_generation_prompt_opened(name: str, tail: str, reasoning: bool) -> None:
    turn = parse(name, f"Draft: {LOOK}</think>{LOOK}", tail=tail)
    assert [call.status for call in turn.calls] == [OK] * (1 if reasoning else 2)
    assert turn.reasoning == (f"Draft: {LOOK}" if reasoning else "")
    assert parse(name, "Hm.", tail=tail).reasoning_closed is not reasoning


def test_tags_that_are_flagged_special_are_not_stop_tokens() -> None:
    tokenizer = byte_level(control=())
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>", "<think>", "</think>"]})
    session = get_tool_parser("hermes", tokenizer).start()
    session.feed(tokenizer.encode(f"{LOOK}<|im_end|>", add_special_tokens=False))
    assert [call.status for call in session.finish(truncated=False).calls] == [OK]
