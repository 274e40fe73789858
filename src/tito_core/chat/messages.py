"""Convert Strands messages to template messages, with every string traced to its source message."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, Protocol, TypeAlias, cast

from strands.types.content import ContentBlock, Message, Messages
from strands.types.tools import ToolResult, ToolSpec

from tito_core.chat.traced import Traced
from tito_core.ledger.errors import TITOError

SYSTEM_SOURCE = -2
"""Trace source of the system prompt."""
TOOLS_SOURCE = -3
"""Trace source of the tool specifications."""

MALFORMED_CALL = "tito_malformed_call"
"""Reserved tool name of malformed calls in Strands, so that no tool runs.

The call's input holds the "reason", the "raw" text of the call, and its "name" if that is certain.
"""
_RAW_QUOTED = 200
"""Characters of a malformed call that are quoted in the feedback to the policy."""

Arguments = Literal["mapping", "string"]
TemplateMessage = dict[str, Any]
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Keys of reasoning in template messages: of most templates, of gpt-oss, and of a few others."""
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")


class UnsupportedContentError(TITOError, ValueError):
    """A content block that this provider cannot put into a prompt."""


class ImagePart(dict[str, str]):
    """The part of a template message that stands for an image. The template writes a placeholder for it.

    Attributes:
        image: Strands' `ImageContent`, which the template does not see.
    """

    __slots__ = ("image",)

    def __init__(self, image: Mapping[str, Any]) -> None:
        super().__init__(type="image")
        self.image = image


Piece: TypeAlias = str | ImagePart
"""A text or an image of a message."""


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """The format of the messages that a template family reads.

    Attributes:
        arguments: Whether a call's arguments are a mapping (most families) or JSON text (DeepSeek-V3).
        reasoning: Key of an answer's reasoning, or None if the template shows none.
        text_and_reasoning: Whether a message with calls may have both. In gpt-oss it may not, so only its text is kept.
        parts: Whether content is a list of `{"type": "text"}` parts, as some image models' templates require.
        short_ids: Whether call ids have nine letters or digits, as Mistral's templates require.
        one_call: Whether only the first call of a message is shown, since the template refuses more, as Llama 3's do.
    """

    arguments: Arguments = "mapping"
    reasoning: str | None = REASONING_KEYS[0]
    text_and_reasoning: bool = True
    parts: bool = False
    short_ids: bool = False
    one_call: bool = False

    def call_id(self, sampled: str) -> str:
        """Return a call's id as the template reads it: the sampled one, or a digest if it must be short and is not."""
        if not self.short_ids or _SHORT_ID.fullmatch(sampled):
            return sampled
        return hashlib.sha256(sampled.encode("utf-8", "surrogatepass")).hexdigest()[:9]

    def content(self, text: str) -> Any:
        """Return a message's text as the template reads it."""
        return [{"type": "text", "text": text}] if self.parts else text

    def content_of(self, pieces: Sequence[Piece], source: int, leaves: Leaves) -> Any:
        """Return a message's texts and images as the template reads them. Texts side by side are joined by newlines.

        Content with an image is a list of parts for every template.
        """
        if ImagePart not in map(type, pieces):
            return self.content(leaves.text("\n".join(cast(Sequence[str], pieces)), source))
        parts: list[Any] = []
        for is_text, group in groupby(pieces, lambda piece: isinstance(piece, str)):
            texts = list(group)
            text = "\n".join(cast(list[str], texts)) if is_text else ""
            parts += [{"type": "text", "text": leaves.text(text, source)}] if is_text else texts
        return parts


_DEFAULT = MessageFormat()


class Leaves(Protocol):
    """Makes the strings of template messages that come from Strands messages; `source` is the message's number."""

    def text(self, text: str, source: int, /) -> Any:
        """Return content: of a message, a result, a call's id."""

    def name(self, name: str, source: int, /) -> Any:
        """Return a tool's name."""

    def data(self, value: Any, source: int, /) -> Any:
        """Return a call's arguments."""


def template_messages(
    messages: Messages,
    system_prompt: str | None = None,
    *,
    first: int = 0,
    message_format: MessageFormat = _DEFAULT,
    leaves: Leaves | None = None,
) -> list[TemplateMessage]:
    """Convert a history to template messages.

    Text blocks of a message are joined by newlines, and images keep their places between them. Tool results are sorted
    in the order of their calls, matched by id, and come before the text of the same user message.

    Args:
        messages: Strands messages.
        system_prompt: The system prompt, or None.
        first: The trace source of `messages[0]`; each later message has the next number.
        message_format: The format that the template reads.
        leaves: Makes the strings; by default traced ones.

    Raises:
        UnsupportedContentError: A block (video, document, ...) cannot become text.
    """
    result: list[TemplateMessage] = []
    leaves = TRACED if leaves is None else leaves  # one that collects nothing yet is an empty list
    if system_prompt:
        result.append({"role": "system", "content": message_format.content(leaves.text(system_prompt, SYSTEM_SOURCE))})
    calls: list[Mapping[str, Any]] = []
    for index, message in enumerate(messages):
        source = first + index
        if message["role"] == "assistant":
            calls = [block["toolUse"] for block in message["content"] if "toolUse" in block]
            result.append(_assistant(message, calls, source, message_format, leaves))
        else:
            result += _user(message, calls, source, message_format, leaves)
    return result


def image_blocks(messages: Messages, first: int = 0) -> list[Mapping[str, Any]]:
    """Return the images of `messages[first:]`, Strands' `ImageContent`, in the order in which templates show them.

    The message before them is the answer whose calls order their results.
    """
    if not has_images(messages[first:]):
        return []
    contents: list[Any] = [message["content"] for message in template_messages(messages[max(first - 1, 0) :])]
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return [part.image for part in parts if isinstance(part, ImagePart)]


def has_images(messages: Messages) -> bool:
    """Return whether messages or their tool results show images."""
    for message in messages:
        for block in message["content"]:
            if "image" in block:
                return True
            for item in block["toolResult"]["content"] if "toolResult" in block else ():
                if "image" in item:
                    return True
    return False


def template_tools(tool_specs: Sequence[ToolSpec] | None) -> list[dict[str, Any]] | None:
    """Convert tool specifications to the function schemas that templates read; None if there are none."""
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
    """Return a copy of a JSON-like value with each string, keys included, marked as content of `source`."""
    match value:
        case str():
            return Traced.content(value, source)
        case dict() | Mapping():
            return {trace(key, source): trace(item, source) for key, item in value.items()}
        case list() | tuple():
            return [trace(item, source) for item in value]
    return value


class _TracedLeaves:
    text = name = staticmethod(Traced.content)
    data = staticmethod(trace)


TRACED: Leaves = _TracedLeaves()
"""Makes traced strings."""


def _schema(spec: ToolSpec) -> Any:
    schema = spec["inputSchema"]
    return schema["json"] if isinstance(schema, Mapping) and "json" in schema else schema


def _assistant(
    message: Message,
    calls: Sequence[Mapping[str, Any]],
    source: int,
    message_format: MessageFormat,
    leaves: Leaves,
) -> TemplateMessage:
    content = message_format.content(leaves.text("\n".join(_texts(message["content"])), source))
    translated: TemplateMessage = {"role": "assistant", "content": content}
    reasoning = [
        block["reasoningContent"]["reasoningText"]["text"]
        for block in message["content"]
        if "reasoningText" in block.get("reasoningContent", {})
    ]
    if (
        reasoning
        and message_format.reasoning
        and (message_format.text_and_reasoning or not calls or not translated["content"])
    ):
        translated[message_format.reasoning] = leaves.text("\n".join(reasoning), source)
    if calls:
        translated["tool_calls"] = [
            {
                "id": leaves.text(message_format.call_id(sampled_id(call["toolUseId"])), source),
                "type": "function",
                "function": {
                    "name": leaves.name(_tool_name(call), source),
                    "arguments": _arguments(call, source, message_format, leaves),
                },
            }
            for call in (calls[:1] if message_format.one_call else calls)
        ]
    return translated


def _arguments(call: Mapping[str, Any], source: int, message_format: MessageFormat, leaves: Leaves) -> Any:
    value = call["input"]
    if call["name"] == MALFORMED_CALL and isinstance(value, Mapping):
        value = {"raw": value.get("raw", "")}  # the result gives the reason
    if message_format.arguments == "mapping":
        return leaves.data(value, source)
    return leaves.text(json.dumps(value, ensure_ascii=False), source)


def _user(
    message: Message,
    calls: Sequence[Mapping[str, Any]],
    source: int,
    message_format: MessageFormat,
    leaves: Leaves,
) -> list[TemplateMessage]:
    feedback = _feedback(calls)
    by_id = {call["toolUseId"]: call for call in calls}
    results = [block["toolResult"] for block in message["content"] if "toolResult" in block]
    if len(results) > 1:
        order = {call["toolUseId"]: position for position, call in enumerate(calls)}
        results.sort(key=lambda result: order.get(result["toolUseId"], len(order)))
    translated: list[TemplateMessage] = [
        {
            "role": "tool",
            "tool_call_id": leaves.text(message_format.call_id(sampled_id(result["toolUseId"])), source),
            "name": leaves.name(_tool_name(by_id.get(result["toolUseId"], {"name": ""})), source),
            "content": message_format.content_of(
                _with_feedback(result, feedback.get(result["toolUseId"])), source, leaves
            ),
        }
        for result in results
    ]
    pieces = _pieces(message["content"])
    if pieces or not results:
        translated.append({"role": "user", "content": message_format.content_of(pieces, source, leaves)})
    return translated


def _tool_name(call: Mapping[str, Any]) -> str:
    """Return the name of the called tool, which some templates repeat in the result's header."""
    malformed = call["input"] if call["name"] == MALFORMED_CALL and isinstance(call["input"], Mapping) else {}
    return str(malformed.get("name") or call["name"])


def _feedback(calls: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the feedback to the policy on each malformed call (number, reason, text), by call id."""
    feedback = {}
    for number, call in enumerate(calls, 1):
        if call["name"] != MALFORMED_CALL:
            continue
        malformed = call["input"] if isinstance(call["input"], Mapping) else {}
        label = f"tool call {number} of {len(calls)}" if len(calls) > 1 else "the tool call"
        to = f" to {malformed['name']}" if malformed.get("name") else ""
        raw = str(malformed.get("raw", ""))
        quote = "It said" if len(raw) <= _RAW_QUOTED else "It began"
        parts = [f"Error: {label}{to} was malformed and was not executed.", str(malformed.get("reason", ""))]
        feedback[call["toolUseId"]] = " ".join(filter(None, [*parts, raw and f"{quote}: {raw[:_RAW_QUOTED]}"]))
    return feedback


def _with_feedback(result: ToolResult, feedback: str | None) -> Sequence[Piece]:
    """Return a result's texts and images. For a malformed call, feedback replaces Strands' unknown-tool error."""
    pieces = _result_pieces(result)
    if feedback is None:
        return pieces
    return [feedback, *(piece for piece in pieces if piece and MALFORMED_CALL not in piece)]


def _texts(blocks: Sequence[ContentBlock]) -> list[str]:
    return [str(piece) for piece in _pieces([block for block in blocks if "image" not in block])]


def _pieces(blocks: Sequence[ContentBlock]) -> list[Piece]:
    pieces: list[Piece] = []
    for block in blocks:
        if "text" in block:
            pieces.append(block["text"])
        elif "image" in block:
            pieces.append(ImagePart(block["image"]))
        elif not {"toolUse", "toolResult", "reasoningContent", "cachePoint"} & set(block):
            raise UnsupportedContentError(
                f"A message holds a {next(iter(block), 'empty')!r} block, which this provider cannot turn into tokens. "
                "Send text, images, tool calls, tool results or reasoning."
            )
    return pieces


def _result_pieces(result: ToolResult) -> list[Piece]:
    pieces: list[Piece] = []
    for item in result["content"]:
        if "image" in item:
            pieces.append(ImagePart(item["image"]))
            continue
        try:
            pieces.append(item["text"] if "text" in item else json.dumps(item["json"], ensure_ascii=False))
        except (KeyError, TypeError, ValueError) as error:  # not a JSON block, or not JSON
            raise UnsupportedContentError(
                f"Tool result {result['toolUseId']!r} holds a {next(iter(item), 'empty')!r} block, which this provider "
                f"cannot turn into tokens ({error}). Return text, JSON or images from the tool."
            ) from error
    return pieces


_UNIQUE_ID = re.compile(r"call_[0-9a-f]{8}_[0-9]+\.(.+)", re.DOTALL)


def with_sampled_id(call_id: str, sampled: str | None) -> str:
    """Return the `toolUseId` of a call: our unique id, with the policy's sampled id if there is one."""
    return f"{call_id}.{sampled}" if sampled else call_id


def sampled_id(tool_use_id: str) -> str:
    """Return the id that the template renders: the policy's sampled id if there is one, else the whole `toolUseId`."""
    match = _UNIQUE_ID.fullmatch(tool_use_id)
    return match[1] if match else tool_use_id
