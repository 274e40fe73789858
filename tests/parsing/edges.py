"""Edge cases of each format, written by hand; `parsing.record` records how they parse."""

from __future__ import annotations

import json
from collections.abc import Callable

LONG = "x" * 61


def nested(opened: str, inner: str, closed: str, levels: int) -> str:
    return opened * levels + inner + closed * levels


def deep(call: Callable[[str], str], opened: str, closed: str, inner: str = "1") -> list[str]:
    """Return calls whose value nests up to, exactly and above the limit."""
    return [call(nested(opened, inner, closed, levels)) for levels in (98, 99, 100)]


def in_json(completion: str) -> list[str]:
    """Return a call with various JSON arguments in place of the `@`."""
    given = ["{}", " {} ", "[]", "1", "", '{"a": NaN}', '{"a": 1e999}', '{"a": 1, "a": 2}', '{"a": "\\ud800"}']
    given += ['{"a": "\\ud83d\\ude42"}', '{"a": 1} x', '{"a": {"b": [1, {"c": null}]}}', '{"a": "é漢"}']
    return [completion.replace("@", each) for each in given] + deep(
        lambda v: completion.replace("@", f'{{"a": {v}}}'), "[", "]"
    )


def objects(arguments: str) -> list[str]:
    """Return calls as JSON objects, valid and invalid."""
    keys: list[dict[str, object]] = [
        {"name": "look", arguments: {"a": 1}},
        {"name": "look", arguments: {}, "id": "a1"},
        {"name": "look", arguments: {}, "id": 5},
        {"name": "look", arguments: {}, **{f"k{i}": i for i in range(7)}},
        {"name": "look"},
        {"name": "", arguments: {}},
        {"name": 5, arguments: {}},
        {"name": "look", arguments: []},
        {arguments: {}},
    ]
    return [json.dumps(each, ensure_ascii=False) for each in keys] + ["[]", "5", '"look"', '{"name": "look",', "{", ""]


TO = "<|channel|>commentary to=functions.look"
SAY = "<|start|>assistant"
HARMONY = [
    "Hm.",
    f"Hm.{SAY}<|channel|>final<|message|>Yes.<|return|>",
    "to=functions.look",
    " to=functions.look json",
    "text to=functions.look",
    TO,
    f"{TO}<|call|>",
    f"{TO}{SAY}<|channel|>final<|message|>Yes.",
    "<|channel|>analysis",
    "<|channel|>final",
    "<|channel|>analysis to=functions.look",
    "text<|end|>more",
    "text<|call|>more",
    "text<|return|>",
    SAY,
    f"text{SAY}",
    f"text{SAY}<|channel|>analysis",
    f"a<|channel|>b{TO}",
    "<|channel|>analysis<|message|>\n a \n<|end|>",
    "<|channel|>analysis<|message|>X a X",
    f"<|channel|>analysis<|message|>a{SAY}<|channel|>analysis<|message|>b{SAY}<|channel|>final<|message|> c ",
    f"<|channel|>final<|message|>a<|end|> between {SAY}<|channel|>final<|message|>b<|end|> after",
    "<|channel|>final<|message|>a<|message|>b<|channel|>c<|end|>d",
    f"<|channel|>final<|message|>a<|constrain|>b{SAY}<|constrain|>",
    f"{TO}<|message|>{{}}{SAY}<|channel|>final<|message|>a",
    f"{TO}<|message|>{{}}<|end|>{TO}<|message|>{{}}<|call|>",
    f"{TO}<|message|>{{",
    f"{TO} <|constrain|>json<|message|>{{}}",
    f"<|channel|>commentary to=functions.{LONG}é <|message|>{{}}<|call|>",
    f"<|channel|>commentary to={LONG}<|message|>{{}}<|call|>",
    f"<|channel|>commentary to={LONG[:60]}<|message|>{{}}<|call|>",
    "<|channel|>commentary<|message|>I look.<|end|>",
    "<|channel|>commentary<|message|>I look.<|call|>",
    "<|channel|>comment<|message|>I look.<|call|>",
    "<|channel|>comment to=functions.look<|message|>I look.",
    " to=functions.look<|channel|>commentary<|message|>{}<|call|>",
    " to=functions.look<|channel|>commentary to=functions.look<|message|>{}<|call|>",
    *in_json(f"{TO} <|constrain|>json<|message|>@<|call|>"),
]
MISTRAL = [
    '[TOOL_CALLS]look[ARGS]{"at": "[TOOL_CALLS]"}',
    '[TOOL_CALLS]look[ARGS]{"at": "[TOOL_CALLS]"}[TOOL_CALLS]count[ARGS]{}',
    "[TOOL_CALLS]look[ARGS]{}[TOOL_CALLS]count[ARGS]{",
    '[TOOL_CALLS]look[ARGS]{"at": ',
    "[TOOL_CALLS]look[ARGS]{} and more",
    "[TOOL_CALLS]look[ARGS]",
    "[TOOL_CALLS]look",
    "[TOOL_CALLS]",
    "[TOOL_CALLS]look[CALL_ID]a1[ARGS]{}",
    "[TOOL_CALLS]look[CALL_ID]a-1[ARGS]{}",
    f"[TOOL_CALLS]look[CALL_ID]{LONG}-[ARGS]{{}}",
    "[TOOL_CALLS]look[CALL_ID][ARGS]{}",
    '[TOOL_CALLS] [{"name": "look", "arguments": {}}]',
    '[TOOL_CALLS][{"name": "look", "arguments": {}}] after',
    '[TOOL_CALLS][{"name": "look", "arguments": {}}',
    '[TOOL_CALLS][{"name": "look", "arguments": {}}][TOOL_CALLS]count[ARGS]{}',
    '[TOOL_CALLS][{"name": "look", "arguments": {}, "id": "a1"}, {"name": "count", "arguments": {}, "id": 5}]',
    *in_json("[TOOL_CALLS]look[ARGS]@"),
]
PYTHONIC = [
    "[look(a={'x': [1, {'y': None}], \"z\": 'q'}, b=[]), count()]",
    "[look(a={}, b={'x': 1,}, c=[1,],)]",
    "[look(), ]",
    "[look(a=1), count(b=2), f(c=3)]",
    "[ look ( a = 1 ) , count ( ) ]",
    "[f(a=-1.5e-3, b=+2, c=1E5, d=0.0, e=1.)]",
    "[f(a=1e999)]",
    "[f(a=-1E999)]",
    "[f(a=01)]",
    "[f(a=1x)]",
    r"[f(a='\x41\u00e9\U0001F642\n\t\\', b='\'')]",
    r"[f(a='\q')]",
    r"[f(a='\U00110000')]",
    r"[f(a='\U0010FFFF')]",
    r"[f(a='\ud800')]",
    r"[f(a='\udfff')]",
    "[f(a='open",
    '[f(a="open',
    "[f(a='one', b='op",
    "[f(a=[1, 2",
    "[f(a={'x'",
    "[f(a={'x': 1 'y': 2})]",
    "[f(a={'x': 1, 'x': 2})]",
    "[f(a={1: 2})]",
    "[f(a=xyz)]",
    "[f(a=True, b=true, c=None, d=null, e=False, f=false)]",
    "[f(a=1, a=2)]",
    "[f(1)]",
    "[f(a=1)g()]",
    "[f(a=1)] rest",
    f"[f(a=1)] {LONG}",
    "[f(a=1]",
    "[a.b.c(d=1)]",
    "[look(",
    "[look(a",
    "[look(a=",
    "[look()",
    f"[look(a=1 {LONG})]",
    "[look(a=1), 5]",
    "[look(a='x\ny')]",
    *deep(lambda value: f"[f(a={value})]", "[", "]"),
    *deep(lambda value: f"[f(a={value})]", "{'a': ", "}"),
]
GEMMA = [
    f"<|tool_call>call:look{{{given}}}<tool_call|>"
    for given in (
        "",
        "a:1",
        "a:None",
        "a:null,b:true,c:-1.5",
        'a:<|"|>x<|"|>',
        'a:<|"|>x',
        '<|"|>a b<|"|>:1',
        "a:[]",
        "a:[1,2,<|\"|>x<|\"|>]",
        "a:[1 2]",
        "a:{b:{c:[]}}",
        "a:{}",
        "a:x",
        "a:1,a:2",
        "a:1,",
        ":1",
        "é:1",
        "-:1",
        "a",
        f"a:{LONG}",
        *deep(lambda value: f"a:{value}", "[", "]"),
        *deep(lambda value: f"a:{value}", "{a:", "}"),
    )
] + ["<|tool_call>call:<tool_call|>", "<|tool_call>look{}<tool_call|>", "<|tool_call>call:look{}x<tool_call|>",
     f"<|tool_call>call:{LONG} {{}}<tool_call|>", "<|tool_call>call:look{", "<|tool_call>call:look{a:1}"]  # fmt: skip


def glm(body: str) -> str:
    return f"<tool_call>{body}</tool_call>"


def pair(key: str, value: str = "x") -> str:
    return f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>"


GLM = [
    *(glm(f"look{pair(key)}") for key in ("a", " a", "a ", "", "<", ">", "a>b", LONG + "<", "X")),
    *(glm(f"{name}{pair('a')}") for name in ("look", " look ", "a b", "", LONG + " ")),
    glm("look") + "</tool_call>",
    glm("look") + "</arg_value></tool_call>",
    glm(f"look\n{pair('a')}\n{pair('b')}\n"),
    glm(f"look{pair('a')}x{pair('b')}"),
    "<tool_call>look",
    f"<tool_call>look{pair('a')}",
    f"<tool_call>look<tool_call>look{pair('a')}</tool_call>",
]
KIMI = "<|tool_calls_section_begin|><|tool_call_begin|>{}<|tool_call_argument_begin|>@<|tool_call_end|>"
KIMI_END = "<|tool_calls_section_end|>"
V31 = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁sep｜>@<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
V3 = V31.replace("{}", "function").replace("@", "look\n```json\n@\n```")
HERMES = [f"<tool_call>\n{each}\n</tool_call>" for each in objects("arguments")] + [
    f"<tool_call>{each}" for each in objects("arguments")
]
LISTS = [f"[{each}]" for each in objects("arguments")] + [
    '[{"name": "look", "arguments": {}}, {"name": "count", "arguments": {}}]',
    '[{"name": "look", "arguments": {}} {"name": "count", "arguments": {}}]',
    '[{"name": "look", "arguments": {}}, 5]',
    '[{"name": "look", "arguments": {}}',
    '[{"name": "look", "arguments": {}}, {"name": "count", "arguments": {',
    '[{"name": "look", "arguments": {}}] after',
    '[{"name": "look", "arguments": {}}]]',
]
EDGES: dict[str, list[str]] = {
    "gpt_oss": HARMONY,
    "mistral": MISTRAL,
    "pythonic": PYTHONIC,
    "llama4_pythonic": [f"<|python_start|>{completion}<|python_end|>" for completion in PYTHONIC],
    "gemma4": GEMMA,
    "glm45": GLM,
    "glm47": GLM,
    "hermes": HERMES,
    "kimi_k2": [
        *(KIMI.format(head).replace("@", "{}") + KIMI_END for head in ("functions.look:0", "functions.look:x", LONG)),
        *in_json(KIMI.format("functions.look:0") + KIMI_END),
    ],
    "deepseek_v31": [
        *(V31.format(head).replace("@", "{}") for head in ("look", " look ", "a b", LONG + " ")),
        *in_json(V31.format("look")),
    ],
    "deepseek_v3": [*in_json(V3), *(V3.replace("look", name).replace("@", "{}") for name in ("a b", "", LONG + " "))],
    "llama3_json": [
        *objects("parameters"),
        *objects("arguments"),
        *(f"<|python_tag|>{each}" for each in objects("parameters")),
        '{"name": "look", "parameters": {}}; {"name": "count", "parameters": {}}',
        '{"name": "look", "parameters": {}} {"name": "count", "parameters": {}}',
        '{"name": "look", "parameters": {}};',
        '{"name": "look", "parameters": {}}; {"name": ',
        '{"name": "look", "parameters": {}} after',
    ],
    "xlam": LISTS,
    "phi4_mini": [f"functools{each}" for each in LISTS],
    "granite": [f"<|tool_call|>{each}" for each in LISTS],
}
