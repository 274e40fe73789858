"""Calls rendered by a family's own chat template parse back to the same calls, and "auto" detects the template."""

from __future__ import annotations

from typing import Any

import pytest

from parsing.families import CALL_FAMILIES, Call, Family, ids_of, parse, schema_of
from support import corpora
from support.byte_level import byte_level
from tito_core.parsing import CallStatus, DetectionError, detect_tool_parser

TEMPLATES = {
    "hub/ByteDance-Seed-OSS": "seed_oss",
    "hub/XiaomiMiMo-MiMo-V2-Flash": "mimo",
    "hub/StepFun3.5-Flash": "qwen3_coder",
    "hub/stepfun-ai-Step-3.7-Flash": "qwen3_coder",
    "hub/meituan-longcat-LongCat-Flash-Chat": "longcat",
    "hub/meituan-longcat-LongCat-2.0": "longcat2",
    "hub/LiquidAI-LFM2.5-8B-A1B-Base": "lfm2",
    "hub/allenai-Olmo-3-7B-Instruct": "olmo3",
    "hub/allenai-Olmo-3.1-32B-Instruct": "olmo3",
    "hub/CohereLabs-command-a-plus-05-2026-w4a4": "cohere_command",
    "hub/CohereForAI-c4ai-command-r7b-12-2024-tool_use": "cohere_command",
    "hub/MiniMaxAI-MiniMax-M3-MXFP8": "minimax_m3",
    "hub/ibm-granite-granite-4.0": "hermes",
    "hub/inclusionAI-Ling-2.6-flash": "hermes",
    "hub/unsloth-functiongemma-270m-it": "functiongemma",
    "vllm/tool_chat_template_hunyuan_a13b": "hunyuan_a13b",
}
DETECTED_ONLY = {
    "hub/stepfun-ai-step3": "step3",
    "vllm/tool_chat_template_granite": "granite",
    "vllm/tool_chat_template_phi4_mini": "phi4_mini",
    "vllm/tool_chat_template_xlam_qwen": "xlam",
    "vllm/tool_chat_template_xlam_llama": "xlam",
    "vllm/tool_chat_template_llama3.2_pythonic": "pythonic",
    "vllm/tool_chat_template_toolace": "pythonic",
    "hub/typhoon-ai-typhoon2.1-gemma3-4b": "pythonic",
    "hub/ibm-granite-granite-3.3-2B-Instruct": "granite",
}
"""Step 3's renders a misspelt tag, so its calls do not parse; the others take calls as text, or have no tags."""
OTHERS = ("hub/openbmb-MiniCPM3-4B", "hub/ServiceNow-AI-Apriel-1.6-15b-Thinker", "vllm/tool_chat_template_minimax_m1")
"""Templates with the tags of a family but another notation."""
CALLS: tuple[list[Call], ...] = (
    [("look", {"at": "x", "far": 5, "sure": True, "half": 0.5})],
    [("look", {})],
    [("look", {"at": 'two\nlines, "quoted" é漢 <b>'}), ("count", {"of": "b", "far": -1})],
    [("count", {"all": ["p", "q"], "deep": {"of": "x"}, "none": None})],
)


@pytest.mark.parametrize(("source", "name"), [*TEMPLATES.items(), *DETECTED_ONLY.items()])
def test_auto_detects_the_template(source: str, name: str) -> None:
    assert detect_tool_parser(corpora.template(source)).name == name


@pytest.mark.parametrize("source", OTHERS)
def test_auto_does_not_mistake_other_templates(source: str) -> None:
    with pytest.raises(DetectionError):
        detect_tool_parser(corpora.template(source))


@pytest.mark.parametrize("calls", CALLS, ids=["scalars", "none", "text", "nested"])
@pytest.mark.parametrize(("source", "name"), TEMPLATES.items())
def test_what_the_template_renders_parses_back(source: str, name: str, calls: list[Call]) -> None:
    family = CALL_FAMILIES[name]
    if name == "minimax_m3":  # its template leaves null out
        calls = [(tool, {k: v for k, v in given.items() if v is not None}) for tool, given in calls]
    if name in ("lfm2", "olmo3"):
        calls = [(tool, {k: v for k, v in given.items() if "\n" not in str(v)}) for tool, given in calls]
    completion = rendered(family, corpora.template(source), calls)
    turn = parse(family, ids_of(family, completion), tools={tool: deep_schema(given) for tool, given in calls})
    assert [(c.status, c.name, c.arguments) for c in turn.calls] == [(CallStatus.OK, *call) for call in calls]


def rendered(family: Family, template: str, calls: list[Call]) -> str:
    """Return an assistant's message as the template renders it, up to the end of its calls."""
    tokenizer = byte_level((), template)
    tool_calls = [
        {"type": "function", "id": str(i), "function": {"name": tool, "arguments": given}}
        for i, (tool, given) in enumerate(calls)
    ]
    tools = [
        {"type": "function", "function": {"name": tool, "description": "", "parameters": schema_of(given)}}
        for tool, given in calls
    ]
    user = {"role": "user", "content": "Go."}
    message = {"role": "assistant", "content": "", "tool_calls": tool_calls, "reasoning_content": "Hm."}
    options: dict[str, Any] = {"tools": tools, "tokenize": False}
    prompt = tokenizer.apply_chat_template([user], **options)
    whole = tokenizer.apply_chat_template([user, message], **options)
    begun = next((i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
    opening, closing = first_and_last(family, calls)
    start, stop = whole.index(opening, begun), whole.rindex(closing) + len(closing)
    return str(whole[start:stop])


def first_and_last(family: Family, calls: list[Call]) -> tuple[str, str]:
    by_hand = family.render(calls)
    opening = next(tag for tag in sorted(family.control, key=len, reverse=True) if by_hand.startswith(tag))
    return opening, by_hand[max(by_hand.rindex("<"), by_hand.rindex("[<") if "[<" in by_hand else 0) :]


def deep_schema(value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return {"type": "object", "properties": {key: deep_schema(inner) for key, inner in value.items()}}
    if isinstance(value, list):
        return {"type": "array", "items": deep_schema(value[0]) if value else {}}
    return {"type": schema_of({"it": value})["properties"]["it"]["type"]}
