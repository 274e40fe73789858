"""Validate Strands messages and tool specifications; errors name the place and the value."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from strands.types.content import ContentBlock
from strands.types.tools import ToolResultContent

from tito_core.chat.messages import UnsupportedContentError
from tito_core.ledger.errors import TITOError

DEEPEST = 100
"""Deepest nesting of lists and mappings in a tool's arguments; the parsers' limit for sampled calls is the same."""
_SUPPORTED = frozenset({"text", "image", "toolUse", "toolResult", "reasoningContent", "cachePoint"})
"""Keys of the supported content blocks."""
_KINDS = _SUPPORTED | ContentBlock.__annotations__.keys()
_RESULT_KINDS = ToolResultContent.__annotations__.keys() | {"video"}
"""Keys of the content of tool results that Strands' models know; an item has one of them."""
_MAX_REPR = 60
"""Characters of a wrong value that an error shows."""


class InvalidMessageError(TITOError, ValueError):
    """A message, system prompt or tool specification does not have the form that Strands defines."""


def check_messages(messages: Any, first: int = 0) -> int:
    """Check messages and count their characters.

    Args:
        messages: The messages.
        first: Index of the first message in the history, for error messages.

    Returns:
        The number of characters in them.

    Raises:
        InvalidMessageError: A message does not have Strands' form.
        UnsupportedContentError: A message holds a block that cannot become tokens, such as a video.
    """
    if not isinstance(messages, list | tuple):
        raise InvalidMessageError(
            f"messages is {describe(messages)}: give a list, such as "
            "[{'role': 'user', 'content': [{'text': 'Hi'}]}]."
        )
    count = 0
    for index, message in enumerate(messages, first):
        characters = _count_simple(message)
        count += _message(message, f"messages[{index}]") if characters is None else characters
    return count


def check_system_blocks(content: Any) -> None:
    """Check a system prompt given as blocks.

    Raises:
        InvalidMessageError: The prompt is not a list of blocks, or a text is not a string.
    """
    if not isinstance(content, list | tuple):
        raise InvalidMessageError(
            f"system_prompt_content is {describe(content)}: give a list, such as [{{'text': '...'}}]."
        )
    for i, block in enumerate(content):
        where = f"system_prompt_content[{i}]"
        if not isinstance(block, dict):
            raise InvalidMessageError(f"{where} is {describe(block)}: a block is a dict, such as {{'text': '...'}}.")
        if "text" in block:
            _text(block["text"], f"{where}['text']")


def check_opening(messages: Any, system_prompt: Any, tool_specs: Any) -> None:
    """Check that messages are a list, and check the system prompt and the tool specifications.

    Raises:
        InvalidMessageError: `messages` is not a list, the system prompt is not a string, or a tool specification does
            not have Strands' form.
    """
    if not isinstance(messages, list | tuple):
        check_messages(messages)
    if system_prompt is not None and not isinstance(system_prompt, str):
        raise InvalidMessageError(f"system_prompt is {describe(system_prompt)}: give a string, or None.")
    if tool_specs is not None and not isinstance(tool_specs, list | tuple):
        raise InvalidMessageError(f"tool_specs is {describe(tool_specs)}: give a list of tool specifications, or None.")
    for i, spec in enumerate(tool_specs or ()):
        where = f"tool_specs[{i}]"
        if not isinstance(spec, dict) or not isinstance(spec.get("name"), str) or not spec["name"]:
            raise InvalidMessageError(
                f"{where} is {describe(spec)}: a tool specification is a dict with 'name', 'description' and "
                "'inputSchema', and its name is a non-empty string."
            )
        schema = spec.get("inputSchema")
        if not isinstance(schema, dict) or not isinstance(schema.get("json"), dict):
            raise InvalidMessageError(
                f"{where}['inputSchema'] of tool {spec['name']!r} is {describe(schema)}: give "
                "{'json': {'type': 'object', ...}}, with the JSON Schema of its arguments."
            )
        if not isinstance(spec.get("description", ""), str):
            raise InvalidMessageError(
                f"{where}['description'] of tool {spec['name']!r} is {describe(spec['description'])}: give a string."
            )


def check_bounds(value: Any, where: str) -> None:
    """Check that a value of any form can be written and compared.

    Raises:
        InvalidMessageError: It nests more than 100 levels deep, or an integer has more digits than Python writes.
    """
    if fault := _bound_fault(value, where):
        raise InvalidMessageError(f"The value cannot be stored: {fault}.")


def check_schemas(tool_specs: Sequence[Mapping[str, Any]] | None) -> None:
    """Check that tool schemas are JSON, and that what else a specification has can be written and compared.

    Raises:
        InvalidMessageError: A schema is not JSON, or another part fails `check_bounds`; the message names the place.
    """
    for i, spec in enumerate(tool_specs or ()):
        where = f"tool_specs[{i}]"
        if fault := _fault_of(spec["inputSchema"]["json"], f"{where}['inputSchema']['json']", DEEPEST):
            raise InvalidMessageError(f"The schema of tool {spec['name']!r} is not JSON: {fault}.")
        if fault := _bound_fault({**spec, "inputSchema": {**spec["inputSchema"], "json": None}}, where):
            raise InvalidMessageError(f"Tool {spec['name']!r} cannot be stored: {fault}.")


def _count_simple(message: Any) -> int | None:
    """Fast path: count the characters of a valid user message of texts and text results; None for others."""
    if type(message) is not dict or message.get("role") != "user" or type(message.get("content")) is not list:
        return None
    count = 0
    for block in message["content"]:
        texts = [block]
        if type(block) is dict and len(block) == 1 and type(block.get("toolResult")) is dict:
            result = block["toolResult"]
            texts = result.get("content")
            if type(texts) is not list or type(result.get("toolUseId")) is not str:
                return None
        for item in texts:
            if type(item) is not dict or len(item) != 1 or type(text := item.get("text")) is not str:
                return None
            count += len(text)
    return count


def _message(message: Any, where: str) -> int:
    if not isinstance(message, dict):
        raise InvalidMessageError(f"{where} is {describe(message)}: a message is a dict with 'role' and 'content'.")
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        hint = " Give a system prompt as system_prompt." if role == "system" else ""
        has = f"has the role {describe(role)}" if "role" in message else "has no role"
        raise InvalidMessageError(f"{where} {has}: the role is 'user' or 'assistant'.{hint}")
    if not isinstance(content, list | tuple):
        has = f"{where}['content'] is {describe(content)}" if "content" in message else f"{where} has no content"
        raise InvalidMessageError(f"{has}: content is a list of blocks, such as [{{'text': 'Hi'}}].")
    return sum([_block(block, role, f"{where}['content'][{i}]") for i, block in enumerate(content)])


def _block(block: Any, role: str, where: str) -> int:
    kind = _kind(block, where)
    value = block[kind]
    if kind == "text":
        return _text(value, f"{where}['text']")
    if kind == "cachePoint":
        return 0
    if kind not in _SUPPORTED:
        raise UnsupportedContentError(unsupported(f"a block of kind {kind!r}", role, where))
    if not isinstance(value, dict):
        raise InvalidMessageError(f"{where}[{kind!r}] is {describe(value)}: give a dict.")
    if kind == "image":
        if role == "assistant":
            raise UnsupportedContentError(unsupported("an image", role, where))
        return _image(value, f"{where}['image']")
    if kind == "reasoningContent":
        return _reasoning(value, f"{where}['reasoningContent']")
    if (kind == "toolUse") != (role == "assistant"):
        expected = "an assistant message" if kind == "toolUse" else "a user message"
        raise InvalidMessageError(
            f"{where} is a {kind!r} block in a message with the role {role!r}: put it in {expected}."
        )
    inside = f"{where}[{kind!r}]"
    _text(value.get("toolUseId"), f"{inside}['toolUseId']")
    return _call(value, inside) if kind == "toolUse" else _result(value, role, inside)


def _kind(block: Any, where: str) -> str:
    """Return the key that names a block's kind."""
    if not isinstance(block, dict):
        raise InvalidMessageError(f"{where} is {describe(block)}: a block is a dict, such as {{'text': 'Hi'}}.")
    kinds = [key for key in block if key in _KINDS]
    if len(kinds) == 1:
        return str(kinds[0])
    has = f"has the keys {', '.join(map(repr, kinds))}" if kinds else f"has none of the known keys: {describe(block)}"
    raise InvalidMessageError(f"{where} {has}. Give each block one of {', '.join(sorted(_SUPPORTED))}.")


def _text(value: Any, where: str) -> int:
    if not isinstance(value, str):
        raise InvalidMessageError(f"{where} is {describe(value)}: give a string.")
    return len(value)


def _reasoning(value: Mapping[str, Any], where: str) -> int:
    if "reasoningText" not in value:  # redacted reasoning has no text
        return 0
    thought = value["reasoningText"]
    if not isinstance(thought, dict):
        raise InvalidMessageError(f"{where}['reasoningText'] is {describe(thought)}: give {{'text': ...}}.")
    return _text(thought.get("text"), f"{where}['reasoningText']['text']")


def _call(use: Mapping[str, Any], where: str) -> int:
    _text(use.get("name"), f"{where}['name']")
    if "input" not in use:
        raise InvalidMessageError(f"{where} has no 'input': give the call's arguments, such as {{}}.")
    if not isinstance(use["input"], dict):
        raise InvalidMessageError(
            f"{where}['input'] of tool call {use['toolUseId']!r} is {describe(use['input'])}: give the arguments as a "
            "dict, such as {'a': 1}; json.loads() makes one of JSON text."
        )
    if fault := _fault_of(use["input"], f"{where}['input']", DEEPEST):
        raise InvalidMessageError(f"The arguments of tool call {use['toolUseId']!r} are not JSON: {fault}.")
    return len(json.dumps(use["input"]))


def _result(result: Mapping[str, Any], role: str, where: str) -> int:
    content = result.get("content")
    if not isinstance(content, list | tuple):
        raise InvalidMessageError(f"{where}['content'] is {describe(content)}: give a list, such as [{{'text': '5'}}].")
    return sum([_result_item(item, result, role, f"{where}['content'][{i}]") for i, item in enumerate(content)])


def _result_item(item: Any, result: Mapping[str, Any], role: str, where: str) -> int:
    if not isinstance(item, dict):
        raise InvalidMessageError(f"{where} is {describe(item)}: give {{'text': ...}} or {{'json': ...}}.")
    of = f"in the tool result {result['toolUseId']!r}"
    kinds = [key for key in item if key in _RESULT_KINDS]
    if len(kinds) > 1:
        why = "but only one of them would become tokens; return one item each"
        raise UnsupportedContentError(
            unsupported(f"{' and '.join(map(repr, kinds))} in one item {of}", role, where, why)
        )
    if "text" in item:
        return _text(item["text"], f"{where}['text']")
    if "image" in item:
        return _image(item["image"], f"{where}['image']")
    if "json" not in item:
        raise UnsupportedContentError(unsupported(f"a block of kind {next(iter(item), 'empty')!r} {of}", role, where))
    try:
        fault = _bound_fault(item["json"], f"{where}['json']")
        size = 0 if fault else len(json.dumps(item["json"], ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError) as error:
        fault = _fault_of(item["json"], f"{where}['json']", DEEPEST) or str(error)
    if fault is None:
        return size
    raise UnsupportedContentError(unsupported(f"a block of kind 'json' {of} that is not JSON ({fault})", role, where))


def _image(image: Any, where: str) -> int:
    """Check an image's form; `image_content` reads its bytes."""
    source = image.get("source") if isinstance(image, dict) else None
    if not isinstance(source, dict) or not isinstance(image.get("format"), str):
        raise InvalidMessageError(
            f"{where} is {describe(image)}: give {{'format': 'png', 'source': {{'bytes': ...}}}}, with the "
            "image's bytes."
        )
    if not isinstance(source.get("bytes"), bytes) or source.get("location") is not None:
        data = f", its 'bytes' of type {type(source['bytes']).__name__}" if "bytes" in source else ""
        raise UnsupportedContentError(
            f"{where}['source'] is {describe(source)}{data}. This provider reads only an object of type bytes, and no "
            "location. Load the image and pass {'bytes': data}, with bytes(data) for another type."
        )
    return 0


def unsupported(what: str, role: str, where: str, why: str = "which this provider cannot turn into tokens") -> str:
    """Return the error message for unsupported content, which would fail every later call until it is replaced."""
    index = where.partition("]")[0].removeprefix("messages[")
    return (
        f"Message {index} ({role}) holds {what}, {why.rstrip('.')}. It stays in the agent's history. Replace it by "
        f"text, agent.{where} = {{'text': '...'}}, and call agent() without a prompt."
    )


def _bound_fault(value: Any, where: str) -> str | None:
    """Describe the first part of a value that nests too deeply or is too large an integer, or return None."""
    waiting = [(value, 0)]
    while waiting:
        item, depth = waiting.pop()
        if depth > DEEPEST:
            return f"{where} nests more than {DEEPEST} levels deep"
        if isinstance(item, int) and (fault := _digits_fault(item)):
            return f"{where} holds {fault}"
        if isinstance(item, dict | list | tuple):
            waiting += [(each, depth + 1) for each in (item.values() if isinstance(item, dict) else item)]
    return None


def _digits_fault(number: int) -> str | None:
    """Describe an integer that has too many digits for JSON; Python's own limit, which reading JSON has too."""
    try:
        int.__repr__(number)
    except ValueError as error:
        return f"an integer of {number.bit_length()} bits ({error})"
    return None


def _fault_of(value: Any, where: str, depth: int) -> str | None:
    """Describe the first part of a value that is not JSON, or return None."""
    if isinstance(value, str) or value is None or isinstance(value, bool):
        return None
    if isinstance(value, int):
        return f"{where} is {fault}" if (fault := _digits_fault(value)) else None
    if isinstance(value, float):
        return None if math.isfinite(value) else f"{where} is {value}"
    if not isinstance(value, dict | list | tuple):
        return f"{where} is {describe(value)}"
    if not depth:
        return f"{where.partition('][')[0]}] nests more than {DEEPEST} levels deep"
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        if isinstance(value, dict) and not isinstance(key, str):
            return f"{where} has the key {describe(key)}, which is not a string"
        if fault := _fault_of(item, f"{where}[{key!r}]", depth - 1):
            return fault
    return None


def describe(value: Any) -> str:
    """Return a short description of a wrong value: the start of its `repr`, with its type if that is not obvious."""
    if isinstance(value, Mapping | list | tuple):
        names = (
            f" with the keys {', '.join(map(repr, list(value)[:5]))}" if isinstance(value, Mapping) and value else ""
        )
        return f"a {type(value).__name__}{names}" if value else f"an empty {type(value).__name__}"
    try:
        text = repr(value)
    except Exception:  # any `__repr__`, and integers with too many digits for `repr`
        text = "a value"
    is_plain = value is None or isinstance(value, str | int | float)
    return text[:_MAX_REPR] if is_plain else f"of type {type(value).__name__} ({text[:_MAX_REPR]})"
