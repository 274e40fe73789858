"""Refuses tool calls that cannot be meant, with an error that the policy can learn from."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from jsonschema import Draft202012Validator, SchemaError
from jsonschema.exceptions import ValidationError, best_match
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable
from strands.hooks import AfterToolsEvent, BeforeInvocationEvent, BeforeToolCallEvent, HookProvider, HookRegistry
from strands.tools.tools import InvalidToolUseNameException, validate_tool_use_name
from strands.types.tools import ToolSpec, ToolUse

from tito_core.chat.messages import MALFORMED_CALL

logger = logging.getLogger(__name__)


class ToolCallGuard(HookProvider):
    """Lets no call through to a tool that does not exist, or with arguments that its JSON Schema does not allow.

    Each refused call gets an error as its result, word for word what the model reads next: which tools there are, or
    what is wrong with which argument. A malformed call never gets here to be run; the model says itself why.

    Args:
        max_listed_tools: How many tools an error names; None for none at all.

    Attributes:
        unknown_calls: Calls of tools that do not exist, by the name called.
        invalid_calls: Calls with arguments that do not fit, by tool.
    """

    def __init__(self, max_listed_tools: int | None = 25) -> None:
        self.max_listed_tools = max_listed_tools
        self.unknown_calls: Counter[str] = Counter()
        self.invalid_calls: Counter[str] = Counter()
        self._schemas: dict[str, tuple[ToolSpec, ArgumentSchema]] = {}
        self._lock = threading.Lock()

    def reset(self) -> None:
        """Empty both counters."""
        with self._lock:
            self.unknown_calls.clear()
            self.invalid_calls.clear()

    def register_hooks(self, registry: HookRegistry, **_: Any) -> None:
        """Listen to an agent."""
        registry.add_callback(BeforeInvocationEvent, self._check_schemas)
        registry.add_callback(BeforeToolCallEvent, self.check_call)
        registry.add_callback(AfterToolsEvent, self._list_tools)

    def _check_schemas(self, event: BeforeInvocationEvent) -> None:
        """Raise `ToolSchemaError` before anything is said, rather than in the middle of a rollout."""
        for spec in event.agent.tool_registry.get_all_tool_specs():
            self._schema(spec)

    def check_call(self, event: BeforeToolCallEvent) -> None:
        """Refuse a call that cannot be meant, by its `cancel_tool`."""
        name = event.tool_use["name"]
        if event.cancel_tool or name == MALFORMED_CALL:
            return
        if event.selected_tool is None:
            event.cancel_tool = self._unknown(name, sorted(event.agent.tool_registry.registry))
            return
        try:
            faults = self._schema(event.selected_tool.tool_spec).faults(event.tool_use["input"])
        except ToolSchemaError as error:  # raised from here, it would leave the call without a result
            logger.warning("%s", error)
            event.cancel_tool = str(error)
            return
        if faults:
            with self._lock:
                self.invalid_calls[name] += 1
            event.cancel_tool = f"The arguments of {name!r} do not fit its schema: {'; '.join(faults)}."

    def _list_tools(self, event: AfterToolsEvent) -> None:
        """Say of names that Strands allows to no tool, such as `a.b`, what is said of other unknown ones."""
        uses = [block["toolUse"] for block in event.agent.messages[-1]["content"] if "toolUse" in block]
        refused = {use["toolUseId"]: use["name"] for use in uses if not _may_be_a_tool(use)}
        for block in event.message["content"]:
            result = block["toolResult"]
            told = result["content"][0].get("text", "") if result["content"] else ""
            if result["toolUseId"] in refused and told.startswith("Error: tool_name="):
                name = refused[result["toolUseId"]]
                result["content"] = [{"text": self._unknown(name, sorted(event.agent.tool_registry.registry))}]

    def _unknown(self, name: str, names: Sequence[str]) -> str:
        with self._lock:
            self.unknown_calls[name] += 1
        return f"There is no tool {name!r}. {self._listed(names)}".rstrip()

    def _schema(self, spec: ToolSpec) -> ArgumentSchema:
        kept, schema = self._schemas.get(spec["name"], (None, None))
        if schema is None or kept != spec:  # a tool may be replaced by another of its name
            schema = ArgumentSchema(spec["name"], spec["inputSchema"].get("json", {}))
            self._schemas[spec["name"]] = spec, schema
        return schema

    def _listed(self, names: Sequence[str]) -> str:
        if self.max_listed_tools is None:
            return ""
        if not names:
            return "There are no tools."
        more = len(names) - self.max_listed_tools
        shown = ", ".join(names[: self.max_listed_tools])
        return f"The tools are: {shown}{f' and {more} more' if more > 0 else ''}."


def _may_be_a_tool(use: ToolUse) -> bool:
    try:
        validate_tool_use_name(use)
    except InvalidToolUseNameException:
        return False
    return True


MOST_FAULTS = 5
"""Faults that are told of one call."""
LONGEST_FAULT = 200
"""Characters of a fault; it quotes the policy's value, which may be long."""


class ToolSchemaError(ValueError):
    """A tool's own schema is broken; the tool's author must mend it."""


class ArgumentSchema:
    """One tool's schema, ready to use. Safe to share.

    Args:
        tool: Its name, for messages.
        schema: The schema, in the draft that its "$schema" names, else 2020-12. A reference out of it is never fetched.

    Raises:
        ToolSchemaError: It is no JSON Schema.
    """

    def __init__(self, tool: str, schema: Mapping[str, Any]) -> None:
        given = dict(schema)
        draft: type[Validator] = validator_for(given, default=Draft202012Validator)
        try:
            draft.check_schema(given)
        except SchemaError as error:
            raise ToolSchemaError(
                f"The input schema of tool {tool!r} is broken at {error.json_path}: {error.message}. Mend the tool."
            ) from error
        self._tool = tool
        self._validator = draft(given, registry=Registry())

    def faults(self, arguments: Any) -> list[str]:
        """Say what is wrong with arguments, at most `MOST_FAULTS` sentences without a full stop; none when all is well.

        Raises:
            ToolSchemaError: The schema refers to what it does not hold, or to itself without end.
        """
        try:
            found = sorted(self._validator.iter_errors(arguments), key=lambda error: [*map(str, error.absolute_path)])
        except (Unresolvable, RecursionError) as error:
            raise ToolSchemaError(
                f"The input schema of tool {self._tool!r} cannot be followed: {error}. Mend the tool."
            ) from error
        return [_sentence(error) for error in found[:MOST_FAULTS]]


def _sentence(error: ValidationError) -> str:
    told = best_match([error]) or error  # of the branches of an anyOf, the one that nearly fits
    message = told.message if len(told.message) <= LONGEST_FAULT else f"{told.message[:LONGEST_FAULT]}..."
    return f"{told.json_path.removeprefix('$.')}: {message}" if told.absolute_path else message
