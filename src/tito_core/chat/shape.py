"""The documented shape of what Strands hands over, to explain why a turn could not be prepared.

Checking every message of every turn would cost what a long history costs (law 14), so nobody looks until something
fails; then the first value that is not of its type is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tito_core.chat.messages import UnsupportedContentError
from tito_core.ledger.strict import DEPTH, plain

_SHOWN = 100
"""Characters of a wrong value that an error repeats."""
_CHOICES = ('{"auto": {}}', '{"any": {}}', '{"tool": {"name": "..."}}')


@contextmanager
def explained(messages: Any, system_prompt: Any, tool_specs: Any, tool_choice: Any, model_state: Any) -> Iterator[None]:
    """Prepare a turn; where that fails with an error of Python's own, name the value that is not of its type.

    Raises:
        UnsupportedContentError: A message, tool specification or choice is not what Strands documents.
    """
    if model_state is not None and not isinstance(model_state, dict):  # it is written after the turn is committed
        raise UnsupportedContentError(f"model_state is {_shown(model_state)}; it must be a dict or None.")
    try:
        yield
    except Exception as error:
        if type(error).__module__.partition(".")[0] in ("builtins", "pydantic_core"):  # ours say what is wrong
            fault = _fault(messages, system_prompt, tool_specs, tool_choice)
            if fault is not None:
                raise UnsupportedContentError(fault) from error
        raise


def _fault(messages: Any, system_prompt: Any, tool_specs: Any, tool_choice: Any) -> str | None:
    try:
        if system_prompt is not None:
            _expect(system_prompt, str, "system_prompt")
            plain(system_prompt, "system_prompt")
        _tools(tool_specs)
        _choice(tool_choice)
        for index, message in enumerate(_expect(messages, list | tuple, "messages")):
            _message(message, f"messages[{index}]")
            _bounded(message, f"messages[{index}]")
        _bounded(tool_specs, "tool_specs")
    except (TypeError, ValueError) as fault:
        return f"The turn cannot be prepared: {fault}"
    return None


def _tools(specs: Any) -> None:
    for index, spec in enumerate(_expect(specs, list | tuple | None, "tool_specs") or ()):
        where = f"tool_specs[{index}]"
        _expect(spec, Mapping, where)
        _json(spec, "name", str, where)
        if "description" in spec:
            _json(spec, "description", str, where)
        schema = _json(spec, "inputSchema", Mapping, where)
        if "json" in schema:
            _json(schema, "json", Mapping, f"{where}['inputSchema']")


def _choice(choice: Any) -> None:
    if choice is None:
        return
    tool = _expect(choice, Mapping, "tool_choice").get("tool")
    if tool is not None:
        _json(_expect(tool, Mapping, "tool_choice['tool']"), "name", str, "tool_choice['tool']")
    elif not {"auto", "any"} & choice.keys():
        raise ValueError(f"tool_choice is {_shown(choice)}; it must be one of {', '.join(_CHOICES)}.")


def _message(message: Any, where: str) -> None:
    _expect(message, Mapping, where)
    role = _json(message, "role", str, where)
    if role not in ("user", "assistant"):
        raise ValueError(f"{where}['role'] is {_shown(role)}; it must be 'user' or 'assistant'.")
    blocks = _get(message, "content", list | tuple, where)
    for index, block in enumerate(blocks):
        _block(block, f"{where}['content'][{index}]")


def _block(block: Any, where: str) -> None:
    _expect(block, Mapping, where)
    if "text" in block:
        _json(block, "text", str, where)
    if "toolUse" in block:
        use, inside = _get(block, "toolUse", Mapping, where), f"{where}['toolUse']"
        _json(use, "toolUseId", str, inside)
        _json(use, "name", str, inside)
        _json(use, "input", object, inside)
    if "toolResult" in block:
        result, inside = _get(block, "toolResult", Mapping, where), f"{where}['toolResult']"
        _json(result, "toolUseId", str, inside)
        for index, item in enumerate(_get(result, "content", list | tuple, inside)):
            each = f"{inside}['content'][{index}]"
            if "text" in _expect(item, Mapping, each):
                _json(item, "text", str, each)
            elif "json" in item:
                _json(item, "json", object, each)
    if "reasoningContent" in block:
        reasoning = _get(block, "reasoningContent", Mapping, where)
        if "reasoningText" in reasoning:
            text = _get(reasoning, "reasoningText", Mapping, f"{where}['reasoningContent']")
            _json(text, "text", str, f"{where}['reasoningContent']['reasoningText']")


def _bounded(value: Any, where: str) -> None:
    """Check the depth and the numbers of what has no type of its own, without a call for each level."""
    waiting = [(value, 0)]
    while waiting:
        item, depth = waiting.pop()
        if depth > DEPTH:
            raise ValueError(f"{where} is nested more than {DEPTH} levels deep; flatten it.")
        if isinstance(item, int):
            plain(item, f"a number in {where}")
        inside = item.values() if isinstance(item, Mapping) else item if isinstance(item, list | tuple) else ()
        waiting += [(each, depth + 1) for each in inside]


def _json(holder: Mapping[str, Any], key: str, kind: Any, where: str) -> Any:
    """Return a field, held to its type and to what JSON can say."""
    found = _get(holder, key, kind, where)
    plain(found, f"{where}[{key!r}]")
    return found


def _get(holder: Mapping[str, Any], key: str, kind: Any, where: str) -> Any:
    if key not in holder:
        raise ValueError(f"{where} has no {key!r}; Strands always gives one.")
    return _expect(holder[key], kind, f"{where}[{key!r}]")


def _expect(value: Any, kind: Any, where: str) -> Any:
    if not isinstance(value, kind):
        wanted = getattr(kind, "__name__", None) or str(kind)
        raise TypeError(f"{where} is {_shown(value)} of type {type(value).__name__}; it must be of type {wanted}.")
    return value


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # nested without end, or a number with more digits than Python writes
        return "a value"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
