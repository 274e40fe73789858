"""Broken calls are malformed, with a reason, and never become another call (law 9)."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from parsing.families import CALL_FAMILIES, GUARD, NAMES, Call, Family, dumps, ids_of, parse
from tito_core.parsing import CallStatus, ParsedTurn, get_tool_parser

OK, MALFORMED, TRUNCATED = CallStatus.OK, CallStatus.MALFORMED, CallStatus.TRUNCATED
CALLS: list[Call] = [("look", {"at": "x", "far": 5, "all": [True]}), ("count", {"of": "b"})]
VERBATIM = (
    "deepseek_v32",
    "deepseek_v4",
    "deepseek_v41",
    "gemma4",
    "functiongemma",
    "kimi_k3",
    *(n for n in NAMES if CALL_FAMILIES[n].typed),
)
"""Formats in which an added character may become part of a value without quotes."""
STRUCTURE = "<>{}[]\":;,|/=｜()'."


def sound(turn: ParsedTurn) -> Counter[str]:
    return Counter(f"{call.name} {dumps(call.arguments)}" for call in turn.calls if call.status == OK)


def calls_for(family: Family) -> list[Call]:
    return CALLS[:1] if family.single_call else CALLS


@pytest.mark.parametrize("name", NAMES)
def test_losing_a_tag_or_a_character_of_structure_makes_no_other_call(name: str) -> None:
    family, calls = CALL_FAMILIES[name], calls_for(CALL_FAMILIES[name])
    completion = family.render(calls)
    whole = sound(parse(family, ids_of(family, completion), calls))
    assert whole.total() == len(calls)
    damaged = {completion[:i] + completion[i + 1 :] for i, c in enumerate(completion) if c in STRUCTURE}
    if name not in VERBATIM:
        damaged |= {completion[:i] + c + completion[i:] for i, c in enumerate(completion) if c in STRUCTURE}
    for tag in family.control:
        places = [match.span() for match in re.finditer(re.escape(tag), completion)]
        damaged |= {completion[:start] + completion[stop:] for start, stop in places}
        damaged |= {completion[:start] + tag + completion[start:] for start, _ in places}
        damaged |= {
            completion[:start] + other + completion[stop:] for start, stop in places for other in family.control
        }
    reported = 0
    for each in damaged - {completion}:
        for by_token in (True, False):
            turn = parse(family, ids_of(family, each, by_token), calls, by_token=by_token)
            assert sound(turn) <= whole, each
            reported += any(call.status == MALFORMED for call in turn.calls)
    assert reported > len(damaged) / 3


@pytest.mark.parametrize("name", NAMES)
def test_a_control_token_anywhere_in_a_call_is_never_content(name: str) -> None:
    family, calls = CALL_FAMILIES[name], calls_for(CALL_FAMILIES[name])
    parser, tokenizer = get_tool_parser(name, family.tokenizer(True)), family.tokenizer(True)
    ids, spelled, refused = ids_of(family, family.render(calls)), set(), set()
    for control in sorted(parser.markup.controls):
        tag = tokenizer.decode([control])
        for at in range(1, len(ids)):
            turn = parse(family, [*ids[:at], control, *ids[at:]], calls)
            assert all(tag not in f"{call.name} {dumps(call.arguments)}" for call in turn.calls), (tag, at)
            refused |= {tag for call in turn.calls if call.status == MALFORMED}
        written = family.render([("look", {"at": f"x {tag[:1]}{GUARD}{tag[1:]} y"})])  # the same text in other tokens
        turn = parse(family, ids_of(family, written), [("look", {"at": ""})])
        spelled |= {tag for call in turn.calls if call.status == OK and tag in (call.arguments or {})["at"]}
    assert refused == {tokenizer.decode([control]) for control in parser.markup.controls}
    assert spelled == refused - family.tokenizer(False).get_added_vocab().keys()  # which no other tokens spell


SOUND = '{"name": "look", "arguments": {"at": "x"}}'


def t(body: str) -> str:
    return f"<tool_call>{body}</tool_call>"


def q(body: str) -> str:
    return f"<tool_call>\n<function=look>\n{body}</function>\n</tool_call>"


def p(value: str, key: str = "at") -> str:
    return f"<parameter={key}>\n{value}\n</parameter>\n"


def m(body: str) -> str:
    return f'<minimax:tool_call>\n<invoke name="look">\n{body}</invoke>\n</minimax:tool_call>'


def d(body: str) -> str:
    return f'<｜DSML｜tool_calls>\n<｜DSML｜invoke name="look">\n{body}</｜DSML｜invoke>\n</｜DSML｜tool_calls>'


def h(head: str, body: str = "{}", end: str = "<|call|>") -> str:
    return f"<|channel|>{head}<|message|>{body}{end}"


def ge(body: str) -> str:
    return f"<|tool_call>{body}<tool_call|>"


TO = "commentary to=functions.look <|constrain|>json"
Q = '<|"|>'


NESTED: list[object] = []
for _ in range(89):
    NESTED = [NESTED]
UNUSUAL = [
    ("hermes", t(' {"arguments" :\n{"at": "\\u00e9\\ud83d\\ude42\\n", "far": 1e3, "n": -0}, "name":"look"}\t'),
     {"at": "é🙂\n", "far": 1000.0, "n": 0}),
    ("hermes", t(SOUND.replace('"x"', 'null, "n": ' + "[" * 90 + "]" * 90)), {"at": None, "n": NESTED}),
    ("qwen3_coder", q("<parameter=at>x</parameter>"), {"at": "x"}),
    ("qwen3_coder", q(p("")), {"at": ""}),
    ("qwen3_coder", q(p("\n x\t\n")), {"at": "\n x\t\n"}),
    ("qwen3_coder", q(p("True", "no") + p("5", "unknown")), {"no": True, "unknown": 5}),
    ("glm45", "<tool_call>look</tool_call>", {}),
    ("glm45", "<tool_call>look\n</tool_call>", {}),
    ("glm47", "<tool_call>look<arg_key>at</arg_key><arg_value> x\n</arg_value></tool_call>", {"at": " x\n"}),
    ("glm47", "<tool_call>look<arg_key>at</arg_key><arg_value>5</arg_value></tool_call>", {"at": "5"}),
    ("minimax_m2", m('<parameter name="at"> x </parameter>'), {"at": " x "}),
    ("deepseek_v4", d(""), {}),
    ("mistral", '[TOOL_CALLS] [{"name": "look", "arguments": {}}]', {}),
    ("gpt_oss", " to=functions.look" + h("commentary json"), {}),
    ("gpt_oss", h("commentary to=functions.look<|constrain|>json"), {}),
    ("gpt_oss", h("commentary to=functions.look"), {}),
    ("llama3_json", '<|python_tag|>{"name": "look", "parameters": {}}', {}),
    ("granite", '<tool_call> [{"name": "look", "arguments": {}}]', {}),
    ("pythonic", "[look(at='a\\n\\u00e9\\x41', far=-1.5e3, all=[None, true,], no=null,)]",
     {"at": "a\né\x41", "far": -1500.0, "all": [None, True], "no": None}),
    ("llama4_pythonic", "[look()]", {}),
    ("gemma4", ge("call:look{at:None,all:[None]}"), {"at": None, "all": [None]}),
    ("gemma4", ge(f"call:look{{at:{Q}<tool>{{,}}{Q},deep:{{{Q}a b{Q}:[1.5,null],c:{{}}}}}}"),
     {"at": "<tool>{,}", "deep": {"a b": [1.5, None], "c": {}}}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "completion", "arguments"), UNUSUAL)
def test_unusual_but_valid_calls_are_read(name: str, completion: str, arguments: dict[str, object]) -> None:
    kinds = {"at": ["string", "null"], "far": "number", "all": "array", "no": ["boolean", "null"]}
    tools = {"look": {"type": "object", "properties": {key: {"type": kind} for key, kind in kinds.items()}}}
    [call] = parse(CALL_FAMILIES[name], ids_of(CALL_FAMILIES[name], completion), tools=tools).calls
    assert (call.status, call.name, call.arguments) == (OK, "look", arguments)


@pytest.mark.parametrize(
    ("tail", "completion"),
    [
        ("<|start|>user<|message|>a<|end|><|start|>assistant", h(TO)),
        ("<|start|>assistant<|channel|>commentary to=functions.look", " <|constrain|>json<|message|>{}<|call|>"),
        ("<|start|>assistant<|channel|>commentary to=functions.look json<|message|>", "{}<|call|>"),
    ],
)
def test_harmony_continues_the_message_of_the_prompt(tail: str, completion: str) -> None:
    family = CALL_FAMILIES["gpt_oss"]
    ids = ids_of(family, completion)
    [call] = parse(family, ids, tail=ids_of(family, tail)).calls
    assert (call.status, call.name, call.arguments) == (OK, "look", {})
    assert (call.raw, call.start, call.stop) == (completion, 0, len(ids))
