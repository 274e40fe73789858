"""Detection of the parser in a chat template, which never guesses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from parsing.engine_names import ENGINE_NAMES
from parsing.families import CALL_FAMILIES
from support.byte_level import CHATML_TOOLS, byte_level
from support.templates import NAMES, tokenizer_of
from tito_core.parsing import (
    DetectionError,
    UnknownParserError,
    detect_tool_parser,
    get_tool_parser,
    known_tool_parsers,
    register_format,
    register_tool_parser,
)
from tito_core.parsing import registry as parser_registry
from tito_core.parsing.formats import gpt_oss
from tito_core.parsing.registry import choose_tool_parser, template_text
from tito_core.parsing.turn import BRACKET_THINK, THINK, SuspectFinder, TurnParser, shown_call

JSON_CALL = """'<tool_call>\n{"name": "' + name + '", "arguments": ' + arguments | tojson + '}\n</tool_call>'"""
TEMPLATES = {
    "hermes": "{{ " + JSON_CALL + " }}",
    "qwen3_coder": "<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>",
    "glm47": "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>{{ arguments }}",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ name }}\n```json\n",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ name }}<｜tool▁sep｜>{{ arguments }}",
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="{{ name }}">',
    "deepseek_v4": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="{{ name }}">',
    "gpt_oss": "<|start|>assistant<|channel|>commentary to=functions.{{ name }}<|message|>{{ arguments }}<|call|>",
    "llama3_json": 'Respond in the format {"name": function name, "parameters": dictionary of arguments}.',
    "llama4_pythonic": "<|header_start|>assistant<|header_end|>\n\n<|python_start|>[{{ calls }}]<|python_end|>",
    "llama4_json": '{"name": function name, "parameters": dictionary}<|python_start|><|header_start|>',
    "minimax_m2": '<minimax:tool_call>\n<invoke name="{{ name }}">',
    "gemma4": '<|tool_call>call:{{ name }}{at:<|"|>{{ value }}<|"|>}<tool_call|>',
    "dots": '<dots_function_call>\n<invoke name="{{ name }}">',
    "hy_v3": "{%- set begin = '<tool_calls{}>' %}{%- set separator = '<tool_sep{}>' %}{%- set key = '<arg_key{}>' %}",
    "muse_glimmer": '<atem:function_calls>\n<atem:invoke name="{{ name }}">',
    "granite": "<|start_of_role|>assistant<|end_of_role|><|tool_call|>{{ message.tool_calls | tojson }}<|end_of_text|>",
    "phi4_mini": 'formatted as functools[{"name": [function name], "arguments": [function arguments as JSON]}, ...]',
    "xlam": 'in a single JSON array: [{"name": "tool_call_name", "arguments": {"arg1": "value1"}}, ...]',
    "pythonic": "[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]",
    "mistral": "[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_family_is_detected_by_its_marks(name: str) -> None:
    detected = detect_tool_parser(f"{{%- for message in messages %}}{TEMPLATES[name]}{{%- endfor %}}")
    assert detected.name == name
    assert name in detected.why
    assert all(repr(mark) in detected.why for mark in parser_registry._TABLE[name].has)
    assert name in known_tool_parsers()


@pytest.mark.parametrize("name", NAMES)
def test_the_templates_of_the_tests_are_hermes(name: str) -> None:
    tokenizer = tokenizer_of(name)
    assert detect_tool_parser(tokenizer.chat_template).name == "hermes"
    parser = get_tool_parser("auto", tokenizer)
    assert isinstance(parser, TurnParser)
    assert parser.calls is get_tool_parser("hermes", tokenizer).calls  # type: ignore[attr-defined]


NAME, ARGUMENTS = "call.function.name", "call.function.arguments"
CALL = f"{{'name': {NAME}, 'arguments': {ARGUMENTS}}} | tojson"


@pytest.mark.parametrize(
    "written",
    [
        f"'<tool_call>' + {CALL} + '</tool_call>'",
        f"'<tool_call>\n' + {CALL}(indent=2) + '\n</tool_call>'",
        "'<tool_call>{\"name\":\"' + NAME + '\",\"arguments\":' + ARGUMENTS | tojson + '}</tool_call>'",
        '"<tool_call>{\\"name\\": \\"" + NAME + "\\", \\"arguments\\": " + ARGUMENTS | tojson + "}</tool_call>"',
    ],
)  # fmt: skip
def test_a_format_is_detected_by_what_the_template_writes(written: str) -> None:
    written = written.replace("NAME", NAME).replace("ARGUMENTS", ARGUMENTS)
    each = "{% for call in m.tool_calls or [] %}{{- " + written + " }}{% endfor %}"
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}" + each + "<|im_end|>\n{% endfor %}"
    with pytest.raises(DetectionError):
        detect_tool_parser(template)
    tokenizer = byte_level(template=template)
    assert choose_tool_parser("auto", tokenizer).name == "hermes"
    session = get_tool_parser("auto", tokenizer).start()
    shown = shown_call(tokenizer).rpartition("assistant\n")[2]
    session.feed(tokenizer.encode(shown.removesuffix("<|im_end|>\n"), add_special_tokens=False))
    assert [dict(call.arguments or {}) for call in session.finish(truncated=False).calls] == [{"at": ["x", True]}]


def test_the_detected_parser_is_built() -> None:
    control = (*CALL_FAMILIES["gpt_oss"].control,)
    assert isinstance(get_tool_parser("auto", byte_level(control, TEMPLATES["gpt_oss"])), gpt_oss.HarmonyParser)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ messages[0].content }}", "no tool-call format.*hermes.*kimi_k3.*seed_oss"),
        (TEMPLATES["mistral"] + TEMPLATES["gemma4"], "'gemma4' and 'mistral'"),
        (TEMPLATES["glm45"] + TEMPLATES["glm47"], "'glm45' and 'glm47'"),
        (CHATML_TOOLS + TEMPLATES["minimax_m2"], "'hermes' and 'minimax_m2'"),
    ],
)
def test_it_never_guesses(template: str, reason: str) -> None:
    with pytest.raises(DetectionError, match=reason) as caught:
        detect_tool_parser(template)
    assert "parser='" in str(caught.value)
    with pytest.raises(DetectionError, match=reason):
        get_tool_parser("auto", byte_level(template=template))


@pytest.mark.parametrize(
    ("given", "template"), [("a", "a"), ({"default": "a", "tool_use": "b"}, "b"), ({"default": "a", "rag": "b"}, "a")]
)
def test_the_template_with_tools_is_taken(given: Any, template: str) -> None:
    assert template_text(SimpleNamespace(chat_template=given)) == template  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [None, {}, {"rag": "b"}])
def test_a_tokenizer_without_a_template_shows_nothing(given: Any) -> None:
    with pytest.raises(DetectionError, match="has no chat template") as caught:
        template_text(SimpleNamespace(chat_template=given))  # type: ignore[arg-type]
    assert "parser=" not in str(caught.value), "a policy with a named parser needs a template too"


def test_installed_parsers_are_found_and_ours_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    class Theirs:
        def __init__(self, tokenizer: Any) -> None:
            self.start = tokenizer.encode

    points = [SimpleNamespace(name=name, load=lambda: Theirs) for name in ("theirs", "hermes")]
    groups: list[str] = []

    def entry_points(group: str) -> list[Any]:
        groups.append(group)
        return points

    monkeypatch.setattr("tito_core.entry_points.entry_points", entry_points)
    assert isinstance(get_tool_parser("theirs", tokenizer_of("byte level")), Theirs)
    assert isinstance(get_tool_parser("hermes", tokenizer_of("byte level")), TurnParser)
    assert "theirs" in known_tool_parsers()
    assert set(groups) == {"tito.tool_parsers"}
    with pytest.raises(UnknownParserError, match=r"'missing'.*auto, .*gemma4, .*theirs"):
        get_tool_parser("missing", tokenizer_of("byte level"))


@pytest.mark.parametrize(
    ("alias", "name"), [("qwen_xml", "qwen3_coder"), ("nemotron", "qwen3_coder"), ("nemotron_v3", "qwen3_coder")]
)
def test_aliases(alias: str, name: str) -> None:
    tokenizer = tokenizer_of("byte level")
    assert get_tool_parser(alias, tokenizer).calls is get_tool_parser(name, tokenizer).calls  # type: ignore[attr-defined]


@pytest.mark.parametrize(("engine", "theirs"), [(e, name) for e, names in ENGINE_NAMES.items() for name in names])
def test_each_name_of_an_engine_is_understood_or_the_error_lists_ours(engine: str, theirs: str) -> None:
    ours = ENGINE_NAMES[engine][theirs]
    tokenizer = byte_level(CALL_FAMILIES[ours].control if ours else ())
    if ours:
        one, other = (get_tool_parser(name, tokenizer) for name in (theirs, ours))
        assert type(one) is type(other)
        assert type(getattr(one, "calls", None)) is type(getattr(other, "calls", None))
        assert one.markup.strings == other.markup.strings  # type: ignore[attr-defined]
        return
    with pytest.raises(UnknownParserError, match=rf"{theirs}.*auto, .*hermes, .*xlam") as caught:
        get_tool_parser(theirs, tokenizer)
    assert "qwen25" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "span"),
    [
        ("so", None),
        ('{"arguments": 1}', (1, 13)),
        ("{'arguments': 1}", (1, 13)),
        ("a {'parameters' : 1} b", (3, 17)),
        ("{arguments: 1}", None),
        ("{'it': \"is\"}", None),
    ],
)
def test_a_key_of_a_call_is_suspect_in_either_kind_of_quotes(text: str, span: tuple[int, int] | None) -> None:
    assert SuspectFinder(()).find(text, {}) == (None if span is None else (*span, None))


def test_a_registered_format_has_all_its_names_and_its_reasoning(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine:
        def __init__(self, tokenizer: Any) -> None:
            self.tokenizer = tokenizer

    for names in ("_FACTORIES", "_ALIASES"):
        monkeypatch.setattr(parser_registry, names, dict(getattr(parser_registry, names)))
    calls = get_tool_parser("hermes", byte_level()).calls  # type: ignore[attr-defined]
    register_format("first name", calls, "second", "third")
    register_format("other", calls, reasoning=BRACKET_THINK)
    register_format("silent", calls, reasoning=None)
    register_tool_parser("mine", "ours")(Mine)  # type: ignore[type-var]
    expected = {**dict.fromkeys(("first name", "second", "third"), THINK), "other": BRACKET_THINK, "silent": None}
    assert {*expected, "mine", "ours"} <= set(known_tool_parsers())
    for name, reasoning in expected.items():
        parser = get_tool_parser(name, byte_level())
        assert isinstance(parser, TurnParser)
        assert (parser.calls, parser.reasoning) == (calls, reasoning)
    assert all(isinstance(get_tool_parser(name, byte_level()), Mine) for name in ("mine", "ours"))
