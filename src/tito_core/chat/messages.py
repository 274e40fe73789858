"""Strands messages -> the messages that chat templates read, with every string traced to its origin."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from strands.types.content import ContentBlock, Message, Messages
from strands.types.tools import ToolResult, ToolSpec

from tito_core.chat.traced import Traced, join

SYSTEM_SOURCE = -2
"""Trace source of the system prompt."""
TOOLS_SOURCE = -3
"""Trace source of the tool specifications."""

MALFORMED_CALL = "tito_malformed_call"
"""Reserved tool name under which a malformed call reaches Strands, so that no tool runs.

Its input holds the "reason", the "raw" text of the call, and its "name" where that is certain.
"""
_RAW_SHOWN = 200
"""Characters of a malformed call that the policy reads again."""

Arguments = Literal["mapping", "string"]
TemplateMessage = dict[str, Any]
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Under which key templates read reasoning: most, gpt-oss, and some that take either."""
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")


class UnsupportedContentError(ValueError):
    """A content block that this provider cannot put into a prompt."""


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """How Strands content is written into template messages.

    Attributes:
        arguments: Whether a call's arguments are a mapping (most families) or its JSON (DeepSeek-V3).
        reasoning: Key of an answer's reasoning, or None where the template shows none.
        both: Whether calls may have text and reasoning beside them (not in gpt-oss, where the text then goes alone).
        parts: Whether content is a list of `{"type": "text"}` parts, which some image models' templates demand.
        short_ids: Whether call ids are nine letters or digits, which Mistral's templates demand.
    """

    arguments: Arguments = "mapping"
    reasoning: str | None = REASONING_KEYS[0]
    both: bool = True
    parts: bool = False
    short_ids: bool = False

    def call_id(self, sampled: str) -> str:
        """Return a call's id as the template reads it: the policy's own, or a digest where it has no such form."""
        if not self.short_ids or _SHORT_ID.fullmatch(sampled):
            return sampled
        return hashlib.sha256(sampled.encode("utf-8", "surrogatepass")).hexdigest()[:9]

    def content(self, text: str) -> Any:
        """Return a message's text as the template reads it."""
        return [{"type": "text", "text": text}] if self.parts else text


_USUAL = MessageFormat()


def template_messages(
    messages: Messages, system_prompt: str | None = None, *, first: int = 0, message_format: MessageFormat = _USUAL
) -> list[TemplateMessage]:
    """Translate a history.

    Several text blocks are joined by a newline, in order. Tool results come in the order of the calls they answer,
    matched by id, before any text of the same user message.

    Args:
        messages: Strands messages.
        system_prompt: The system prompt, or None.
        first: The trace source of `messages[0]`; the others count up from it.
        message_format: What the template's family reads.

    Raises:
        UnsupportedContentError: A block (image, document, ...) that is not text, a call or a result.
    """
    result: list[TemplateMessage] = []
    if system_prompt:
        result.append(
            {"role": "system", "content": message_format.content(Traced.content(system_prompt, SYSTEM_SOURCE))}
        )
    calls: list[Mapping[str, Any]] = []
    for index, message in enumerate(messages):
        source = first + index
        if message["role"] == "assistant":
            calls = [block["toolUse"] for block in message["content"] if "toolUse" in block]
            result.append(_assistant(message, calls, source, message_format))
        else:
            result += _user(message, calls, source, message_format)
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


def _assistant(
    message: Message, calls: Sequence[Mapping[str, Any]], source: int, message_format: MessageFormat
) -> TemplateMessage:
    content = message_format.content(_joined(_texts(message["content"]), source))
    translated: TemplateMessage = {"role": "assistant", "content": content}
    reasoning = [
        block["reasoningContent"]["reasoningText"]["text"]
        for block in message["content"]
        if "reasoningText" in block.get("reasoningContent", {})
    ]
    if reasoning and message_format.reasoning and (message_format.both or not calls or not translated["content"]):
        translated[message_format.reasoning] = _joined(reasoning, source)
    if calls:
        translated["tool_calls"] = [
            {
                "id": trace(message_format.call_id(sampled_id(call["toolUseId"])), source),
                "type": "function",
                "function": {
                    "name": trace(_called(call), source),
                    "arguments": _arguments(call, source, message_format),
                },
            }
            for call in calls
        ]
    return translated


def _arguments(call: Mapping[str, Any], source: int, message_format: MessageFormat) -> Any:
    given = call["input"]
    if call["name"] == MALFORMED_CALL and isinstance(given, Mapping):
        given = {"raw": given.get("raw", "")}  # what was wrong with it stands in the result
    return trace(given if message_format.arguments == "mapping" else json.dumps(given, ensure_ascii=False), source)


def _user(
    message: Message, calls: Sequence[Mapping[str, Any]], source: int, message_format: MessageFormat
) -> list[TemplateMessage]:
    order = {call["toolUseId"]: position for position, call in enumerate(calls)}
    feedback = _feedback(calls)
    by_id = {call["toolUseId"]: call for call in calls}
    results = [block["toolResult"] for block in message["content"] if "toolResult" in block]
    results.sort(key=lambda result: order.get(result["toolUseId"], len(order)))
    translated: list[TemplateMessage] = [
        {
            "role": "tool",
            "tool_call_id": trace(message_format.call_id(sampled_id(result["toolUseId"])), source),
            "name": trace(_called(by_id.get(result["toolUseId"], {"name": ""})), source),
            "content": message_format.content(_joined(_shown(result, feedback.get(result["toolUseId"])), source)),
        }
        for result in results
    ]
    texts = _texts(message["content"])
    if texts or not results:
        translated.append({"role": "user", "content": message_format.content(_joined(texts, source))})
    return translated


def _called(call: Mapping[str, Any]) -> str:
    """Return the name of the tool that the policy called: some templates write it into the result's header."""
    said = call["input"] if call["name"] == MALFORMED_CALL and isinstance(call["input"], Mapping) else {}
    return str(said.get("name") or call["name"])


def _feedback(calls: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return what the policy reads of each malformed call, by the call's id: which it was, what was wrong, its text."""
    feedback = {}
    for number, call in enumerate(calls, 1):
        if call["name"] != MALFORMED_CALL:
            continue
        said = call["input"] if isinstance(call["input"], Mapping) else {}
        which = f"tool call {number} of {len(calls)}" if len(calls) > 1 else "the tool call"
        to = f" to {said['name']}" if said.get("name") else ""
        raw = str(said.get("raw", ""))
        began = "It said" if len(raw) <= _RAW_SHOWN else "It began"
        parts = [f"Error: {which}{to} was malformed and was not executed.", str(said.get("reason", ""))]
        feedback[call["toolUseId"]] = " ".join(filter(None, [*parts, raw and f"{began}: {raw[:_RAW_SHOWN]}"]))
    return feedback


def _shown(result: ToolResult, feedback: str | None) -> list[str]:
    """Return a result's texts. Strands knows no tool for a malformed call; what a hook wrote beside that stays."""
    texts = _result_texts(result)
    if feedback is None:
        return texts
    return [feedback, *(text for text in texts if text and MALFORMED_CALL not in text)]


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
    if len(texts) == 1 and texts[0]:
        return Traced.content(texts[0], source)
    return join(Traced.content("\n", source), [Traced.content(text, source) for text in texts])


_OURS = re.compile(r"call_[0-9a-f]{8}_[0-9]+\.(.+)", re.DOTALL)


def with_sampled_id(call_id: str, sampled: str | None) -> str:
    """Return the `toolUseId` for a call of ours that the policy gave an id, or none."""
    return f"{call_id}.{sampled}" if sampled else call_id


def sampled_id(tool_use_id: str) -> str:
    """Return the id that a template is to write: the policy's own where it wrote one, else all of it."""
    ours = _OURS.fullmatch(tool_use_id)
    return ours[1] if ours else tool_use_id
