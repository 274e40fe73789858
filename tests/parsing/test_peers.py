"""One test for each kind of mistake that other parsers and hooks make.

The mistakes in an agent's loop are in tests/hooks: a call counted twice when it is run again or resumed after an
interrupt, parallel agents that reset each other's counts, and arguments of a wrong type that reach the tool.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from strands import tool

from parsing.families import CALL_FAMILIES, NAMES, ids_of, parse
from parsing.test_decoding import BYTE_IDS
from support.byte_level import byte_level
from support.histories import observe
from support.scripted import BACKENDS, call, tokenizer
from tito_core.hooks import LoopLimiter, ToolCallGuard
from tito_core.parsing import CallStatus, get_tool_parser

OK, MALFORMED, TRUNCATED = CallStatus.OK, CallStatus.MALFORMED, CallStatus.TRUNCATED
IN_JSON = [
    name
    for name, family in CALL_FAMILIES.items()
    if re.search(r'[:>}\]]? ?\{"at": "x"\}', family.render([("f", {"at": "x"})]))
]


@pytest.mark.parametrize("name", IN_JSON)
@pytest.mark.parametrize(
    "arguments", ['{"at": "x"', '{"at": x}', "{'at': 'x'}", '{"at": "x",}', '["x"]', '[{"at": "x"}]', '"x"', "null", ""]
)
def test_broken_arguments_are_malformed(name: str, arguments: str) -> None:
    """Other parsers read them as `{}`, or pass a list; the tool runs with its defaults."""
    family = CALL_FAMILIES[name]
    completion = family.render([("look", {"at": "x"})]).replace('{"at": "x"}', arguments)
    turn = parse(family, ids_of(family, completion))
    assert [call.status for call in turn.calls] == [MALFORMED]
    assert turn.calls[0].name in (None, "look")
    assert (turn.calls[0].arguments, turn.calls[0].reason[-1:]) == (None, ".")


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
