"""The JSON Schema of a tool's arguments, and what is wrong with given ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jsonschema import Draft202012Validator, SchemaError
from jsonschema.exceptions import ValidationError, best_match
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

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
