"""transformers' `parse_response` reads the same calls as our parsers, with TRL's response templates.

It repairs nothing and refuses nothing, so it is compared on well-formed turns, and strips blanks around XML values.
"""

from __future__ import annotations

import ast
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from parsing.families import CALL_FAMILIES, ids_of, parse
from support.zoo import TRL
from tito_core.parsing import CallStatus
from tito_engines.models.fetch import Package

SHA256 = "839f3724a499081816f0b6fd25ce3a262675f18c47acb2019461fea349d2e257"
MODULE = Package(TRL.registry, TRL.name, TRL.version, TRL.sha256, TRL.size, {"trl/chat_template_utils.py": SHA256})
FAMILIES = {
    "qwen3_template": "hermes",
    "qwen3_5_template": "qwen3_coder",
    "nemotron_3_template": "qwen3_coder",
    "glm4moe_template": "glm45",
    "llama3_template": "llama3_json",
    "lfm2_2_5_template": "lfm2",
    "gemma4_template": "gemma4",
}
words = st.from_regex(r"[a-z]{1,4}( [a-z]{1,4})?", fullmatch=True)
values = st.one_of(words, st.integers(-99, 99), st.booleans(), st.sampled_from([0.5, -1.25]))
calls = st.tuples(
    st.sampled_from(["look", "count"]), st.dictionaries(st.sampled_from(["at", "of", "b"]), values, min_size=1)
)


@cache
def response_templates() -> dict[str, Any]:
    """Return the values of TRL's module that make its response templates; it is not imported, since it needs torch."""
    source = (MODULE.fetch(print) / "chat_template_utils.py").read_text(encoding="utf-8")
    found: dict[str, Any] = {"_SUPPORTS_PARSE_RESPONSE_TOOLS": True}
    for node in ast.parse(source).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        name = target.id if isinstance(target, ast.Name) else ""
        if name in FAMILIES or name.startswith(("_XML_INLINE", "_LFM2")) or isinstance(node, ast.For):
            exec(compile(ast.Module([node], []), "trl", "exec"), found)
    return found


@pytest.mark.parametrize(("template", "name"), FAMILIES.items())
def test_calls_are_those_that_transformers_reads(template: str, name: str) -> None:
    family, spec = CALL_FAMILIES[name], response_templates()[template]
    single = family.single_call or name == "llama3_json"  # TRL's template of Llama 3 has one call
    tokenizer: PreTrainedTokenizerBase = family.tokenizer(True)

    @settings(deadline=None, max_examples=60)
    @given(st.lists(calls, min_size=1, max_size=1 if single else 3))
    def holds(drawn: Any) -> None:
        text = family.render(drawn)
        schemas = {tool: schema_of_all(drawn, tool) for tool, _ in drawn}
        tools = [
            {"type": "function", "function": {"name": tool, "description": "", "parameters": schema}}
            for tool, schema in schemas.items()
        ]
        prefix = spec.get("start_anchor", "<|turn>model\n")
        message: Any = tokenizer.parse_response(
            text + ("<|eot_id|>" if single else ""), spec, prefix=prefix, tools=tools
        )
        theirs = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
        turn = parse(family, ids_of(family, text), tools=schemas)
        assert [(call.name, call.arguments) for call in turn.calls if call.status == CallStatus.OK] == theirs == drawn

    holds()


def schema_of_all(drawn: Any, tool: str) -> dict[str, Any]:
    """Return a schema that allows exactly the kinds of values that a tool was called with."""
    kinds: dict[str, set[str]] = {}
    names = {bool: "boolean", int: "integer", float: "number", str: "string"}
    for name, arguments in drawn:
        for key, value in arguments.items() if name == tool else ():
            kinds.setdefault(key, set()).add(names[type(value)])
    return {"type": "object", "properties": {key: {"type": sorted(found)} for key, found in kinds.items()}}
