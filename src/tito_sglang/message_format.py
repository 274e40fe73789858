"""Messages in the form of Hugging Face chat templates, by the names that strands-sglang has. Turns do not use them."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from strands.types.content import ContentBlock, Message, Messages
from strands.types.tools import ToolResultContent

from tito_core.chat.messages import UnsupportedContentError, template_messages

Part = dict[str, Any]


class UnsupportedBlockError(UnsupportedContentError, KeyError):
    """A block that cannot be formatted; also the `KeyError` of strands-sglang."""

    __str__ = Exception.__str__  # a KeyError's is in quotes


def format_content_block(block: ContentBlock | ToolResultContent, is_multimodal: bool = False) -> Part | str:
    """Return a text, JSON or image block as a part of a template's content, or as text if not `is_multimodal`.

    Raises:
        UnsupportedBlockError: Another block; or an image, if not `is_multimodal`.
    """
    content: Mapping[str, Any] = block
    if "text" in content or "json" in content:
        text = content["text"] if "text" in content else json.dumps(content["json"])
        return {"type": "text", "text": text} if is_multimodal else str(text)
    if "image" in content and is_multimodal:
        data = base64.b64encode(content["image"]["source"]["bytes"]).decode("ascii")
        return {"type": "image", "image": f"data:image/{content['image']['format']};base64,{data}"}
    raise UnsupportedBlockError(
        f"A {next(iter(content), 'empty')!r} block cannot be formatted with is_multimodal={is_multimodal}. Use text "
        "and JSON blocks, and image blocks with is_multimodal=True."
    )


def format_messages(
    messages: Messages, system_prompt: str | None = None, is_multimodal: bool = False
) -> list[dict[str, Any]]:
    """Return a history as chat templates read it; each tool result is a message of the role "tool".

    Args:
        messages: Strands messages.
        system_prompt: The system prompt, or None.
        is_multimodal: Whether contents are lists of parts, which may be images, and not text.

    Raises:
        UnsupportedContentError: A block cannot be formatted.
    """
    if not is_multimodal:
        return [dict(message) for message in template_messages(messages, system_prompt)]
    formatted = [each for message in messages for each in _multimodal(message)]
    if not system_prompt:
        return formatted
    return [{"role": "system", "content": [format_content_block({"text": system_prompt}, True)]}, *formatted]


def sort_tool_results(messages: Messages) -> Messages:
    """Return messages in which the tool results of a message are sorted by the numbers in their ids."""
    return [
        {**message, "content": sorted(message["content"], key=_number)} if _has_results(message) else message
        for message in messages
    ]


def collect_image_data(messages: Messages, is_multimodal: bool = False) -> list[str]:
    """Return the images of a history as data URLs, in order; none if not `is_multimodal`."""
    if not is_multimodal:
        return []
    parts = (part for message in format_messages(messages, is_multimodal=True) for part in message["content"])
    return [part["image"] for part in parts if part["type"] == "image"]


def _multimodal(message: Message) -> Iterator[dict[str, Any]]:
    if message["role"] == "assistant":
        (formatted,) = map(dict, template_messages([message]))
        text: Any = formatted["content"]
        yield {**formatted, "content": [format_content_block({"text": text}, True)] if text else []}
        return
    results = [block["toolResult"] for block in message["content"] if "toolResult" in block]
    for result in results:
        parts = [format_content_block(each, True) for each in result["content"]]
        yield {"role": "tool", "tool_call_id": result["toolUseId"], "content": parts}
    if rest := [block for block in message["content"] if "toolResult" not in block]:
        yield {"role": message["role"], "content": [format_content_block(each, True) for each in rest]}


def _has_results(message: Message) -> bool:
    return bool(message["content"]) and all("toolResult" in block for block in message["content"])


def _number(block: ContentBlock) -> list[tuple[int, str]]:
    """Return a key that sorts "call_10" after "call_2"."""
    parts = re.split(r"(\d+)", block["toolResult"]["toolUseId"])
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]
