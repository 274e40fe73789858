"""One test for each kind of mistake that other parsers and hooks make.

The mistakes in an agent's loop are in tests/hooks: a call counted twice when it is run again or resumed after an
interrupt, parallel agents that reset each other's counts, and arguments of a wrong type that reach the tool.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from strands import tool

from parsing.families import CALL_FAMILIES, GUARD, NAMES, Call, dumps, ids_of, parse, plain, unguarded
from parsing.test_decoding import BYTE_IDS
from support.byte_level import byte_level
from support.histories import observe
from support.scripted import BACKENDS, call, tokenizer
from tito_core.hooks import LoopLimiter, ToolCallGuard
from tito_core.parsing import CallStatus, get_tool_parser

OK, MALFORMED, TRUNCATED = CallStatus.OK, CallStatus.MALFORMED, CallStatus.TRUNCATED
CLOSING = {name: family.control[1] for name, family in CALL_FAMILIES.items() if len(family.control) > 1}
CUT_BY_TEXT = {
    *("deepseek_v3", "deepseek_v31", "kimi_k2", "gpt_oss"),
    *(name for name, family in CALL_FAMILIES.items() if not family.json_arguments),
}
"""Formats in which a string that spells a tag makes the call malformed, if the vocabulary lacks the tag as a token."""
IN_JSON = [
    name
    for name, family in CALL_FAMILIES.items()
    if re.search(r'[:>}\]]? ?\{"at": "x"\}', family.render([("f", {"at": "x"})]))
]


@pytest.mark.parametrize("name", IN_JSON)
@pytest.mark.parametrize(
    "arguments", ['{"at": "x"', '{"at": x}', "{'at': 'x'}", '{"at": "x",}', '["x"]', '"x"', "null", ""]
)
def test_broken_arguments_are_malformed(name: str, arguments: str) -> None:
    """Other parsers read them as `{}`, and the tool runs with its defaults."""
    family = CALL_FAMILIES[name]
    completion = family.render([("look", {"at": "x"})]).replace('{"at": "x"}', arguments)
    turn = parse(family, ids_of(family, completion))
    assert [call.status for call in turn.calls] == [MALFORMED]
    assert turn.calls[0].name in (None, "look")


@pytest.mark.parametrize("by_token", [True, False])
@pytest.mark.parametrize("name", sorted(CLOSING))
def test_a_string_may_spell_the_closing_tag(name: str, by_token: bool) -> None:
    """Other parsers cut the call there."""
    family, cut = CALL_FAMILIES[name], False
    for tag in family.control:
        calls: list[Call] = [("look", {"at": f"say {tag[0]}{GUARD}{tag[1:]} now", "of": "b"})]
        turn = parse(family, ids_of(family, family.render(calls), by_token), calls, by_token=by_token)
        found = [(call.status, call.arguments) for call in turn.calls]
        if found != [(OK, unguarded(calls[0][1]))]:
            cut = True
            assert set(found) == {(MALFORMED, None)}
    assert cut == (not by_token and name in CUT_BY_TEXT)


@pytest.mark.parametrize("name", [name for name in NAMES if not CALL_FAMILIES[name].single_call])
def test_twelve_calls_keep_their_order(name: str) -> None:
    """Other parsers sort ten or more calls by their ids as text."""
    family = CALL_FAMILIES[name]
    calls: list[Call] = [(f"tool_{i}", {"at": f"{i}"}) for i in range(12)]
    turn = parse(family, ids_of(family, family.render(calls)), calls)
    assert [(call.name, call.arguments) for call in turn.calls] == calls
    if name == "kimi_k2":
        assert [call.id for call in turn.calls] == [f"functions.tool_{i}:{i}" for i in range(12)]


@pytest.mark.parametrize("name", NAMES)
def test_a_call_of_an_unknown_tool_is_valid(name: str) -> None:
    """Other parsers drop the call, and the policy gets no error."""
    family = CALL_FAMILIES[name]
    turn = parse(family, ids_of(family, family.render([("unknown", {"at": "x"})])), [("look", {})])
    assert [(call.status, call.name, call.arguments) for call in turn.calls] == [(OK, "unknown", {"at": "x"})]


@pytest.mark.parametrize("name", [name for name in NAMES if CALL_FAMILIES[name].typed])
@pytest.mark.parametrize(
    "value", ["5", "true", "null", " x ", "\n\tdef f():\n\t\treturn 1\n", "[1]", '"x"', "", "0.10"]
)
def test_strings_stay_strings_including_blanks(name: str, value: str) -> None:
    """Other parsers read "5" as a number, and lose indentation."""
    family = CALL_FAMILIES[name]
    calls: list[Call] = [("look", {"at": value})]
    [call] = parse(family, ids_of(family, family.render(calls)), calls).calls
    assert call.arguments == {"at": value}
    assert plain(value) == value != dumps(value)


def test_a_bracket_in_an_argument_does_not_end_the_array() -> None:
    """Other parsers cut Phi-4-mini's array at the first `]`."""
    family = CALL_FAMILIES["phi4_mini"]
    calls: list[Call] = [("look", {"at": "a] b", "all": [[1], [2]]})]
    assert [call.arguments for call in parse(family, ids_of(family, family.render(calls))).calls] == [calls[0][1]]


@pytest.mark.parametrize("name", [name for name in NAMES if CALL_FAMILIES[name].think])
@pytest.mark.parametrize("truncated", [False, True])
def test_a_draft_in_reasoning_that_the_prompt_opened_is_not_a_call(name: str, truncated: bool) -> None:
    """Other parsers execute the draft, since the completion has no tag that opens the reasoning."""
    family = CALL_FAMILIES[name]
    opened, closed = family.think or ("", "")
    draft, meant = family.render([("draft", {"at": "y"})]), family.render([("look", {"at": "x"})])
    tail = ids_of(family, opened)
    for completion, calls, is_closed in (
        (f"Perhaps {draft}? {closed}{meant}", ["look"], True),
        (f"Perhaps {draft}? {closed}No.", [], True),
        (f"Perhaps {draft}?", [], False),
        (draft, [], False),
    ):
        turn = parse(family, ids_of(family, completion), tail=tail, truncated=truncated)
        assert [call.name for call in turn.calls if call.status == OK] == calls
        assert turn.reasoning_closed == is_closed
        if is_closed or truncated:
            assert draft in turn.reasoning
        else:
            assert {call.status for call in (*turn.calls, *turn.suspects)} <= {MALFORMED, CallStatus.SUSPECT}


@pytest.mark.parametrize("name", IN_JSON)
def test_a_list_of_arguments_is_malformed_with_its_text_and_span(name: str) -> None:
    """Other parsers pass a list to the tool, or read it as `{}`."""
    family = CALL_FAMILIES[name]
    completion = family.render([("look", {"at": "x"})]).replace('{"at": "x"}', '[{"at": "x"}]')
    ids = ids_of(family, completion)
    [call] = parse(family, ids).calls
    assert (call.status, call.arguments) == (MALFORMED, None)
    assert '[{"at": "x"}]' in call.raw
    assert call.reason.endswith(".")
    assert 0 <= call.start < call.stop <= len(ids)


@pytest.mark.parametrize("name", ["glm45", "glm47"])
def test_a_stop_token_that_opens_the_next_message_is_part_of_no_call(name: str) -> None:
    """GLM ends a call with `<|observation|>`, which other parsers take as text or insert twice."""
    family = CALL_FAMILIES[name]
    tokenizer = byte_level(family.control, special=("<|endoftext|>", "<|im_end|>", "<|observation|>"))
    completion = family.render([("look", {"at": "x"})])
    ids = [*tokenizer.encode(completion, add_special_tokens=False), tokenizer.convert_tokens_to_ids("<|observation|>")]
    session = get_tool_parser(name, tokenizer).start()
    session.feed(ids)
    turn = session.finish(truncated=False)
    [call] = turn.calls
    assert (call.status, call.arguments, call.raw, turn.text) == (OK, {"at": "x"}, completion, "")
    assert call.stop == len(ids) - 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tail", [b"\xe6", b"\xf0\x9f", b"\xf0\x9f\x99"])
def test_a_character_that_the_token_limit_cut_off_changes_nothing_before_it(name: str, tail: bytes) -> None:
    """Other parsers raise, or return the ids of a repaired text."""
    family = CALL_FAMILIES[name]
    sound = ids_of(family, family.render([("look", {"at": "x"})]))
    cut, whole = ([*sound, *(BYTE_IDS[byte] for byte in end)] for end in (tail, "€".encode()))
    turn, expected = (parse(family, ids, truncated=True) for ids in (cut, whole))
    assert [(one.status, one.name, one.arguments, one.start) for one in turn.calls] == [
        (one.status, one.name, one.arguments, one.start) for one in expected.calls
    ]
    assert turn.text.replace("\ufffd", "€") == expected.text
    assert turn.calls


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("hooks", [[], [ToolCallGuard(), LoopLimiter(max_parallel_tool_calls=20)]])
async def test_malformed_calls_do_not_run_and_twelve_results_keep_their_order(kind: str, hooks: list[Any]) -> None:
    """Others run the tool with its defaults for broken JSON, and sort ten or more results by their ids as text."""
    ran = []

    @tool
    def look(number: int = -1) -> str:
        """Look.

        Args:
            number: Which.
        """
        ran.append(number)
        return f"saw {number}"

    broken = ("[]", '"x"', "null", '{"number": 1,}', '{"number": 1', "{number: 1}", '{"number": 1}}', "")
    completion = [call("look", each) for each in broken] + [call("look", f'{{"number": {n}}}') for n in range(12)]
    chat = observe(kind, "".join(completion), "So.")
    agent = chat.agent(tools=[look], hooks=hooks)
    await agent.invoke_async("Look.")
    assert sorted(ran) == list(range(12))
    read = tokenizer().decode(chat.script.requests[1].prompt_ids).split("<|im_start|>")[-2]
    results = re.findall(r"saw \d+|was malformed and was not executed", read)
    assert results == ["was malformed and was not executed"] * len(broken) + [f"saw {n}" for n in range(12)]
