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
    ("hermes", t('{"name": "look", "arguments": {"n": NaN}}'), "NaN is not a JSON number", None),
    ("hermes", t('{"name": "look", "arguments": {"n": -Infinity}}'), "-Infinity is not a JSON number", None),
    ("hermes", t('{"name": "look", "arguments": {"n": 1e999}}'), "1e999 is too large", None),
    ("hermes", t('{"name": "look", "arguments": {"n": 1, "n": 2}}'), "'n' appears twice", None),
    ("hermes", t('{"name": "look", "name": "drop", "arguments": {}}'), "'name' appears twice", None),
    ("hermes", t("null"), "must be a JSON object", None),
    ("hermes", t('{"name": "look", "arguments": {}, "id": 1, "b": 2}'), "unexpected keys: b, id", "look"),
    ("hermes", t('{"name": "look", "parameters": {}}'), 'no "arguments" object', "look"),
    ("hermes", t('{"name": "look", "arguments": {"a": %s}}' % ("[" * 200 + "]" * 200)), "nests more than 100", None),
    ("hermes", t('{"name": "look", "arguments": {"a": %s}}' % ("[" * 5000 + "]" * 5000)), "nests more than 100", None),
    ("hermes", t('{"name": "look", "arguments": {"a": "\\ud83d"}}'), "half of a surrogate pair", None),
    ("hermes", t('{"name": "\\udc00", "arguments": 1}'), "half of a surrogate pair", None),
    ("qwen3_coder", q(p("x") + p("y")), "'at' appears twice", "look"),
    ("qwen3_coder", q(p("x") + "y"), "stray text: '\\ny'", "look"),
    ("qwen3_coder", q("<parameter=at>\nx</parameter>\n"), "on lines of its own", "look"),
    ("qwen3_coder", q("<parameter=at>x\n</parameter>\n"), "on lines of its own", "look"),
    ("qwen3_coder", q("<parameter=>\nx\n</parameter>\n"), "no valid", "look"),
    ("qwen3_coder", q("text"), "stray text", "look"),
    ("qwen3_coder", q(p("NaN", "big")), "NaN is not a JSON number", "look"),
    ("qwen3_coder", "<tool_call></tool_call>", "lacks <function=", None),
    ("qwen3_coder", '<tool_call>{"name": "look", "arguments": {}}</tool_call>', "lacks <function=", None),
    ("qwen3_coder", "<tool_call>\n<function=look>\n</function>\nx</tool_call>", "stray text: '\\nx'", "look"),
    ("qwen3_coder", "<tool_call>\nx<function=look>\n</function></tool_call>", "stray text: '\\nx'", None),
    ("glm45", "<tool_call>look<arg_key>at</arg_key></tool_call>", "lacks <arg_value>", "look"),
    ("glm45", "<tool_call>look<arg_value>x</arg_value></tool_call>", "<arg_value> where <arg_key>", None),
    (
        "glm47",
        "<tool_call>look" + "<arg_key>at</arg_key><arg_value>x</arg_value>" * 2 + "</tool_call>",
        "twice",
        "look",
    ),
    ("minimax_m2", m('<parameter name="at">x</parameter>' * 2), "appears twice", "look"),
    ("minimax_m2", "<minimax:tool_call>\n</minimax:tool_call>", "no calls", None),
    ("deepseek_v4", d('<｜DSML｜parameter name="at" string="true">x</｜DSML｜parameter>' * 2), "twice", "look"),
    ("deepseek_v4", d("").replace('"look"', '""'), "double quotes", None),
    ("deepseek_v31", v31(""), "no calls", None),
    ("deepseek_v3", v3("function<｜tool▁sep｜>look\n```json\n", ""), "must end in", "look"),
    ("deepseek_v3", v3("function<｜tool▁sep｜>look\n"), "lacks '\\n```json\\n'", None),
    ("deepseek_v3", v3("tool<｜tool▁sep｜>look\n```json\n"), "type must be 'function', not 'tool'", None),
    ("kimi_k2", k("look:0"), "functions.NAME:NUMBER, not 'look:0'", "look"),
    ("kimi_k2", k("functions.look:0", '"{}"'), "must be a JSON object, not str", "look"),
    ("gpt_oss", h(TO, "{}", "<|return|>"), "ends in <|return|>", "look"),
    ("gpt_oss", h("final to=functions.look json"), "not in final", "look"),
    ("gpt_oss", h("commentary to=look json"), "must be functions.look, not look", "look"),
    ("gpt_oss", h("commentary to=functions.look <|constrain|>xml"), "must be json, not xml", "look"),
    ("mistral", "[TOOL_CALLS][ARGS]{}", "no valid", None),
    ("mistral", '[TOOL_CALLS] [{"name": "look", "arguments": "{}"}]', 'no "arguments" object', "look"),
    ("mistral", "[TOOL_CALLS] [", "not valid JSON", None),
    ("granite", '<|tool_call|>{"name": "look", "arguments": {}}', "not dict", None),
    ("granite", '<|tool_call|>[{"name": "look", "arguments": {"at": NaN}}]', "NaN is not a JSON number", None),
    ("phi4_mini", 'functools[{"name": "look", "parameters": {}}]', 'no "arguments" object', "look"),
    ("pythonic", "[look(at=" + "9" * 5000 + ")]", "more than 4000 digits", None),
    ("gemma4", ge("call:look{at:01}"), "not valid JSON", "look"),
]


@pytest.mark.parametrize(("name", "completion", "reason", "called"), MALFORMED_CALLS)
def test_malformed_calls_are_not_repaired(name: str, completion: str, reason: str, called: str | None) -> None:
    turn = parse(CALL_FAMILIES[name], ids_of(CALL_FAMILIES[name], completion), TOOLS)
    [call] = turn.calls
    assert (call.status, call.name, call.arguments) == (MALFORMED, called, None)
    assert reason in call.reason
    assert call.reason.endswith(".")
    assert call.raw.strip() in completion


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
