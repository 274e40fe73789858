"""Strands messages -> the messages that chat templates read, with every string traced to its origin."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from strands.types.content import ContentBlock, Message, Messages
from strands.types.tools import ToolResult, ToolSpec

from tito_core.chat.form import Form, TemplateMessage
from tito_core.chat.traced import Traced, join

SYSTEM_SOURCE = -2
"""Trace source of the system prompt."""
TOOLS_SOURCE = -3
"""Trace source of the tool specifications."""

MALFORMED_CALL = "tito_malformed_call"
"""Reserved tool name under which a malformed call reaches Strands, so that no tool runs. Its input holds the reason."""

_USUAL = Form()


class UnsupportedContentError(ValueError):
    """A content block that this provider cannot put into a prompt."""


def template_messages(
    messages: Messages, system_prompt: str | None = None, *, first: int = 0, form: Form = _USUAL
) -> list[TemplateMessage]:
    """Translate a history.

    Several text blocks are joined by a newline, in order. Tool results come in the order of the calls they answer,
    matched by id, before any text of the same user message.

    Args:
        messages: Strands messages.
        system_prompt: The system prompt, or None.
        first: The trace source of `messages[0]`; the others count up from it.
        form: What the template's family reads.

    Raises:
        UnsupportedContentError: A block (image, document, ...) that is not text, a call or a result.
    """
    result: list[TemplateMessage] = []
    if system_prompt:
        result.append({"role": "system", "content": form.content(Traced.content(system_prompt, SYSTEM_SOURCE))})
    calls: list[Mapping[str, Any]] = []
    for index, message in enumerate(messages):
        source = first + index
        if message["role"] == "assistant":
            calls = [block["toolUse"] for block in message["content"] if "toolUse" in block]
            result.append(_assistant(message, calls, source, form))
        else:
            result += _user(message, calls, source, form)
    return result


def template_tools(tool_specs: Sequence[ToolSpec] | None) -> list[dict[str, Any]] | None:
    """Translate tool specifications to the JSON-schema function form that templates read; None when empty."""
    if not tool_specs:
        return None
    return [
        {
            "type": "function",
            "function": {
                "name": trace(spec["name"], TOOLS_SOURCE),
                "description": trace(spec.get("description", ""), TOOLS_SOURCE),
                "parameters": trace(_schema(spec), TOOLS_SOURCE),
            },
        }
        for spec in tool_specs
    ]


def trace(value: Any, source: int) -> Any:
    """Copy a JSON-like value with every string in it, keys too, marked as content of `source`.

    Numbers, booleans and null stay as they are: they spell no markup.
    """
    if isinstance(value, str):
        return Traced.content(value, source)
    if isinstance(value, Mapping):
        return {trace(key, source): trace(item, source) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [trace(item, source) for item in value]
    return value


def _schema(spec: ToolSpec) -> Any:
    schema = spec["inputSchema"]
    return schema["json"] if isinstance(schema, Mapping) and "json" in schema else schema


def _assistant(message: Message, calls: Sequence[Mapping[str, Any]], source: int, form: Form) -> TemplateMessage:
    content = form.content(_joined(_texts(message["content"]), source))
    translated: TemplateMessage = {"role": "assistant", "content": content}
    reasoning = [
        block["reasoningContent"]["reasoningText"]["text"]
        for block in message["content"]
        if "reasoningText" in block.get("reasoningContent", {})
    ]
    if reasoning and form.reasoning and (form.both or not calls or not translated["content"]):
        translated[form.reasoning] = _joined(reasoning, source)
    if calls:
        translated["tool_calls"] = [
            {
                "id": trace(call["toolUseId"], source),
                "type": "function",
                "function": {"name": trace(call["name"], source), "arguments": _arguments(call, source, form)},
            }
            for call in calls
        ]
    return translated


def _arguments(call: Mapping[str, Any], source: int, form: Form) -> Any:
    given = call["input"]
    return trace(given if form.arguments == "mapping" else json.dumps(given, ensure_ascii=False), source)


def _user(message: Message, calls: Sequence[Mapping[str, Any]], source: int, form: Form) -> list[TemplateMessage]:
    order = {call["toolUseId"]: position for position, call in enumerate(calls)}
    by_id = {call["toolUseId"]: call for call in calls}
    results = [block["toolResult"] for block in message["content"] if "toolResult" in block]
    results.sort(key=lambda result: order.get(result["toolUseId"], len(order)))
    translated: list[TemplateMessage] = [
        {
            "role": "tool",
            "tool_call_id": trace(result["toolUseId"], source),
            "name": trace(by_id.get(result["toolUseId"], {}).get("name", ""), source),
            "content": form.content(
                _joined(_feedback(by_id.get(result["toolUseId"])) or _result_texts(result), source)
            ),
        }
        for result in results
    ]
    texts = _texts(message["content"])
    if texts or not results:
        translated.append({"role": "user", "content": form.content(_joined(texts, source))})
    return translated


def _feedback(call: Mapping[str, Any] | None) -> list[str]:
    """Give what the policy reads of its malformed call, instead of Strands' "Unknown tool"."""
    if call is None or call["name"] != MALFORMED_CALL:
        return []
    reason = call["input"].get("reason", "") if isinstance(call["input"], Mapping) else ""
    return [f"Error: the tool call was malformed and was not executed. {reason}".rstrip()]


def _texts(blocks: Sequence[ContentBlock]) -> list[str]:
    texts = []
    for block in blocks:
        if "text" in block:
            texts.append(block["text"])
        elif not {"toolUse", "toolResult", "reasoningContent", "cachePoint"} & set(block):
            raise UnsupportedContentError(
                f"A message holds a {next(iter(block), 'empty')!r} block, which this provider cannot turn into tokens: "
                "send text, tool calls, tool results or reasoning."
            )
    return texts


def _result_texts(result: ToolResult) -> list[str]:
    texts = []
    for item in result["content"]:
        try:
            texts.append(item["text"] if "text" in item else json.dumps(item["json"], ensure_ascii=False))
        except (KeyError, TypeError, ValueError) as error:  # no JSON block, or one that holds what JSON cannot
            raise UnsupportedContentError(
                f"Tool result {result['toolUseId']!r} holds a {next(iter(item), 'empty')!r} block, which this provider "
                f"cannot turn into tokens ({error}): return text or JSON from the tool."
            ) from error
    return texts


def _joined(texts: Sequence[str], source: int) -> str:
    """Join blocks by newlines, each traced; the newline counts as content, being no text of the template."""
    return join(Traced.content("\n", source), [Traced.content(text, source) for text in texts])
