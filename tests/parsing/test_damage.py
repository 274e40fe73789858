"""Broken calls are malformed, with a reason, and never become another call (law 9)."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from parsing.families import BRACKETS, CALL_FAMILIES, GUARD, NAMES, Call, Family, dumps, ids_of, parse
from tito_core.parsing import CallStatus, ParsedTurn, get_tool_parser

OK, MALFORMED, TRUNCATED = CallStatus.OK, CallStatus.MALFORMED, CallStatus.TRUNCATED
CALLS: list[Call] = [("look", {"at": "x", "far": 5, "all": [True]}), ("count", {"of": "b"})]
TOOLS: list[Call] = [("look", {"at": "x", "far": 5, "all": [True], "deep": {}, "no": None, "big": 0.5})]
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


def q(body: str) -> str:
    return f"<tool_call>\n<function=look>\n{body}</function>\n</tool_call>"


def p(value: str, key: str = "at") -> str:
    return f"<parameter={key}>\n{value}\n</parameter>\n"


def m(body: str) -> str:
    return f'<minimax:tool_call>\n<invoke name="look">\n{body}</invoke>\n</minimax:tool_call>'


def d(body: str) -> str:
    return f'<｜DSML｜tool_calls>\n<｜DSML｜invoke name="look">\n{body}</｜DSML｜invoke>\n</｜DSML｜tool_calls>'


def v31(body: str) -> str:
    return f"<｜tool▁calls▁begin｜>{body}<｜tool▁calls▁end｜>"


def v31_call(arguments: str, name: str = "look") -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


def v3(head: str, tail: str = "\n```") -> str:
    return v31(f"<｜tool▁call▁begin｜>{head}{{}}{tail}<｜tool▁call▁end｜>")


def k(head: str, arguments: str = "{}") -> str:
    call = f"<|tool_call_begin|>{head}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
    return f"<|tool_calls_section_begin|>{call}<|tool_calls_section_end|>"


def h(head: str, body: str = "{}", end: str = "<|call|>") -> str:
    return f"<|channel|>{head}<|message|>{body}{end}"


def ge(body: str) -> str:
    return f"<|tool_call>{body}<tool_call|>"


TO = "commentary to=functions.look <|constrain|>json"
Q = '<|"|>'

MALFORMED_CALLS = [
    (
        "qwen3_coder",
        q("<parameter=at>\nx\n<parameter=far>\n5\n</parameter>\n"),
        "<parameter= where </parameter>",
        "look",
    ),
    ("qwen3_coder", q("<parameter=at>\nx\n"), "</function> where </parameter>", "look"),
    ("qwen3_coder", q(p("x\n</parameter>y")), "</parameter> where </function> belongs", "look"),
    ("qwen3_coder", q(p("x") + p("y")), "'at' appears twice", "look"),
    ("qwen3_coder", q(p("x") + "y"), "stray text: '\\ny'", "look"),
    ("qwen3_coder", q("<parameter=at>\nx</parameter>\n"), "on lines of its own", "look"),
    ("qwen3_coder", q("<parameter=at>x\n</parameter>\n"), "on lines of its own", "look"),
    ("qwen3_coder", q("<parameter=>\nx\n</parameter>\n"), "no valid", "look"),
    ("qwen3_coder", q("<parameter=at\nx\n</parameter>\n"), "lacks '>'", "look"),
    ("qwen3_coder", q("text"), "stray text", "look"),
    ("qwen3_coder", q(p("five", "far")), "not valid JSON", "look"),
    ("qwen3_coder", q(p("5.5", "far")), "far: 5.5 is not of type 'integer'", "look"),
    ("qwen3_coder", q(p("[1,]", "all")), "not valid JSON", "look"),
    ("qwen3_coder", q(p("{}", "all")), "all: {} is not of type 'array'", "look"),
    ("qwen3_coder", q(p("NaN", "big")), "NaN is not a JSON number", "look"),
    ("qwen3_coder", "<tool_call>\n<function=look></tool_call>", "lacks </function>", "look"),
    ("qwen3_coder", "<tool_call>\n<function=look</function></tool_call>", "lacks '>'", None),
    ("qwen3_coder", "<tool_call></tool_call>", "lacks <function=", None),
    ("qwen3_coder", '<tool_call>{"name": "look", "arguments": {}}</tool_call>', "lacks <function=", None),
    ("qwen3_coder", "<tool_call>\n<function=look>\n</function>\nx</tool_call>", "stray text: '\\nx'", "look"),
    ("qwen3_coder", "<tool_call>\nx<function=look>\n</function></tool_call>", "stray text: '\\nx'", None),
    ("qwen3_coder", "<tool_call>\n<function=look>\n</function>", "no closing </tool_call>", "look"),
    ("glm45", "<tool_call></tool_call>", "no valid", None),
    ("glm45", '<tool_call>{"name": "look"}</tool_call>', "no valid", None),
    ("glm45", "<tool_call>look<arg_key>at</arg_key></tool_call>", "lacks <arg_value>", "look"),
    ("glm45", "<tool_call>look<arg_value>x</arg_value></tool_call>", "<arg_value> where <arg_key>", None),
    ("glm45", "<tool_call>look<arg_key>at</arg_key>y<arg_value>x</arg_value></tool_call>", "stray text: 'y'", "look"),
    ("glm45", "<tool_call>look<arg_key>at</arg_key><arg_value>x</tool_call>", "lacks </arg_value>", "look"),
    ("glm45", "<tool_call>look<arg_key></arg_key><arg_value>x</arg_value></tool_call>", "argument name", "look"),
    (
        "glm47",
        "<tool_call>look" + "<arg_key>at</arg_key><arg_value>x</arg_value>" * 2 + "</tool_call>",
        "twice",
        "look",
    ),
    ("glm47", "<tool_call>look<arg_key>far</arg_key><arg_value>x</arg_value></tool_call>", "not valid JSON", "look"),
    ("glm47", "<tool_call>look<arg_key>at</arg_key><arg_value>x</arg_value>y</tool_call>", "stray text: 'y'", "look"),
    ("minimax_m2", m('<parameter name="at">x'), "lacks </parameter>", "look"),
    ("minimax_m2", m("<parameter name=at>x</parameter>"), "must be in double quotes", "look"),
    ("minimax_m2", m("<parameter name='at'>x</parameter>"), "must be in double quotes", "look"),
    ("minimax_m2", m('<parameter name="at">x</parameter>' * 2), "appears twice", "look"),
    ("minimax_m2", m('<parameter name="far">x</parameter>'), "not valid JSON", "look"),
    ("minimax_m2", m("text"), "stray text: '\\ntext'", "look"),
    ("minimax_m2", "<minimax:tool_call>\n</minimax:tool_call>", "no calls", None),
    ("minimax_m2", "<minimax:tool_call>\ntext\n</minimax:tool_call>", "stray text", None),
    ("minimax_m2", m("").replace("</minimax:tool_call>", ""), "no closing </minimax:tool_call>", "look"),
    ("minimax_m2", m("").replace("</invoke>", ""), "no closing </invoke>", None),
    ("deepseek_v4", d('<｜DSML｜parameter name="at">x</｜DSML｜parameter>'), "must have name", "look"),
    ("deepseek_v4", d('<｜DSML｜parameter name="at" string="yes">x</｜DSML｜parameter>'), "must have name", "look"),
    ("deepseek_v4", d('<｜DSML｜parameter name="far" string="false">x</｜DSML｜parameter>'), "not valid JSON", "look"),
    ("deepseek_v4", d('<｜DSML｜parameter name="at" string="true">x'), "lacks", "look"),
    ("deepseek_v4", d('<｜DSML｜parameter name="at" string="true">x</｜DSML｜parameter>' * 2), "twice", "look"),
    ("deepseek_v4", d("").replace('"look"', '""'), "double quotes", None),
    ("deepseek_v4", d("").replace(' name="look"', ""), "must begin with", None),
    ("deepseek_v4", d("").replace("</｜DSML｜tool_calls>", ""), "no closing </｜DSML｜tool_calls>", "look"),
    ("deepseek_v31", v31(v31_call("[1]")), "must be a JSON object, not list", "look"),
    ("deepseek_v31", v31(v31_call('{"at": 1')), "not valid JSON", "look"),
    ("deepseek_v31", v31(v31_call("{}", "")), "no valid", None),
    ("deepseek_v31", v31(v31_call("{}", "a b")), "no valid", None),
    ("deepseek_v31", v31(""), "no calls", None),
    ("deepseek_v31", v31("look{}"), "stray text among the calls: 'look{}'", None),
    ("deepseek_v31", v31("<｜tool▁call▁begin｜>look{}<｜tool▁call▁end｜>"), "lacks <｜tool▁sep｜>", None),
    ("deepseek_v31", "<｜tool▁calls▁begin｜>" + v31_call("{}"), "no closing <｜tool▁calls▁end｜>", "look"),
    ("deepseek_v31", v31("<｜tool▁call▁begin｜>look<｜tool▁sep｜>{}"), "no closing <｜tool▁call▁end｜>", None),
    ("deepseek_v3", v3("function<｜tool▁sep｜>look\n```json\n", ""), "must end in", "look"),
    ("deepseek_v3", v3("function<｜tool▁sep｜>look\n"), "lacks '\\n```json\\n'", None),
    ("deepseek_v3", v3("tool<｜tool▁sep｜>look\n```json\n"), "type must be 'function', not 'tool'", None),
    ("kimi_k2", k("look:0"), "functions.NAME:NUMBER, not 'look:0'", "look"),
    ("kimi_k2", k("functions.look"), "functions.NAME:NUMBER", None),
    ("kimi_k2", k("0"), "functions.NAME:NUMBER", None),
    ("kimi_k2", k("functions.:0"), "functions.NAME:NUMBER", None),
    ("kimi_k2", k("functions.look:0", ""), "not valid JSON", "look"),
    ("kimi_k2", k("functions.look:0", '"{}"'), "must be a JSON object, not str", "look"),
    ("gpt_oss", h(TO, "[]"), "must be a JSON object, not list", "look"),
    ("gpt_oss", h(TO, '{"at": }'), "not valid JSON", "look"),
    ("gpt_oss", h(TO, "{}", "<|end|>"), "ends in <|end|> where <|call|>", "look"),
    ("gpt_oss", h(TO, "{}", "<|return|>"), "ends in <|return|>", "look"),
    ("gpt_oss", h(TO, "{}", ""), "no closing <|call|>", "look"),
    ("gpt_oss", h("final to=functions.look json"), "not in final", "look"),
    ("gpt_oss", h("commentary to=look json"), "must be functions.look, not look", "look"),
    ("gpt_oss", h("commentary to=python code"), "'python' is not a function", None),
    ("gpt_oss", h("commentary to=functions. json"), "is not a function", None),
    ("gpt_oss", h("commentary"), "no recipient", None),
    ("gpt_oss", h("commentary to=functions.look <|constrain|>xml"), "must be json, not xml", "look"),
    ("gpt_oss", h("comment"), "header is not valid", None),
    ("gpt_oss", h("comment to=functions.look json"), "header is not valid", None),
    ("gpt_oss", " to=functions.look" + h("commentary to=functions.look json"), "header is not valid", None),
    ("gpt_oss", " to=functions.look<|call|>", "no <|message|>", None),
    ("llama3_json", '<|python_tag|>look.call(at="x")', "not valid JSON", None),
    ("llama3_json", '{"name": "look", "parameters": {}', "not valid JSON", None),
    ("llama3_json", '{"name": "look", "argument": {}}', 'no "parameters" object', "look"),
    ("llama3_json", '{"name": "look", "parameters": []}', 'no "parameters" object', "look"),
    ("llama3_json", '{"name": "look", "parameters": {}} or so', "Stray text follows the call: 'or so'", None),
    ("mistral", "[TOOL_CALLS]look[ARGS]{", "not valid JSON", "look"),
    ("mistral", "[TOOL_CALLS]look{}", "lacks [ARGS] or [CALL_ID]", "look"),
    ("mistral", "[TOOL_CALLS]look[ARGS]{} done", "not valid JSON: Extra data", "look"),
    ("mistral", "[TOOL_CALLS][ARGS]{}", "no valid", None),
    ("mistral", "[TOOL_CALLS]look[CALL_ID][ARGS]{}", "id must be letters and digits", "look"),
    ("mistral", '[TOOL_CALLS] [{"name": "look", "arguments": "{}"}]', 'no "arguments" object', "look"),
    ("mistral", '[TOOL_CALLS] [{"name": "look", "arguments": {}, "id": 1}]', "must be a string, not int", "look"),
    ("mistral", "[TOOL_CALLS] [", "not valid JSON", None),
    (
        "granite",
        '<|tool_call|>{"name": "look", "arguments": {}}',
        "not dict",
        None,
    ),
    ("granite", "<|tool_call|>[]", "not an empty array", None),
    ("granite", "<|tool_call|>look", "not valid JSON", None),
    ("granite", '<|tool_call|>[{"name": "look"}]', 'no "arguments" object', "look"),
    ("granite", '<|tool_call|>[{"name": "look", "arguments": {"at": NaN}}]', "NaN is not a JSON number", None),
    ("phi4_mini", 'functools[{"name": "look", "arguments": {}}', "not valid JSON", None),
    ("phi4_mini", 'functools[{"name": "look", "parameters": {}}]', 'no "arguments" object', "look"),
    ("phi4_mini", 'functools[{"name": "look", "arguments": {}}] ok', "Stray text follows the calls: 'ok'", None),
    ("xlam", '[{"name": "look", "arguments": {}}', "not valid JSON", None),
    ("xlam", '[{"name": "look", "arguments": {}, "id": 3}]', "unexpected keys: id", "look"),
    ("pythonic", "[look(1)]", "where '=' belongs", None),
    ("pythonic", "[look(at=x)]", "'x' is not a literal", None),
    ("pythonic", "[look(at='x', at='y')]", "'at' appears twice", None),
    ("pythonic", "[look(at='x'", "where ')' belongs", None),
    ("pythonic", "[look(at='x)]", "a string in quotes", None),
    ("pythonic", "[look(at=f'x')]", "'f' is not a literal", None),
    ("pythonic", "[look(at=1+1)]", "where ')' belongs", None),
    ("pythonic", "[look(at=(1, 2))]", "a literal belongs", None),
    ("pythonic", "[look(at={1: 2})]", "a string in quotes", None),
    ("pythonic", "[look(at='\\q')]", "unknown escape", None),
    ("pythonic", "[look(at='\\ud800')]", "half of a surrogate pair", None),
    ("pythonic", "[look(at=1e999)]", "too large a number", None),
    ("pythonic", "[look(at=" + "9" * 5000 + ")]", "more than 4000 digits", None),
    ("pythonic", "[look(at=" + "[" * 5000 + ")]", "nests more than 100", None),
    ("pythonic", "[look(at=" + "{'a':" * 5000 + ")]", "nests more than 100", None),
    ("gemma4", ge("call:look{at:" + "{a:" * 5000), "nests more than 100", "look"),
    ("pythonic", "[look(at=0x10)]", "a literal belongs", None),
    ("pythonic", "[look()] done", "Stray text follows the calls: 'done'", None),
    ("pythonic", "[look() count()]", "where ']' belongs", None),
    ("llama4_pythonic", "[look()]<|python_end|>", "Stray text", None),
    ("llama4_pythonic", "<|python_start|>[look()]", "no closing <|python_end|>", "look"),
    ("llama4_pythonic", "<|python_start|>look()<|python_end|>", "where '[' belongs", None),
    ("llama4_pythonic", "<|python_start|>[look()] a<|python_end|>", "Stray text", None),
    ("gemma4", ge("look{}"), "lacks 'call:'", None),
    ("gemma4", ge("call:look{at:x}"), "a value belongs", "look"),
    ("gemma4", ge(f"call:look{{at:{Q}x}}"), 'lacks <|"|>', "look"),
    ("gemma4", ge("call:look{at:1,at:2}"), "'at' appears twice", "look"),
    ("gemma4", ge("call:look{at:1"), "where '}' belongs", "look"),
    ("gemma4", ge("call:look{at}"), "where ':' belongs", "look"),
    ("gemma4", ge("call:look{at:Nonesuch}"), "'Nonesuch' where a value belongs", "look"),
    ("gemma4", ge("call:look{at:01}"), "not valid JSON", "look"),
    ("gemma4", ge("call:look{at:1}}"), "stray text: '}'", "look"),
    ("gemma4", ge("call:look{at:[1,]}"), "a value belongs", "look"),
    ("gemma4", ge("call:look"), "lacks '{'", None),
    ("gemma4", ge("call:{}"), "no valid", None),
    ("gemma4", ge("call:look{at:" + "[" * 5000), "nests more than 100", "look"),
    ("gemma4", "<|tool_call>call:look{}", "no closing <tool_call|>", "look"),
]


@pytest.mark.parametrize(("name", "completion", "reason", "called"), MALFORMED_CALLS)
def test_malformed_calls_are_not_repaired(name: str, completion: str, reason: str, called: str | None) -> None:
    turn = parse(CALL_FAMILIES[name], ids_of(CALL_FAMILIES[name], completion), TOOLS)
    [call] = turn.calls
    assert (call.status, call.name, call.arguments) == (MALFORMED, called, None)
    assert reason in call.reason
    assert call.reason.endswith(".")
    assert call.raw.strip() in completion


UNUSUAL = [
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


TURNS = [
    (
        "hermes",
        'So {"name": "look", "arguments": {}}</tool_call>',
        "",
        'So {"name": "look", "arguments": {}}',
        [MALFORMED],
    ),
    ("hermes", "a</tool_call>b</tool_call>c<tool_call>", "", "ac", [MALFORMED, MALFORMED]),
    ("hermes", "a</tool_call><think>b</tool_call></think>c", "b</tool_call>", "ac", [MALFORMED]),
    ("glm47", "<tool_call>look</tool_call>at</arg_key></tool_call>", "", "at", [MALFORMED, MALFORMED]),
    ("glm47", "look<arg_key>at</arg_key><arg_value>x</arg_value></tool_call>", "", "look", [MALFORMED]),
    ("kimi_k2", k("functions.look:0").removeprefix("<|tool_calls_section_begin|>"), "", "", [MALFORMED]),
    ("deepseek_v4", d("").removeprefix("<｜DSML｜tool_calls>"), "", "", [MALFORMED]),
    (
        "minimax_m2",
        m("").removeprefix("<minimax:tool_call>\n").removesuffix("</minimax:tool_call>"),
        "",
        '<invoke name="look">\n</invoke>',
        [],
    ),
    ("llama3_json", '{"answer": 3}', "", '{"answer": 3}', []),
    ("llama3_json", 'So {"name": "look", "parameters": {}}', "", 'So {"name": "look", "parameters": {}}', []),
    ("xlam", "[]", "", "[]", []),
    ("llama4_pythonic", "<|python_start|>[look()]<|python_end|>[look()]", "", "[look()]", [OK]),
    ("xlam", '\n<think>Hm.</think>\n[{"name": "look", "arguments": {}}]', "Hm.", "", [OK]),
    (
        "xlam",
        'So<think>Hm.</think>[{"name": "look", "arguments": {}}]',
        "Hm.",
        'So[{"name": "look", "arguments": {}}]',
        [],
    ),
    (
        "llama3_json",
        '<|python_tag|>{"name": "look", "parameters": {}}; {"name": "look", "parameters": {}}',
        "",
        "",
        [OK, OK],
    ),
    ("xlam", "[1, 2]", "", "[1, 2]", []),
    ("pythonic", "[1, 2]", "", "[1, 2]", []),
    ("pythonic", "See [look()]", "", "See [look()]", []),
    ("phi4_mini", "functools is a module", "", "functools is a module", []),
    ("granite", '<|tool_call|>[{"name": "look", "arguments": {}}] Done.', "", "Done.", [OK]),
    ("kimi_k2", k("functions.look:0") + " Done.", "", "Done.", [OK]),
    (
        "gpt_oss",
        h("analysis", "Hm.", "<|end|><|start|>assistant") + h("final", "Yes.", "<|return|>"),
        "Hm.",
        "Yes.",
        [],
    ),
    ("gpt_oss", h("analysis", "Hm. " + "to=functions.look {}", "<|end|>"), "Hm. to=functions.look {}", "", []),
    ("gpt_oss", h("commentary", "I look.", "<|end|><|start|>assistant") + h(TO), "", "I look.", [OK]),
    ("gpt_oss", h("analysis", "a", "<|end|><|start|>assistant") + h("analysis", "b", "<|end|>"), "a\nb", "", []),
    ("gpt_oss", "Just text.", "", "Just text.", []),
    ("gpt_oss", h("comment", "Hm.", "<|end|>"), "", "<|channel|>comment<|message|>Hm.", []),
    ("gpt_oss", h("comment to=functions.look", "Hm.", "<|end|>"), "", "", [MALFORMED]),
    ("gpt_oss", "", "", "", []),
    ("mistral", "[THINK]Hm.[/THINK]Yes.", "Hm.", "Yes.", []),
    ("gemma4", "<|channel>thought\nHm.<channel|>Yes.", "Hm.", "Yes.", []),
    ("gemma4", "<|channel>other\nHm.<channel|>Yes.", "other\nHm.", "Yes.", []),
    ("minimax_m2", m("") + "\nThen\n" + m(""), "", "Then", [OK, OK]),
    ("minimax_m2", m("").replace("</minimax:tool_call>", "") + m(""), "", "", [MALFORMED, OK]),
    ("minimax_m2", m("").replace("<invoke", "junk <invoke"), "", "", [MALFORMED, OK]),
    ("deepseek_v32", d("").replace("tool_calls>", "function_calls>", 1), "", "", [MALFORMED, MALFORMED]),
    ("xlam", '[{"name": "look", "arguments": 1}, {"name": "look", "arguments": {}}]', "", "", [MALFORMED, OK]),
]


@pytest.mark.parametrize(("name", "completion", "reasoning", "text", "statuses"), TURNS)
def test_turns(name: str, completion: str, reasoning: str, text: str, statuses: list[CallStatus]) -> None:
    turn = parse(CALL_FAMILIES[name], ids_of(CALL_FAMILIES[name], completion))
    assert (turn.reasoning, turn.text) == (reasoning, text)
    assert [call.status for call in turn.calls] == statuses


def test_harmony_reasoning_that_the_token_limit_cut_is_open() -> None:
    family = CALL_FAMILIES["gpt_oss"]
    for completion, closed in (
        (h("analysis", "Hm", ""), False),
        ("<|channel|>analysis", False),
        (h("final", "Hm", ""), True),
    ):
        turn = parse(family, ids_of(family, completion), truncated=True)
        assert (turn.reasoning_closed, turn.calls) == (closed, ())


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


def test_mistral_call_ids_are_kept() -> None:
    family = CALL_FAMILIES["mistral"]
    for completion in (
        "[TOOL_CALLS]look[CALL_ID]a1B2[ARGS]{}",
        '[TOOL_CALLS][{"name": "look", "arguments": {}, "id": "a1B2"}]',
    ):
        assert [(c.status, c.id) for c in parse(family, ids_of(family, completion)).calls] == [(OK, "a1B2")]
    assert family.think == BRACKETS
