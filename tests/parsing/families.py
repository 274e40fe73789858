"""A renderer of each tool-call format, written by hand: the reference for the parsers.

A new format needs a `Family` here; all tests of `NAMES` then run on it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from support.byte_level import byte_level
from tito_core.parsing import ParsedTurn, Tools, get_tool_parser

Call = tuple[str, dict[str, Any]]
GUARD = "☃"
"""Put inside a tag that content spells, so that `ids_of` encodes it as text; no ids contain it."""


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def plain(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)


def python(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)


@dataclass(frozen=True)
class Family:
    """A format.

    Attributes:
        name: The parser's name.
        control: The tags, or parts of tags, that its vocabularies have as tokens.
        render: Renders calls.
        typed: Whether argument types come from the schema.
        json_arguments: Whether the arguments of a call are written as one JSON object.
        keys: Names of arguments, as a regular expression.
        text_before: Whether text can come before the calls.
        think: Tags of its reasoning.
        nested_keys: Characters of keys inside arguments.
        single_call: Whether a turn has at most one call.
        nested: Whether arguments can be lists and objects of any content; else the tests generate none.
        forced: Whether a call can be forced by a grammar.
        bare_prefix: For a call that no control token begins: how much of it must be present to be recognised as a call.
    """

    name: str
    control: tuple[str, ...]
    render: Callable[[Sequence[Call]], str]
    typed: bool = False
    json_arguments: bool = True
    keys: str = r"[ab1é_]{1,4}"
    text_before: bool = True
    think: tuple[str, str] | None = ("<think>", "</think>")
    nested_keys: str = "ab1é _\"'"
    single_call: bool = False
    nested: bool = True
    forced: bool = True
    bare_prefix: str = ""

    def tokenizer(self, by_token: bool) -> Any:
        return _tokenizer(self.control + self.think_tokens if by_token else ())

    @property
    def think_tokens(self) -> tuple[str, ...]:
        """The tags of reasoning that are tokens."""
        alone = (tag.removesuffix("thought\n") for tag in self.think or ())
        return tuple(tag for tag in alone if not any(control in tag for control in self.control))


@cache
def _tokenizer(control: tuple[str, ...]) -> Any:
    return byte_level(tuple(dict.fromkeys(control)))


Render = Callable[[Sequence[Call]], str]


def in_tags(tag: str) -> Render:
    def render(calls: Sequence[Call]) -> str:
        return "\n".join(f'<{tag}>\n{{"name": {dumps(n)}, "arguments": {dumps(a)}}}\n</{tag}>' for n, a in calls)

    return render


def functions(tag: str, frame: str, value: Callable[[Any], str]) -> Render:
    def one(name: str, arguments: dict[str, Any]) -> str:
        given = "".join(f"<parameter={k}>{frame}{value(v)}{frame}</parameter>\n" for k, v in arguments.items())
        return f"<{tag}>\n<function={name}>\n{given}</function>\n</{tag}>"

    return lambda calls: "\n".join(one(*call) for call in calls)


def arg_keys(family: str) -> Render:
    key, value = f"{family}arg_key", f"{family}arg_value"

    def one(name: str, arguments: dict[str, Any]) -> str:
        pairs = "".join(f"<{key}>{k}</{key}>\n<{value}>{plain(v)}</{value}>\n" for k, v in arguments.items())
        return f"<{family}tool_call>{name}\n{pairs}</{family}tool_call>"

    return lambda calls: "\n".join(one(*call) for call in calls)


def glm47(calls: Sequence[Call]) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        pairs = "".join(f"<arg_key>{k}</arg_key><arg_value>{plain(v)}</arg_value>" for k, v in arguments.items())
        return f"<tool_call>{name}{pairs}</tool_call>"

    return "".join(one(*call) for call in calls)


def deepseek_v3(calls: Sequence[Call]) -> str:
    inner = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{dumps(a)}\n```<｜tool▁call▁end｜>" for n, a in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>" if calls else ""


def deepseek_v31(calls: Sequence[Call]) -> str:
    inner = "".join(f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{dumps(a)}<｜tool▁call▁end｜>" for n, a in calls)
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>" if calls else ""


def kimi_k2(calls: Sequence[Call]) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.{n}:{i}<|tool_call_argument_begin|>{dumps(a)}<|tool_call_end|>"
        for i, (n, a) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>" if calls else ""


def invokes(section: str) -> Render:
    def one(name: str, arguments: dict[str, Any]) -> str:
        given = "".join(f'<parameter name="{k}">{plain(v)}</parameter>\n' for k, v in arguments.items())
        return f'<invoke name="{name}">\n{given}</invoke>\n'

    return lambda calls: f"<{section}>\n{''.join(one(*c) for c in calls)}</{section}>" if calls else ""


def dsml(block: str, space: str = "") -> Render:
    begin, end = f"<｜DSML｜{space}", f"</｜DSML｜{space}"

    def one(name: str, arguments: dict[str, Any]) -> str:
        given = "\n".join(
            f'{begin}parameter name="{k}" string="{dumps(isinstance(v, str))}">{plain(v)}{end}parameter>'
            for k, v in arguments.items()
        )
        return f'{begin}invoke name="{name}">\n{given}\n{end}invoke>'

    def render(calls: Sequence[Call]) -> str:
        inner = "\n".join(one(*call) for call in calls)
        return f"{begin}{block}>\n{inner}\n{end}{block}>" if calls else ""

    return render


def gpt_oss(calls: Sequence[Call]) -> str:
    """Render calls; a turn of gpt-oss ends with its first call."""
    return "".join(
        f"<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{dumps(a)}<|call|>" for n, a in calls
    )


def llama3_json(calls: Sequence[Call]) -> str:
    return "; ".join(f'{{"name": {dumps(n)}, "parameters": {dumps(a)}}}' for n, a in calls)


def llama4_json(calls: Sequence[Call]) -> str:
    return "".join(f'{{"name": {dumps(n)}, "parameters": {dumps(a)}}}' for n, a in calls)


def array(calls: Sequence[Call]) -> str:
    return "[" + ", ".join(f'{{"name": {dumps(n)}, "arguments": {dumps(a)}}}' for n, a in calls) + "]"


def prefixed(prefix: str) -> Callable[[Sequence[Call]], str]:
    return lambda calls: prefix + array(calls) if calls else ""


def xlam(calls: Sequence[Call]) -> str:
    return array(calls) if calls else ""


def mistral(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{n}[ARGS]{dumps(a)}" for n, a in calls)


def pythonic(calls: Sequence[Call]) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        return f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})"

    return f"[{', '.join(one(*call) for call in calls)}]" if calls else ""


def between(opened: str, closed: str, render: Render) -> Render:
    return lambda calls: f"{opened}{render(calls)}{closed}" if calls else ""


def lines(calls: Sequence[Call]) -> str:
    return "\n".join(f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in calls)


def cohere(calls: Sequence[Call]) -> str:
    each = (
        f'    {{"tool_call_id": "{i}", "tool_name": {dumps(n)}, "parameters": {dumps(a)}}}'
        for i, (n, a) in enumerate(calls)
    )
    return "[\n" + ",\n".join(each) + "\n]"


def step3(calls: Sequence[Call]) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        given = "".join(f'<steptml:parameter name="{k}">{python(v)}</steptml:parameter>' for k, v in arguments.items())
        invoke = f'<steptml:invoke name="{name}">{given}</steptml:invoke>'
        return f"<｜tool_call_begin｜>\nfunction<｜tool_sep｜>{invoke}<｜tool_call_end｜>\n"

    return f"<｜tool_calls_begin｜>\n{''.join(one(*call) for call in calls)}<｜tool_calls_end｜>" if calls else ""


def kimi_k3(calls: Sequence[Call]) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}

    def one(number: int, name: str, arguments: dict[str, Any]) -> str:
        given = "".join(
            f'<|open|>argument key="{k}" type="{kinds.get(type(v), "null")}"<|sep|>{plain(v)}<|close|>argument<|sep|>'
            for k, v in arguments.items()
        )
        return f'<|open|>call tool="{name}" index="{number}"<|sep|>{given}<|close|>call<|sep|>'

    inner = "".join(one(i, *call) for i, call in enumerate(calls, 1))
    return f"<|open|>tools<|sep|>{inner}<|close|>tools<|sep|>" if calls else ""


def minimax_m3(calls: Sequence[Call]) -> str:
    mark = "]<]minimax[>["

    def element(key: str, value: Any) -> str:
        if isinstance(value, dict):
            inner = "".join(element(k, v) for k, v in value.items())
        elif isinstance(value, list):
            inner = "".join(element("item", v) for v in value)
        else:
            inner = plain(value)
        return f"{mark}<{key}>{inner}{mark}</{key}>"

    def one(name: str, arguments: dict[str, Any]) -> str:
        given = "".join(element(k, v) for k, v in arguments.items())
        return f'{mark}<invoke name="{name}">{given}{mark}</invoke>\n'

    return f"{mark}<tool_call>\n{''.join(one(*c) for c in calls)}{mark}</tool_call>" if calls else ""


def muse_glimmer(calls: Sequence[Call]) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        given = "".join(f'<atem:parameter name="{k}">{plain(v)}</atem:parameter>\n' for k, v in arguments.items())
        invoke = f'<atem:invoke name="{name}">\n{given}</atem:invoke>'
        return f"<|start|>assistant to={name}<|message|><atem:function_calls>\n{invoke}\n</atem:function_calls>"

    return "<|eom|>".join(one(*call) for call in calls)


def hy_v3(calls: Sequence[Call]) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        pairs = "".join(
            f"<arg_key{HY}>{k}</arg_key{HY}>\n<arg_value{HY}>{plain(v)}</arg_value{HY}>\n" for k, v in arguments.items()
        )
        return f"<tool_call{HY}>{name}<tool_sep{HY}>\n{pairs}</tool_call{HY}>\n"

    return f"<tool_calls{HY}>\n{''.join(one(*call) for call in calls)}</tool_calls{HY}>" if calls else ""


def gemma(opened: str, closed: str, quote: str) -> Render:
    def value(given: Any) -> str:
        if isinstance(given, str):
            return f"{quote}{given}{quote}"
        if isinstance(given, dict):
            return "{" + ",".join(f"{key(k)}:{value(v)}" for k, v in given.items()) + "}"
        if isinstance(given, list):
            return "[" + ",".join(map(value, given)) + "]"
        return dumps(given)

    def key(given: str) -> str:
        return given if re.fullmatch(r"\w+", given) else f"{quote}{given}{quote}"

    def one(name: str, arguments: dict[str, Any]) -> str:
        return f"{opened}call:{name}{{{','.join(f'{k}:{value(v)}' for k, v in arguments.items())}}}{closed}"

    return lambda calls: "".join(one(*call) for call in calls)


CALL = ("<tool_call>", "</tool_call>")
GLM = (*CALL, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)
KIMI = (
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    "<|tool_call_argument_begin|>",
)
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
WORDS = r"[ab_]{1,4}"
PYTHON = ("<|python_start|>", "<|python_end|>")
LFM2 = ("<|tool_call_start|>", "<|tool_call_end|>")
STEP3 = (
    "<｜tool_calls_begin｜>",
    "<｜tool_calls_end｜>",
    "<｜tool_call_begin｜>",
    "<｜tool_call_end｜>",
    "<｜tool_sep｜>",
)
XTML = ("<|open|>", "<|close|>", "<|sep|>")
XTML_THINK = ("<|open|>think<|sep|>", "<|close|>think<|sep|>")
BRACKETS = ("[THINK]", "[/THINK]")
HY = ":opensource"
HY_TAGS = tuple(f"{tag[:-1]}{HY}>" for tag in ("<tool_calls>", "</tool_calls>", "<tool_sep>", *GLM))


TYPED: dict[str, Any] = {"typed": True, "json_arguments": False}
UNFORCED: dict[str, Any] = {"json_arguments": False, "forced": False}
ALONE: dict[str, Any] = {"text_before": False, "think": None}


def tags(word: str) -> tuple[str, str]:
    return f"<{word}>", f"</{word}>"


CALL_FAMILIES = {
    family.name: family
    for family in (
        Family("hermes", CALL, in_tags("tool_call")),
        Family("ernie45", CALL, in_tags("tool_call")),
        Family("longcat", tags("longcat_tool_call"), in_tags("longcat_tool_call"), think=tags("longcat_think")),
        Family("qwen3_coder", CALL, functions("tool_call", "\n", plain), **TYPED),
        Family("mimo", CALL, functions("tool_call", "", plain), **TYPED),
        Family(
            "seed_oss",
            tags("seed:tool_call"),
            functions("seed:tool_call", "", python),
            **TYPED,
            think=tags("seed:think"),
        ),
        Family("glm45", GLM, arg_keys(""), **TYPED),
        Family(
            "longcat2",
            tuple(f"{tag[: tag.index(tag.strip('</'))]}longcat_{tag.strip('</')}" for tag in GLM),
            arg_keys("longcat_"),
            **TYPED,
            think=tags("longcat_think"),
        ),
        Family("step3", STEP3, step3, **TYPED, forced=False),
        Family("kimi_k3", XTML, kimi_k3, think=XTML_THINK, **UNFORCED, bare_prefix="<|open|>tools<|sep|>"),
        Family(
            "minimax_m3",
            ("]<]minimax[>[",),
            minimax_m3,
            **TYPED,
            think=tags("mm:think"),
            nested=False,
            forced=False,
            bare_prefix="]<]minimax[>[<tool_call>",
        ),
        Family(
            "muse_glimmer",
            ("<|start|>", "<|message|>", "<|eom|>"),
            muse_glimmer,
            **TYPED,
            think=("to=self<|message|>", "<|eom|>"),
            forced=False,
        ),
        Family("hy_v3", HY_TAGS, hy_v3, **TYPED, think=(f"<think{HY}>", f"</think{HY}>")),
        Family("hunyuan_a13b", tags("tool_calls"), between("<tool_calls>", "</tool_calls>", array)),
        Family(
            "cohere_command",
            ("<|START_ACTION|>", "<|END_ACTION|>"),
            between("<|START_ACTION|>", "<|END_ACTION|>", cohere),
            think=("<|START_THINKING|>", "<|END_THINKING|>"),
        ),
        Family("lfm2", LFM2, between(*LFM2, pythonic), keys=WORDS, **UNFORCED),
        Family(
            "olmo3",
            tags("function_calls"),
            between("<function_calls>", "</function_calls>", lines),
            keys=WORDS,
            **UNFORCED,
        ),
        Family("glm47", GLM, glm47, **TYPED),
        Family("deepseek_v3", DEEPSEEK, deepseek_v3),
        Family("deepseek_v31", DEEPSEEK, deepseek_v31),
        Family("kimi_k2", KIMI, kimi_k2),
        *(
            Family(name, tags(section), invokes(section), **TYPED)
            for name, section in (("minimax_m2", "minimax:tool_call"), ("dots", "dots_function_call"))
        ),
        Family(
            "deepseek_v32",
            ("｜DSML｜",),
            dsml("function_calls"),
            json_arguments=False,
            bare_prefix="<｜DSML｜function_calls>",
        ),
        Family(
            "deepseek_v4", ("｜DSML｜",), dsml("tool_calls"), json_arguments=False, bare_prefix="<｜DSML｜tool_calls>"
        ),
        Family("deepseek_v41", ("｜DSML｜",), dsml("calls", " "), json_arguments=False, bare_prefix="<｜DSML｜ calls>"),
        Family(
            "gpt_oss",
            HARMONY,
            gpt_oss,
            think=None,
            text_before=False,
            single_call=True,
            forced=False,
            bare_prefix="<|channel|>commentary to= ",
        ),
        Family("llama3_json", ("<|python_tag|>",), llama3_json, **ALONE, bare_prefix='{"name":  '),
        Family("llama4_json", PYTHON, llama4_json, **ALONE, bare_prefix='{"name":  '),
        Family("mistral", ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), mistral, think=BRACKETS),
        Family("granite", ("<|tool_call|>",), prefixed("<|tool_call|>"), think=None),
        Family("phi4_mini", (), prefixed("functools"), **ALONE, bare_prefix="functools[ "),
        Family("xlam", (), xlam, text_before=False, bare_prefix='[{"name":  '),
        Family("pythonic", (), pythonic, keys=WORDS, **ALONE, **UNFORCED, bare_prefix="[look( "),
        Family("llama4_pythonic", PYTHON, between(*PYTHON, pythonic), keys=WORDS, think=None, **UNFORCED),
        *(
            Family(name, words, gemma(*words), think=think, **UNFORCED)
            for name, words, think in (
                ("gemma4", ("<|tool_call>", "<tool_call|>", '<|"|>'), ("<|channel>thought\n", "<channel|>")),
                ("functiongemma", ("<start_function_call>", "<end_function_call>", "<escape>"), None),
            )
        ),
    )
}
NAMES = sorted(CALL_FAMILIES)


PIECES = {
    **dict.fromkeys(("llama3_json", "llama4_json"), ('{"name": ', ";", "}")),
    **dict.fromkeys(("pythonic", "llama4_pythonic"), ("[look(", ")]", "'")),
    **dict.fromkeys(("phi4_mini", "xlam"), ('[{"name": "look"', "]")),
}
"""Pieces of calls without tags."""


def markup_of(family: Family, by_token: bool) -> list[str]:
    """Return the tags of a format, of its reasoning and of a turn, and pieces of calls without tags."""
    calls = getattr(get_tool_parser(family.name, family.tokenizer(by_token)), "calls", None)
    tags = dict.fromkeys((*family.control, *(family.think or ()), *(calls.tags if calls else ()), "<|im_end|>"))
    return [*tags, *PIECES.get(family.name, ())]


def ids_of(family: Family, completion: str, by_token: bool = True) -> list[int]:
    """Encode a completion: the format's tags as tokens if `by_token`, and everything else as plain text."""
    tokenizer, spelled = family.tokenizer(by_token), _tokenizer(())
    tags = (*family.control, *family.think_tokens, "<|im_end|>") if by_token else ("<|im_end|>",)
    ids: list[int] = []
    for piece in re.split("(" + "|".join(map(re.escape, tags)) + ")", completion):
        if piece in tags:
            ids.append(tokenizer.convert_tokens_to_ids(piece))
        else:
            ids += spelled.encode(piece.replace(GUARD, ""), add_special_tokens=False)
    return ids


def parse(
    family: Family,
    ids: Sequence[int],
    calls: Sequence[Call] = (),
    *,
    by_token: bool = True,
    truncated: bool = False,
    chunk: int = 0,
    tail: Sequence[int] = (),
    tools: Tools | None = None,
    lenient: bool = False,
) -> ParsedTurn:
    tools = {name: schema_of(arguments) for name, arguments in calls} if tools is None else tools
    parser = get_tool_parser(family.name, family.tokenizer(by_token), tool_calls="lenient" if lenient else "strict")
    session = parser.start(tail, tools)
    for at in range(0, len(ids), chunk or len(ids) or 1):
        session.feed(ids[at : at + (chunk or len(ids))])
    return session.finish(truncated=truncated)


def schema_of(arguments: dict[str, Any]) -> dict[str, Any]:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    kinds = {key: {"type": names.get(type(value), "null")} for key, value in arguments.items()}
    return {"type": "object", "properties": kinds}


def unguarded(value: Any) -> Any:
    if isinstance(value, str):
        return value.replace(GUARD, "")
    if isinstance(value, list):
        return [unguarded(item) for item in value]
    if isinstance(value, dict):
        return {key: unguarded(item) for key, item in value.items()}
    return value
