"""Calls as real models write them: documented forms run, loose ones are lenient, and everything has a status."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parsing.families import CALL_FAMILIES, NAMES, Call, ids_of, parse
from support.byte_level import byte_level
from tito_core.parsing import CallStatus, UnknownParserError, get_tool_parser
from tito_core.parsing import registry as parser_registry
from tito_core.parsing.turn import SuspectFinder, TurnParser

OK, LENIENT, MALFORMED = CallStatus.OK, CallStatus.LENIENT, CallStatus.MALFORMED
TOOLS: dict[str, Any] = {
    "look": {
        "type": "object",
        "properties": {
            "at": {"type": "string"},
            "far": {"type": "integer"},
            "all": {"type": "array", "items": {"enum": ["one", "two"]}},
            "unit": {"type": "string", "enum": ["metres", "feet or so"]},
            "deep": {"type": "object", "properties": {"unit": {"enum": ["metres", 5]}}},
            "sure": {"type": "boolean"},
            "my key": {"type": "string"},
        },
    }
}
Q = '<|"|>'


def qwen(body: str, opened: str = "<tool_call>\n", closed: str = "\n</tool_call>") -> str:
    return f"{opened}<function=look>\n{body}</function>{closed}"


def harmony(header: str, body: str = '{"at": "x"}') -> str:
    return f"<|channel|>{header}<|message|>{body}<|call|>"


def gemma(body: str) -> str:
    return f"<|tool_call>call:look{{{body}}}<tool_call|>"


def kimi(head: str) -> str:
    call = f'<|tool_call_begin|>{head}<|tool_call_argument_begin|>{{"at": "x"}}<|tool_call_end|>'
    return f"<|tool_calls_section_begin|>{call}<|tool_calls_section_end|>"


CALL = '{"name": "look", "arguments": {"at": "x"}}'
PARAMETERS = CALL.replace("arguments", "parameters")
DEEPSEEK = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n"
    '```json\n{"at": "x"}\n```<｜tool▁call▁end｜>'
)
INVOKE = '<invoke name="look">\n<parameter name="at">x</parameter>\n</invoke>\n'
DSML = (
    '<｜DSML｜invoke name="look">\n'
    '<｜DSML｜parameter name="at" string="true">x</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
)
STRING = ' string="true"'
K3 = CALL_FAMILIES["kimi_k3"].render([("look", {"at": "x"})])
X = {"at": "x"}
ACCEPTED = [
    ("gpt_oss", harmony("analysis to=functions.look <|constrain|>json"), X),
    ("gpt_oss", harmony("analysis to=functions.look code"), X),
    ("gpt_oss", harmony("commentary to=functions.look <|constrain|>code"), X),
    ("gpt_oss", " to=functions.look" + harmony("analysis code"), X),
    ("llama3_json", '{"type": "function", "name": "look", "parameters": {"at": "x"}}', X),
    ("llama3_json", '<|python_tag|>{"type": "function", "name": "look", "parameters": {"at": "x"}}', X),
    ("llama3_json", '{"name": "look", "arguments": {"at": "x"}}', X),
    ("llama3_json", '<|python_tag|>{"name": "look", "arguments": {"at": "x"}}', X),
    ("llama3_json", '{"name": "look", "type": "function", "arguments": {"at": "x"}}', X),
    ("qwen3_coder", qwen("<parameter=at>\n</parameter>\n"), {"at": ""}),
    ("gemma4", gemma(f"my key:{Q}x{Q}"), {"my key": "x"}),
    ("gemma4", gemma(f"at: {Q}x{Q}, far: 5, all: [ {Q}one{Q}, {Q}two{Q} ]"), {**X, "far": 5, "all": ["one", "two"]}),
    ("gemma4", gemma("sure:True,far:5"), {"sure": True, "far": 5}),
    ("gemma4", gemma("sure:False"), {"sure": False}),
    ("gemma4", gemma("unit:metres,all:[one,two]"), {"unit": "metres", "all": ["one", "two"]}),
    ("gemma4", gemma("unit: feet or so , deep: {unit: metres}"), {"unit": "feet or so", "deep": {"unit": "metres"}}),
    ("lfm2", f"<|tool_call_start|>[{CALL}]<|tool_call_end|>", X),
    ("lfm2", "<|tool_call_start|>[look(at='x\ny')]<|tool_call_end|>", {"at": "x\ny"}),
    ("lfm2", f"<|tool_call_start|>\n[\n{CALL}\n]\n<|tool_call_end|>", X),
]


@pytest.mark.parametrize("lenient", [False, True])
@pytest.mark.parametrize(("name", "completion", "arguments"), ACCEPTED)
def test_documented_calls_run_in_both_modes(
    name: str, completion: str, arguments: dict[str, Any], lenient: bool
) -> None:
    turn = parse(CALL_FAMILIES[name], ids_of(CALL_FAMILIES[name], completion), tools=TOOLS, lenient=lenient)
    assert [(c.status, c.name, c.arguments, c.reason) for c in turn.calls] == [(OK, "look", arguments, "")]
    assert (turn.text, turn.suspects) == ("", ())


LOOSE = [
    ("qwen3_coder", qwen("<parameter=at>\nx\n</parameter>\n", opened=""), X),
    ("qwen3_coder", qwen("<parameter=at>\nx\n</parameter>\n", opened="", closed=""), X),
    ("qwen3_coder", "So.\n" + qwen("<parameter=at>\nx\n</parameter>\n", opened=""), X),
    ("qwen3_coder", qwen("<parameter=at>\nx</parameter>\n"), X),
    ("qwen3_coder", qwen("<parameter=at>x\n</parameter>\n"), X),
    ("kimi_k2", kimi("look:0"), X),
    ("hermes", f'<tool_call>\n{CALL[:-1]}, "id": "a1"}}\n</tool_call>', X),
    ("hermes", f'<tool_call>\n{{"type": "function", {CALL[1:]}\n</tool_call>', X),
    ("hermes", f"<tool_call>\n{CALL}\n<|im_end|>", X),
    ("xlam", f"```json\n[{CALL}]\n```", X),
    ("xlam", f"```\n[{CALL}]\n```", X),
    ("xlam", f"<tool_call>[{CALL}]</tool_call>", X),
    ("xlam", f"[TOOL_CALLS][{CALL}]", X),
    ("gpt_oss", harmony("commentary to=look <|constrain|>json"), X),
    ("gemma4", gemma("at:x"), X),
    ("gemma4", gemma(f"at:{Q}x{Q}").removesuffix("<tool_call|>"), X),
    ("deepseek_v32", f"<｜DSML｜function_calls>\n{DSML.replace(STRING, '')}</｜DSML｜function_calls>", X),
    ("kimi_k3", K3.replace(" index", "  index"), X),
    ("mistral", '[TOOL_CALLS]look{"at": "x"}', X),
    ("hermes", f"<tool_call>\n{PARAMETERS}\n</tool_call>", X),
    ("phi4_mini", f"functools[{PARAMETERS}]", X),
    ("phi4_mini", f"So.\nfunctools[{CALL}]", X),
    ("phi4_mini", f"```\nlook\n```\n functools[{CALL}]", X),
    ("gpt_oss", harmony("commentary to=functions.look json").removesuffix("<|call|>"), X),
    ("gpt_oss", harmony("commentary to=functions.look json").removesuffix("<|call|>") + "<|end|>", X),
    ("kimi_k2", kimi("functions.look:0").removesuffix("<|tool_calls_section_end|>"), X),
    ("deepseek_v3", DEEPSEEK, X),
    ("minimax_m2", f"<minimax:tool_call>\n{INVOKE}", X),
    ("deepseek_v32", f"<｜DSML｜function_calls>\n{DSML}", X),
    ("deepseek_v32", DSML, X),
    ("deepseek_v32", f"{DSML}</｜DSML｜function_calls>", X),
    ("llama4_pythonic", '<|python_start|>[look(at="x")]', X),
    ("llama4_json", '<|python_start|>{"name": "look", "parameters": {"at": "x"}}<|python_end|>', X),
    ("lfm2", '<|tool_call_start|>[look(at="x")]\n', X),
]
SEVERAL = [
    (
        "qwen3_coder",
        qwen("<parameter=at>\nx\n</parameter>\n</function>\n<function=look>\n<parameter=at>\nx\n</parameter>\n"),
    ),
    ("llama3_json", "<|python_tag|>" + CALL + "<|python_tag|>" + CALL),
    ("llama3_json", f"{CALL}\n{CALL}"),
]
"""Two calls each."""


@pytest.mark.parametrize(("name", "completion"), SEVERAL)
def test_several_loose_calls(name: str, completion: str) -> None:
    ids = ids_of(CALL_FAMILIES[name], completion)
    calls = parse(CALL_FAMILIES[name], ids, tools=TOOLS, lenient=True).calls
    assert [(call.status, call.name, call.arguments) for call in calls] == [(LENIENT, "look", X)] * 2
    strict = parse(CALL_FAMILIES[name], ids, tools=TOOLS).calls
    assert [(call.status, call.name, call.arguments, call.reason) for call in strict] == [
        (MALFORMED, "look", None, call.reason) for call in calls
    ]


@pytest.mark.parametrize(("name", "completion", "arguments"), LOOSE)
def test_loose_calls_are_lenient_or_malformed(name: str, completion: str, arguments: dict[str, Any]) -> None:
    ids = ids_of(CALL_FAMILIES[name], completion)
    [call] = parse(CALL_FAMILIES[name], ids, tools=TOOLS, lenient=True).calls
    assert (call.status, call.name, call.arguments) == (LENIENT, "look", arguments)
    assert call.status.runs
    [strict] = parse(CALL_FAMILIES[name], ids, tools=TOOLS).calls
    assert (strict.status, strict.arguments, strict.arguments_text) == (MALFORMED, None, None)
    assert strict.reason == call.reason
    assert call.reason.endswith(".")
    assert (strict.start, strict.stop) == (call.start, call.stop)


@pytest.mark.parametrize(("name", "completion", "arguments"), LOOSE)
def test_a_loose_call_does_not_change_a_sound_one_beside_it(
    name: str, completion: str, arguments: dict[str, Any]
) -> None:
    family = CALL_FAMILIES[name]
    sound = family.render([("look", {"at": "y"})])
    for whole in (completion + sound, sound + completion):
        ids = ids_of(family, whole)
        strict, lenient = (parse(family, ids, tools=TOOLS, lenient=mode).calls for mode in (False, True))
        assert [MALFORMED if call.status == LENIENT else call.status for call in lenient] == [c.status for c in strict]
        assert [c.arguments for c in strict if c.status == OK] == [c.arguments for c in lenient if c.status == OK]
        if family.text_before and LENIENT in [call.status for call in lenient]:  # else the calls are the whole message
            assert sorted(call.status for call in lenient) == [LENIENT, OK]


NEVER = [
    ("qwen3_coder", qwen("", opened="Write ", closed=" to look.")),
    ("qwen3_coder", qwen("<parameter=at>\nx</parameter>y\n")),
    ("qwen3_coder", "<tool_call>\n" + qwen("<parameter=at>\nx\n</parameter>\n")),
    ("glm47", "<tool_call><tool_call>look<arg_key>at</arg_key><arg_value>x</arg_value></tool_call>"),
    ("hermes", f"<tool_call><tool_call>{CALL}</tool_call>"),
    ("hermes", f"<tool_call>\n<tool_call>\n{CALL}\n</tool_call>\n</tool_call>"),
    ("kimi_k2", kimi("0")),
    ("kimi_k2", kimi("look")),
    ("hermes", f"<tool_call>\n{CALL[:-1]}\n<|im_end|>"),
    ("hermes", f'<tool_call>\n{CALL[:-1]}, "to": "a1"}}\n</tool_call>'),
    ("hermes", f'<tool_call>\n{CALL[:-1]}, "type": "thought"}}\n</tool_call>'),
    ("xlam", f"```json\n[{CALL}\n```"),
    ("xlam", f"```json\n[{CALL}]"),
    ("xlam", f"So: ```json\n[{CALL}]\n``` and more"),
    ("gpt_oss", harmony("commentary to=nobody json")),
    ("gpt_oss", harmony("analysis to=functions.look code", "look('x')")),
    ("gpt_oss", harmony("final to=functions.look json")),
    ("llama3_json", '{"name": "look", "parameters": {}, "arguments": {}}'),
    ("llama3_json", '{"type": "thought", "name": "look", "parameters": {}}'),
    ("llama3_json", '{"type": "function", "name": "look", "parameters": "x"}'),
    ("gemma4", gemma("unit:miles")),
    ("gemma4", gemma("far:metres")),
    ("gemma4", gemma("other:x")),
    ("gemma4", gemma(f"at:{Q}x{Q}").removesuffix("}<tool_call|>")),
    (
        "deepseek_v32",
        f"<｜DSML｜function_calls>\n{DSML.replace(STRING, '').replace('at', 'to')}</｜DSML｜function_calls>",
    ),
    ("deepseek_v32", f"<｜DSML｜function_calls>\n{DSML.replace(STRING, '>' + STRING)}</｜DSML｜function_calls>"),
    ("minimax_m2", f"<minimax:tool_call>\n{INVOKE}</minimax:tool_call>".replace('"at"', '"at')),
    ("minimax_m2", f"<minimax:tool_call>\n{INVOKE}</minimax:tool_call>".replace('"at"', "'at")),
    ("mistral", '[TOOL_CALLS]look{"at": "x"'),
    ("mistral", '[TOOL_CALLS]look{"at": "x"} and more'),
    ("mistral", '[TOOL_CALLS]look "at": "x"'),
    ("phi4_mini", f"functools[functools[{CALL}]"),
    ("phi4_mini", f"One writes functools[{CALL}]"),
    ("phi4_mini", f"So.\nfunctools[{CALL}] and more"),
    ("phi4_mini", f"So.\n```\nfunctools[{CALL}]\n```"),
    ("phi4_mini", f"So.\nfunctools[{CALL}"),
    ("phi4_mini", "So.\nfunctools[5]"),
    ("hermes", '<tool_call>\n{"name": "look", "arguments": 5, "parameters": {}}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "look", "parameters": 5}\n</tool_call>'),
    ("gemma4", gemma('at:"x"')),
    ("gemma4", gemma("list:['x']")),
    ("gemma4", gemma('deep:{"unit": 5}')),
    ("qwen3_coder", qwen("<parameter=at>\nx\n</parameter>\n</function>\n<function=look>\n<parameter=at>\nx\n")),
    ("qwen3_coder", qwen("<parameter=at>\nx\n</parameter>\n</function>\nand\n<function=look>\n")),
    ("llama3_json", f"{CALL} and more"),
    ("gpt_oss", harmony("commentary to=functions.look json", '{"at": "x"').removesuffix("<|call|>")),
    ("gpt_oss", harmony("commentary to=functions.look json").removesuffix("<|call|>") + "<|return|>x"),
    ("kimi_k2", kimi("functions.look:0").removesuffix("<|tool_call_end|><|tool_calls_section_end|>")),
    ("deepseek_v3", f"{DEEPSEEK}and more"),
    ("deepseek_v32", DSML.removesuffix("</｜DSML｜invoke>\n")),
    ("llama4_pythonic", '<|python_start|>[look(at="x")'),
    ("llama4_pythonic", '<|python_start|>[look(at="x")] and more'),
    ("lfm2", f"<|tool_call_start|>[{CALL}<|tool_call_end|>"),
    ("lfm2", f"<|tool_call_start|>[{CALL}] and more<|tool_call_end|>"),
]


@pytest.mark.parametrize(("name", "completion"), NEVER)
def test_calls_that_need_a_repair_or_a_guess_never_run_and_are_reported(name: str, completion: str) -> None:
    for lenient in (False, True):
        turn = parse(CALL_FAMILIES[name], ids_of(CALL_FAMILIES[name], completion), tools=TOOLS, lenient=lenient)
        assert not any(call.status.runs for call in turn.calls)
        assert turn.calls or turn.suspects


BARE = st.text("ab \"'`[]{}()<>:=,\u201d", min_size=1, max_size=8)
CLOSED_BARE = frozenset("\"'`[]{}<>\u201d")


@given(word=BARE, quote=st.sampled_from(["", '"', "'", "`"]), lenient=st.booleans())
def test_no_bare_word_of_gemma_holds_a_quote_or_a_bracket(word: str, quote: str, lenient: bool) -> None:
    word = quote + word + quote
    for body in (f"at:{word}", f"list:[{word}]", f"deep:{{{word}:5}}", f"{word}:5"):
        tools = {"look": {"properties": {"at": {"type": "string"}, "list": {"items": {"type": "string"}}}}}
        turn = parse(
            CALL_FAMILIES["gemma4"], ids_of(CALL_FAMILIES["gemma4"], gemma(body)), tools=tools, lenient=lenient
        )
        for call in turn.calls:
            assert not any(CLOSED_BARE & set(text) for text in _strings(dict(call.arguments or {})))
        assert turn.calls


def _strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for key, one in value.items() for text in [key, *_strings(one)]]
    if isinstance(value, list):
        return [text for one in value for text in _strings(one)]
    return [value] if isinstance(value, str) else []


AROUND = st.sampled_from(["", "\n", "Write:\n", " and ", "5 < 6\n"])


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25)
@given(
    before=AROUND,
    after=AROUND,
    twice=st.booleans(),
    escaped=st.booleans(),
    by_token=st.booleans(),
    opened=st.booleans(),
)
def test_a_call_inside_an_argument_of_another_never_runs_by_itself(
    name: str, before: str, after: str, twice: bool, escaped: bool, by_token: bool, opened: bool
) -> None:
    family = CALL_FAMILIES[name]
    inner = family.render([("look", {"at": "x"})])
    if not opened:  # the first tag of both calls is missing
        first = family.control[0] if family.control else ""
        inner = inner.removeprefix(first).lstrip("\n")
    inner = before + inner + (after + inner if twice else "") + after
    inner = json.dumps(inner, ensure_ascii=False)[1:-1] if escaped else inner
    completion = family.render([("say", {"text": "HOLE"})]).replace("HOLE", inner)
    completion = completion if opened else completion.removeprefix(first).lstrip("\n")
    tools = TOOLS | {"say": {"type": "object", "properties": {"text": {"type": "string"}}}}
    for lenient in (False, True):
        turn = parse(family, ids_of(family, completion, by_token), tools=tools, by_token=by_token, lenient=lenient)
        assert [call for call in turn.calls if call.status.runs and call.name == "look"] == []
        assert turn.calls or turn.suspects


LOOK = qwen("<parameter=at>\nx\n</parameter>\n", opened="", closed="")
WRAPPED = qwen("<parameter=at>\nx\n</parameter>\n")
INSIDE = [
    f"<function=look>\n<parameter=at>\n{LOOK}\n</parameter>\n</function>",
    f"<function=look>\n<parameter=at>\n{LOOK}\n</parameter>\n</function>\n</tool_call>",
    f"<function=look>\n<parameter=at>\n{WRAPPED}\n</parameter>\n</function>",
    f"<function=look>\n<parameter=at>\n{LOOK}\n{LOOK}",
    f"<function=nobody>\n<parameter=at>\n{LOOK}\n</parameter>\n</function>",
    f"<function=nobody>\n<parameter=at>\n{WRAPPED}\n</parameter>\n</function>",
    f"<tool_call>\n</tool_call>\n<function=look>\n<parameter=at>\n{LOOK}\n</parameter>\n</function>",
    f"<tool_call>\n<function=look>\n<parameter=at>\n{WRAPPED}\n</parameter>\n</function>\n</tool_call>",
    f"<tool_call>\n<function=look>\n<parameter=at>\n{WRAPPED}\n{WRAPPED}\n</parameter>\n</function>\n</tool_call>",
    f"Set <parameter=x>\n{LOOK}\n</parameter>",
    f"Set <parameter=x>\n{LOOK}",
    f"Set:\n{LOOK}\n</parameter>",
    f"Set:\n{LOOK}\n</tool_call>\n</parameter>\n</function>",
    f"One may write:\n```xml\n{LOOK}",
    f"One may write:\n```xml\n{LOOK}\n{LOOK}",
    f"One may write:\n~~~xml\n{LOOK}\n~~~",
    f"One may write:\n~~~xml\n{LOOK}",
]


@pytest.mark.parametrize("completion", INSIDE)
@pytest.mark.parametrize("name", ["qwen3_coder", "mimo", "seed_oss"])
def test_a_function_inside_another_or_inside_text_never_runs(name: str, completion: str) -> None:
    if name == "seed_oss":
        completion = completion.replace("tool_call>", "seed:tool_call>")
    for lenient in (False, True):
        turn = parse(CALL_FAMILIES[name], ids_of(CALL_FAMILIES[name], completion), tools=TOOLS, lenient=lenient)
        assert [call for call in turn.calls if call.status.runs] == []
        assert turn.calls or turn.suspects


def test_a_loose_function_after_a_sound_call_or_a_closed_block_of_code_runs() -> None:
    family = CALL_FAMILIES["qwen3_coder"]
    for completion in (f"{WRAPPED}\n{LOOK}", f"```\nx\n```\n{LOOK}", f"<think>Set <parameter=x>```</think>\n{LOOK}"):
        turn = parse(family, ids_of(family, completion), tools=TOOLS, lenient=True)
        assert (turn.calls[-1].status, turn.calls[-1].arguments) == (LENIENT, X)


THINKING = [name for name in NAMES if CALL_FAMILIES[name].think and CALL_FAMILIES[name].text_before]


@pytest.mark.parametrize("name", THINKING)
@pytest.mark.parametrize("opened_by", ["prompt", "policy"])
def test_a_call_that_ends_reasoning_without_a_closing_tag(name: str, opened_by: str) -> None:
    family = CALL_FAMILIES[name]
    opened, closed = family.think or ("", "")
    calls: list[Call] = [("look", {"at": "x"})]
    completion = "Hm.\n" + family.render(calls) + "<|im_end|>"
    tail = ids_of(family, opened) if opened_by == "prompt" else ()
    ids = ids_of(family, completion if opened_by == "prompt" else opened + completion)
    turn = parse(family, ids, calls, tail=tail, lenient=True)
    assert [(c.status, c.name, c.arguments) for c in turn.calls] == [(LENIENT, "look", {"at": "x"})]
    assert closed in turn.calls[0].reason
    assert (turn.reasoning, turn.text, turn.reasoning_closed) == ("Hm.", "", False)
    strict = parse(family, ids, calls, tail=tail)
    assert [(c.status, c.name, c.arguments) for c in strict.calls] == [(MALFORMED, "look", None)]
    assert strict.calls[0].reason == turn.calls[0].reason
    cut = parse(family, ids, calls, tail=tail, lenient=True, truncated=True)
    assert (cut.calls, cut.suspects) == ((), ())


@pytest.mark.parametrize("name", [name for name in THINKING if name != "mistral"])  # its calls have no closing tag
def test_a_draft_in_reasoning_that_never_ends_is_suspect(name: str) -> None:
    family = CALL_FAMILIES[name]
    calls: list[Call] = [("look", {"at": "x"})]
    completion = f"{(family.think or ('',))[0]}Hm. {family.render(calls)} Or not."
    for lenient in (False, True):
        turn = parse(family, ids_of(family, completion), calls, lenient=lenient)
        assert (turn.calls, turn.text, turn.reasoning_closed) == ((), "", False)
        [suspect] = turn.suspects
        assert (suspect.status, suspect.name) == (CallStatus.SUSPECT, "look")
        assert not suspect.status.runs
        assert suspect.raw in completion


@pytest.mark.parametrize("name", [n for n in NAMES if CALL_FAMILIES[n].control])
def test_content_that_spells_tags_is_suspect_and_stays_text(name: str) -> None:
    family = CALL_FAMILIES[name]
    calls: list[Call] = [("look", {"at": "x"})]
    completion = "Write " + family.render(calls)
    spelled = family.tokenizer(False).encode(completion, add_special_tokens=False)
    turn = parse(family, spelled, calls, lenient=True)
    assert (turn.calls, turn.text) == ((), completion.strip())
    [suspect] = turn.suspects
    assert (suspect.status, suspect.name) == (CallStatus.SUSPECT, "look")
    assert family.tokenizer(False).decode(spelled[suspect.start : suspect.stop]).strip().startswith(suspect.raw[:5])


@pytest.mark.parametrize("by_token", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_a_tag_that_text_spells_alone_is_reported(name: str, by_token: bool) -> None:
    family = CALL_FAMILIES[name]
    parser = get_tool_parser(name, family.tokenizer(by_token))
    tags = parser.calls.tags if isinstance(parser, TurnParser) else family.control
    for tag in tags:
        if (tag, by_token) == ("<|start|>", False):  # by text it begins a message, as it should
            continue
        turn = parse(family, ids_of(family, f"So {tag} ends it", False), by_token=by_token)
        assert [call for call in turn.calls if call.status.runs] == []
        assert turn.calls or turn.suspects, tag


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("So @@end", (3, 8, None)),
        ("@@call look now", (0, 11, "look")),
        ("@@call \n look", (0, 13, "look")),
        ("@@call of look", (0, 6, None)),
        ("@@call looked", (0, 6, None)),
        ("look @@end", (5, 10, None)),
        ("I look at @ once", None),
    ],
)
def test_a_tag_without_punctuation_and_the_tools_name_after_it_are_suspect(text: str, found: object) -> None:
    assert SuspectFinder(("@@call", "@@end")).find(text, {"look": {}}) == found


PROSE = ["Look at it: 5 < 6 (so it is).", '{"answer": [3, 4]}', "I can look (or count).", "def f(x): return x", "", "x"]


@pytest.mark.parametrize("completion", PROSE)
@pytest.mark.parametrize("name", NAMES)
def test_plain_text_is_not_suspect(name: str, completion: str) -> None:
    turn = parse(CALL_FAMILIES[name], ids_of(CALL_FAMILIES[name], completion), [("look", {}), ("count", {})])
    assert (turn.calls, turn.suspects) == ((), ())


def test_a_parser_without_a_lenient_mode_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    class Theirs:
        def __init__(self, tokenizer: Any) -> None:
            self.mode = "strict"

    class Both(Theirs):
        def leniently(self) -> Theirs:
            self.mode = "lenient"
            return self

    monkeypatch.setitem(parser_registry._FACTORIES, "theirs", Theirs)
    monkeypatch.setitem(parser_registry._FACTORIES, "both", Both)
    tokenizer = byte_level(())
    assert get_tool_parser("theirs", tokenizer).mode == "strict"  # type: ignore[attr-defined]
    assert get_tool_parser("both", tokenizer, tool_calls="lenient").mode == "lenient"  # type: ignore[attr-defined]
    with pytest.raises(UnknownParserError, match="theirs"):
        get_tool_parser("theirs", tokenizer, tool_calls="lenient")
    with pytest.raises(UnknownParserError, match=r"strict.*lenient.*loose"):
        get_tool_parser("hermes", tokenizer, tool_calls="loose")  # type: ignore[arg-type]
