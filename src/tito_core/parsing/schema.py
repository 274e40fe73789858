"""What a tool's JSON Schema means: which arguments it allows, and which reading of written arguments fits it.

`jsonschema` and `referencing` decide it. Remote references are never fetched. Schemas are compiled once and cached by
their JSON text, since Strands passes copies of the tools with each request.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

import msgspec
from jsonschema import Draft202012Validator, SchemaError
from jsonschema.exceptions import ValidationError, best_match
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for
from referencing import Registry, Resource
from referencing.exceptions import Unresolvable
from referencing.jsonschema import specification_with

from tito_core.ledger.errors import TITOError

JsonSchema = Mapping[str, Any]
Path = tuple[str | int, ...]
"""A place in arguments: names of members and indices of items, from the outside."""

MOST_FAULTS = 5
"""Maximum faults that the error of one call lists."""
LONGEST_FAULT = 200
"""Maximum characters of a fault; it quotes the policy's value, which may be long."""
MOST_READINGS = 256
"""Maximum readings of one call that are held against its schema."""
_MOST_ERRORS = 1000
"""Maximum errors of one reading that are looked at."""
_CACHED_SCHEMAS = 1024
_TOO_DEEP = "the value and its schema nest too deep to be compared"

KINDS = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_ALIASES = {
    **{"str": "string", "text": "string", "int": "integer", "float": "number", "double": "number"},
    **{"bool": "boolean", "list": "array", "dict": "object", "none": "null"},
}
"""Names of types that JSON Schema does not have, but that tools' schemas use. "any" is dropped."""

BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
IN_ORDER = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
ALONE = frozenset(
    {"items", "additionalItems", "unevaluatedItems", "contains", "additionalProperties", "unevaluatedProperties"}
    | {"propertyNames", "not", "if", "then", "else", "contentSchema"}
)
"""Where a schema holds schemas: by name, in a list, or alone."""
_IN_PLACE = ("allOf", "anyOf", "oneOf")
_OF_THE_KEYS = frozenset(
    {"required", "additionalProperties", "minProperties", "maxProperties", "dependentRequired", "propertyNames", "type"}
)
"""Keywords that look at a value's type or names alone, not at the values inside it."""
_REFERENCES = frozenset({"$ref", "$dynamicRef", "$recursiveRef"})
_UNKNOWN = "tito: a reference that leads nowhere"
_CONDITIONAL = frozenset({"then", "else"})


class ToolSchemaError(TITOError, ValueError):
    """A tool's input schema is invalid; the tool's author must fix it."""


class Choice(NamedTuple):
    """A value with several readings, in the order of preference.

    Attributes:
        options: The readings. A list or an object among them may hold choices; an option itself is none.
        why: Why the text has no reading as JSON; empty if it has one.
    """

    options: tuple[Any, ...]
    why: str = ""


class Fit(NamedTuple):
    """Arguments that fit a schema, or the faults of those that do not.

    Attributes:
        arguments: The first reading that fits; None if none does.
        faults: Sentences without a full stop, at most `MOST_FAULTS`.
    """

    arguments: Mapping[str, Any] | None
    faults: tuple[str, ...] = ()


def meaning(schema: JsonSchema, tool: str = "") -> ToolSchema:
    """Return the compiled schema of a tool's arguments, from the cache if it was compiled before.

    Raises:
        ToolSchemaError: It is not a JSON Schema, or refers to another document.
    """
    try:
        text = msgspec.json.encode(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise ToolSchemaError(f"The input schema of tool {tool!r} is not JSON: {error}. Fix the schema.") from error
    found = _compiled(text)
    if isinstance(found, str):
        raise ToolSchemaError(f"The input schema of tool {tool!r} {found} Fix the schema.")
    return found


class CheckedTools(dict[str, JsonSchema]):
    """The schemas of tools' arguments by tool name, each compiled. Build it with `check_tools`; not to be changed.

    Attributes:
        compiled: The compiled schemas by tool name.
    """

    def __init__(self, tools: Mapping[str, JsonSchema]) -> None:
        super().__init__(tools)
        self.compiled = {name: meaning(schema, name) for name, schema in tools.items()}


def check_tools(tools: Mapping[str, JsonSchema] | None) -> CheckedTools:
    """Compile the schemas of all tools, before anything is sent. Checked ones are returned as they are.

    Raises:
        ToolSchemaError: One is not a JSON Schema, or refers to another document.
    """
    return tools if isinstance(tools, CheckedTools) else CheckedTools(tools or {})


@lru_cache(_CACHED_SCHEMAS)
def _compiled(text: bytes) -> ToolSchema | str:
    """Return a compiled schema, or what is wrong with it."""
    try:
        return ToolSchema(json.loads(text))
    except SchemaError as error:
        return f"is invalid at {error.json_path}: {error.message[:LONGEST_FAULT]}."
    except Unresolvable as error:
        return f"refers to {error.ref!r}, which is not part of it. Remote schemas are never fetched: put it in $defs."
    except RecursionError:
        return "nests too deep."


class ToolSchema:
    """One tool's input schema, compiled. Threads may share it.

    Names of types that other schema languages use ("str", "float") and OpenAPI's `nullable` count as what they mean. A
    reference that leads nowhere inside the schema, and a pattern that Python cannot read, allow everything: Strands
    leaves such references in the tool of a structured output.

    Args:
        schema: The schema, in the draft that its "$schema" names, else 2020-12.

    Raises:
        SchemaError: It is not a JSON Schema.
        Unresolvable: It refers to another document.
        RecursionError: It nests too deep.

    Attributes:
        json: The schema as JSON, with usual names and without `nullable`.
    """

    def __init__(self, schema: Any) -> None:
        self.json: dict[str, Any] = rewritten(schema, _usual) if isinstance(schema, dict) else schema
        draft: Any = validator_for(self.json, default=Draft202012Validator)
        draft.check_schema(self.json, format_checker=None)
        specification = specification_with(draft.ID_OF(draft.META_SCHEMA))
        root = specification.create_resource(self.json)
        self._resolver = Registry().resolver_with_root(root)
        if _mark_dangling(root, self._resolver):
            self.json = rewritten(self.json, _without_unknown)
            self._resolver = Registry().resolver_with_root(specification.create_resource(self.json))
        self._validator: Validator = draft(self.json, registry=Registry())
        named = str(self.json.get("$schema", "")).rstrip("#")
        self._siblings = not named.endswith(tuple(f"draft-0{number}/schema" for number in (3, 4, 6, 7)))

    def faults(self, arguments: Any) -> tuple[str, ...]:
        """Return the faults of arguments, at most `MOST_FAULTS` sentences without a full stop; empty for valid ones."""
        try:
            errors = sorted(self._validator.iter_errors(arguments), key=lambda error: [*map(str, error.absolute_path)])
        except RecursionError:
            return (_TOO_DEEP,)
        return tuple(map(_sentence, errors[:MOST_FAULTS]))

    def fit(self, written: Mapping[str, Any]) -> Fit:
        """Return the first reading of written arguments that fits; see `Choice`.

        First are readings that differ from the preferred ones in the fewest places. At most `MOST_READINGS` are tried.
        """
        queue: deque[dict[Path, int]] = deque([{}])
        seen: set[frozenset[tuple[Path, int]]] = set()
        faults: tuple[str, ...] | None = None
        while queue and len(seen) < MOST_READINGS:
            picks = queue.popleft()
            if (key := frozenset(picks.items())) in seen:
                continue
            seen.add(key)
            choices: dict[Path, Choice] = {}
            arguments = settled(written, picks, choices)
            try:
                errors = list(islice(self._validator.iter_errors(arguments), _MOST_ERRORS))
            except RecursionError:
                return Fit(None, (_TOO_DEEP,))
            if not errors:
                return Fit(arguments)
            if faults is None:
                faults = tuple(_sentence(error, choices) for error in errors[:MOST_FAULTS])
            left = {place for place, choice in choices.items() if picks.get(place, 0) + 1 < len(choice.options)}
            places = [_places(error, choices, left) for error in errors]
            if not all(places):
                continue  # no other reading removes this error
            if certain := {each[0]: picks.get(each[0], 0) + 1 for each in places if len(each) == 1}:
                queue.append({**picks, **certain})
                continue
            nearest = min(places, key=lambda each: len(each))[:MOST_READINGS]
            queue.extend({**picks, place: picks.get(place, 0) + 1} for place in nearest)
        return Fit(None, faults or ())

    def kinds(self, path: Path = ()) -> frozenset[str]:
        """Return the JSON types that a value at a place can have: an upper bound, all types where that is unknown."""
        return self._kinds(self.json, path, {}) or KINDS

    def names(self, path: Path = ()) -> list[str]:
        """Return the names that an object at a place declares, in any part of its schema."""
        found = (schema.get("properties") for schema in self._parts_at(path))
        return list(dict.fromkeys(name for properties in found if isinstance(properties, dict) for name in properties))

    def enumerated(self, path: Path) -> list[Any] | None:
        """Return the values that a schema at a place lists in an "enum" or a "const"; None if none lists any."""
        lists = [
            schema.get("enum", [schema["const"]] if "const" in schema else None) for schema in self._parts_at(path)
        ]
        found = [values for values in lists if isinstance(values, list)]
        return [value for values in found for value in values] if found else None

    def required(self) -> frozenset[str]:
        """Return the names that every object that fits has: a lower bound."""
        found: set[str] = set()
        for schema in self._conjuncts(self.json):
            found.update(name for name in schema.get("required", ()) if isinstance(name, str))
        return frozenset(found)

    def is_closed(self) -> bool:
        """Return whether an object that fits has only names in `names()`; False where that is unknown."""
        declared = set(self.names())
        for schema in self._conjuncts(self.json):
            others = schema.get("additionalProperties")
            if others is False and "patternProperties" not in schema and declared >= set(schema.get("properties", ())):
                return True
        open_parts = any("patternProperties" in s or "additionalProperties" in s for s in self._parts_at(()))
        return not open_parts and any(s.get("unevaluatedProperties") is False for s in self._conjuncts(self.json))

    def options(self, name: str) -> list[Any] | None:
        """Return the only values that a member can have; None if they are not listed."""
        for schema in self._conjuncts(self.json.get("properties", {}).get(name)):
            if "enum" in schema or "const" in schema:
                values: list[Any] = schema["enum"] if "enum" in schema else [schema["const"]]
                return values
        return None

    def _conjuncts(self, schema: Any) -> Iterator[dict[str, Any]]:
        """Yield a schema, and what it refers to or lists in "allOf": a value that fits it fits all of them."""
        stack, seen = [schema], set()
        while stack:
            schema = stack.pop()
            if isinstance(schema, dict) and id(schema) not in seen:
                seen.add(id(schema))
                yield schema
                stack += [self._referred(schema), *schema.get("allOf", ())]

    def _parts_at(self, path: Path) -> list[dict[str, Any]]:
        """Return the schemas that may apply at a place."""
        level = self._parts([self.json])
        for step in path:
            level = self._parts(child for schema in level for child in _children(schema, step, loose=True))
        return level

    def _parts(self, schemas: Iterable[Any]) -> list[dict[str, Any]]:
        """Return schemas with all those that they apply to the same value."""
        stack, found = [*schemas][::-1], {}
        while stack:
            schema = stack.pop()
            if isinstance(schema, dict) and id(schema) not in found:
                found[id(schema)] = schema
                parts = [part for key in _IN_PLACE for part in schema.get(key, ())]
                parts += [schema.get(key) for key in ("if", "then", "else")]
                parts += schema.get("dependentSchemas", {}).values()
                stack += [self._referred(schema), *parts][::-1]
        return list(found.values())

    def _referred(self, schema: Mapping[str, Any]) -> Any:
        """Return the schema that a reference leads to; None if there is none or it leads nowhere."""
        if not isinstance(reference := schema.get("$ref"), str):
            return None
        try:
            return self._resolver.lookup(reference).contents
        except Unresolvable:
            return None

    def _kinds(self, schema: Any, path: Path, memo: dict[tuple[int, Path], frozenset[str]]) -> frozenset[str]:
        if schema is False:
            return frozenset()
        if not isinstance(schema, dict) or ("$id" in schema and schema is not self.json):
            return KINDS  # an "$id" changes what references mean
        if (key := (id(schema), path)) in memo:
            return memo[key]
        memo[key] = KINDS
        found = KINDS
        referred = self._referred(schema)
        if referred is None or self._siblings:
            if path:
                for child in _children(schema, path[0]):
                    found &= self._kinds(child, path[1:], memo)
            else:
                found &= _own_kinds(schema)
            for each in schema.get("allOf", ()):
                found &= self._kinds(each, path, memo)
            for union in ("anyOf", "oneOf"):
                if union in schema:
                    found &= frozenset().union(*(self._kinds(each, path, memo) for each in schema[union]))
        if referred is not None:
            found &= self._kinds(referred, path, memo)
        memo[key] = found
        return found


def rewritten(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Return a copy of a schema in which `change` has replaced each schema, inner ones first."""
    if not isinstance(schema, Mapping):
        return schema
    return change({key: _inside(key, value, change) for key, value in schema.items()})


def _inside(key: str, value: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    if key in BY_NAME and isinstance(value, Mapping):
        return {name: rewritten(one, change) for name, one in value.items()}
    if (key in IN_ORDER or key == "items") and isinstance(value, list):
        return [rewritten(one, change) for one in value]
    return rewritten(value, change) if key in ALONE else value


def settled(written: Any, picks: Mapping[Path, int], choices: dict[Path, Choice], path: Path = ()) -> Any:
    """Return a reading: of each choice the option in `picks`, else the first. Add all choices to `choices`.

    A pick of -1 at the path `()` takes the last option of every choice.
    """
    if isinstance(written, Choice):
        choices[path] = written
        written = written.options[picks.get((), picks.get(path, 0))]
    if isinstance(written, dict):
        return {key: settled(value, picks, choices, (*path, key)) for key, value in written.items()}
    if isinstance(written, list):
        return [settled(value, picks, choices, (*path, i)) for i, value in enumerate(written)]
    return written


def _usual(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with usual names of types, without `nullable` and without patterns that Python cannot read."""
    if isinstance(kinds := schema.get("type"), str | list):
        listed = [kinds] if isinstance(kinds, str) else kinds
        names = [_ALIASES.get(each.lower(), each.lower()) if isinstance(each, str) else each for each in listed]
        if "any" in names:
            del schema["type"]
        else:
            schema["type"] = names[0] if isinstance(kinds, str) else names
    if schema.get("nullable") is True:
        _allow_null(schema)
    if isinstance(pattern := schema.get("pattern"), str) and not _is_pattern(pattern):
        del schema["pattern"]
    if isinstance(patterns := schema.get("patternProperties"), dict) and not all(map(_is_pattern, patterns)):
        for key in ("patternProperties", "additionalProperties", "unevaluatedProperties"):
            schema.pop(key, None)
    return schema


def _allow_null(schema: dict[str, Any]) -> None:
    """Allow null, as OpenAPI 3.0 means `nullable`."""
    if isinstance(kinds := schema.get("type"), str | list):
        listed = [kinds] if isinstance(kinds, str) else kinds
        schema["type"] = listed if "null" in listed else [*listed, "null"]
        return
    inner = {key: schema.pop(key) for key in ("$ref", *_IN_PLACE) if key in schema}
    if inner:
        schema["anyOf"] = [inner, {"type": "null"}]


def _is_pattern(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        return False
    return True


def _mark_dangling(root: Resource[Any], resolver: Any) -> bool:
    """Put a mark in place of references that lead nowhere inside the schema; return whether there are any.

    Raises:
        Unresolvable: A reference leads to another document.
    """
    found, marked = [(root, resolver)], False
    while found:
        resource, resolver = found.pop()
        contents = resource.contents
        for key in _REFERENCES & set(contents if isinstance(contents, dict) else ()):
            try:
                resolver.lookup(contents[key])
            except Unresolvable:
                if not contents[key].startswith("#"):
                    raise
                del contents[key]
                contents["$comment"], marked = _UNKNOWN, True
        found += ((inner, resolver.in_subresource(inner)) for inner in resource.subresources())
    return marked


def _without_unknown(schema: dict[str, Any]) -> dict[str, Any]:
    """Leave out what a schema says by the opposite of an unknown one: only one of several, "not" and "if"."""
    if _UNKNOWN in json.dumps(schema.get("oneOf")):
        schema["allOf"] = [*schema.get("allOf", ()), {"anyOf": schema.pop("oneOf")}]
    return {
        key: value for key, value in schema.items() if key not in ("not", "if") or _UNKNOWN not in json.dumps(value)
    }


def _children(schema: dict[str, Any], step: str | int, loose: bool = False) -> list[Any]:
    """Return the schemas of one member or item; with `loose`, also those that apply only where others do not."""
    if isinstance(step, int):
        first = schema.get("prefixItems", schema["items"] if isinstance(schema.get("items"), list) else ())
        rest = schema.get("additionalItems") if isinstance(schema.get("items"), list) else schema.get("items")
        found = [first[step]] if step < len(first) else [] if rest is None else [rest]
        return [*found, *(schema.get(key) for key in ("unevaluatedItems", "contains") if loose)]
    properties, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    found = [properties[step]] if step in properties else []
    found += [inner for pattern, inner in patterns.items() if re.search(pattern, step)]
    if not found and "additionalProperties" in schema:
        found = [schema["additionalProperties"]]
    return [*found, schema.get("unevaluatedProperties")] if loose else found


def _own_kinds(schema: dict[str, Any]) -> frozenset[str]:
    """Return the types that a schema's own "type", "enum" and "const" allow."""
    found = KINDS
    if "type" in schema:
        listed = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        found &= {*listed, *(["integer"] if "number" in listed else [])}
    if "enum" in schema:
        found &= {kind for value in schema["enum"] for kind in kinds_of(value)}
    if "const" in schema:
        found &= {*kinds_of(schema["const"])}
    return found


def kinds_of(value: Any) -> tuple[str, ...]:
    """Return the JSON types of a value; 5 and 5.0 are both an integer and a number."""
    if isinstance(value, bool):
        return ("boolean",)
    if isinstance(value, int | float):
        return ("integer", "number") if isinstance(value, int) or value.is_integer() else ("number",)
    names: Sequence[tuple[type, str]] = ((str, "string"), (list, "array"), (dict, "object"), (type(None), "null"))
    return tuple(name for kind, name in names if isinstance(value, kind))


def _places(error: ValidationError, choices: Mapping[Path, Choice], left: Set[Path]) -> list[Path]:
    """Return the choices of which at least one must change to remove an error, among those `left` with more options."""
    at = tuple(error.absolute_path)
    if _CONDITIONAL & {str(step) for step in error.absolute_schema_path}:
        return [place for place in choices if place in left]  # any of them may decide whether the schema applies
    above = [at[:length] for length in range(len(at) + 1) if at[:length] in left]
    if error.validator in _OF_THE_KEYS or not isinstance(error.instance, list | dict):
        return above
    return [*above, *(place for place in choices if place in left and place[: len(at)] == at and place != at)]


def _sentence(error: ValidationError, choices: Mapping[Path, Choice] | None = None) -> str:
    best = best_match([error]) or error  # among the branches of an anyOf, the closest one
    message = best.message if len(best.message) <= LONGEST_FAULT else f"{best.message[:LONGEST_FAULT]}..."
    where = f"{best.json_path.removeprefix('$.')}: " if best.absolute_path else ""
    choice = (choices or {}).get(tuple(best.absolute_path))
    return f"{where}{message}{f' ({choice.why})' if choice is not None and choice.why else ''}"
