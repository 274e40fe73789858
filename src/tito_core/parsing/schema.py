"""What a tool's JSON Schema means: which arguments it allows, and which reading of written arguments fits it.

`jsonschema` and `referencing` decide it. Remote references are never fetched. Schemas are compiled once and cached by
their JSON text, since Strands passes copies of the tools with each request.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from fractions import Fraction
from functools import lru_cache, partial
from itertools import islice, product
from typing import Any, NamedTuple

import msgspec
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError, best_match
from jsonschema.validators import extend
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from tito_core.ledger.errors import TITOError
from tito_core.parsing.dialects import IN_PLACE, Translated, matches

logger = logging.getLogger(__name__)

JsonSchema = Mapping[str, Any]
Path = tuple[str | int, ...]
"""A place in arguments: names of members and indices of items, from the outside."""

MOST_FAULTS = 5
"""Maximum faults that the error of one call lists."""
LONGEST_FAULT = 200
"""Maximum characters of a fault; it quotes the policy's value, which may be long."""
LONGEST_NOTES = 500
"""Maximum characters of what is noted of one schema."""
MOST_READINGS = 256
"""Maximum readings of one call that are held against its schema."""
_MOST_ERRORS = 1000
"""Maximum errors of one reading that are looked at."""
_MOST_STEPS = 50_000
"""Maximum steps to compare arguments with what a schema combines, about a second."""
_CHARACTERS = 100
"""Characters of a text that a pattern takes in one step."""
_CACHED_SCHEMAS = 1024
_TOO_DEEP = "the value and its schema are too deep, or combine too often, to be compared"

KINDS = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_OF_THE_KEYS = frozenset(
    {"required", "additionalProperties", "minProperties", "maxProperties", "dependentRequired", "propertyNames", "type"}
)
"""Keywords that look at a value's type or names alone, not at the values inside it."""
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

    What it says in another dialect is translated, and what cannot be checked is left out; see `dialects`.

    Raises:
        ToolSchemaError: It is not JSON, or nests too deep.
    """
    try:
        text = msgspec.json.encode(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise ToolSchemaError(f"The input schema of tool {tool!r} is not JSON: {error}. Fix the schema.") from error
    try:
        found = _compiled(text)
    except RecursionError as error:
        raise ToolSchemaError(f"The input schema of tool {tool!r} nests too deep. Fix the schema.") from error
    if found.notes and tool not in found.warned:
        found.warned.add(tool)
        logger.warning("tool=<%s> | %s", tool, found.notes)
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
        ToolSchemaError: One is not JSON, or nests too deep.
    """
    return tools if isinstance(tools, CheckedTools) else CheckedTools(tools or {})


@lru_cache(_CACHED_SCHEMAS)
def _compiled(text: bytes) -> ToolSchema:
    return ToolSchema(json.loads(text))


class ToolSchema:
    """One tool's input schema, compiled. Threads may share it.

    Args:
        schema: The schema, in any dialect.

    Raises:
        RecursionError: It nests too deep.

    Attributes:
        json: The schema in JSON Schema 2020-12, without what cannot be checked.
        notes: What was translated and what is not checked, as sentences of at most `LONGEST_NOTES` characters.
        warned: The tools whose notes were logged.
    """

    def __init__(self, schema: Any) -> None:
        translated = Translated(schema)
        self.json = translated.json
        self.notes = translated.notes[:LONGEST_NOTES]
        self.warned: set[str] = set()
        self._resolver = Registry().resolver_with_root(DRAFT202012.create_resource(self.json))
        self._validator = _validator_class(translated.draft.TYPE_CHECKER)(self.json, registry=Registry())
        self._plain = _plain_members(self.json)

    def _errors(self, arguments: Any) -> Iterator[ValidationError]:
        _local.known = {}
        yield from self._validator.iter_errors(arguments)

    def faults(self, arguments: Any) -> tuple[str, ...]:
        """Return the faults of arguments, at most `MOST_FAULTS` sentences without a full stop; empty for valid ones."""
        _local.steps = _MOST_STEPS
        try:
            errors = sorted(self._errors(arguments), key=lambda error: [*map(str, error.absolute_path)])
        except RecursionError:
            return (_TOO_DEEP,)
        return tuple(map(_sentence, errors[:MOST_FAULTS]))

    def fit(self, written: Mapping[str, Any]) -> Fit:
        """Return the first reading of written arguments that fits; see `Choice`.

        First are readings that differ from the preferred ones in the fewest places. At most `MOST_READINGS` are tried.
        """
        if self._plain is not None and self._plain.fits(written):
            return Fit(dict(written))
        queue: deque[dict[Path, int]] = deque([{}])
        seen: set[frozenset[tuple[Path, int]]] = set()
        faults: tuple[str, ...] | None = None
        _local.steps = _MOST_STEPS
        while queue and len(seen) < MOST_READINGS:
            picks = queue.popleft()
            if (key := frozenset(picks.items())) in seen:
                continue
            seen.add(key)
            choices: dict[Path, Choice] = {}
            arguments = settled(written, picks, choices)
            try:
                errors = list(islice(self._errors(arguments), _MOST_ERRORS))
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
        parts = self._parts_at(path)
        lists = [part.get("enum", [part["const"]] if "const" in part else None) for part in parts]
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
                return list(schema["enum"] if "enum" in schema else [schema["const"]])
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
                parts = [part for key in IN_PLACE for part in schema.get(key, ())]
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
        if (referred := self._referred(schema)) is not None:
            found &= self._kinds(referred, path, memo)
        memo[key] = found
        return found


class _Plain(NamedTuple):
    """What certainly fits a schema that only names its members and their types: most calls need no validator.

    Attributes:
        types: The Python types that each member may have.
        required: The members that must be there.
    """

    types: Mapping[str, frozenset[type]]
    required: frozenset[str]

    def fits(self, written: Mapping[str, Any]) -> bool:
        """Return whether arguments certainly fit; where this is False, they may."""
        for name, value in written.items():
            if type(value) not in self.types.get(name, ()):
                return False
        return self.required <= written.keys()


_TYPES: dict[Any, set[type]] = {
    "string": {str},
    "integer": {int},
    "number": {int, float},
    "boolean": {bool},
    "null": {type(None)},
}
_NOTES = {"$schema", "title", "description", "default", "examples"}
"""Keywords that allow every value."""


def _plain_members(schema: Any) -> _Plain | None:
    """Return what fits a plain schema; None for one that says more."""
    if not isinstance(schema, dict) or schema.get("type") != "object":
        return None
    if not schema.keys() <= {"type", "properties", "required", "additionalProperties"} | _NOTES:
        return None
    types: dict[str, frozenset[type]] = {}
    for name, member in schema.get("properties", {}).items():
        kinds = member.get("type") if isinstance(member, dict) and member.keys() <= {"type"} | _NOTES else None
        listed = kinds if isinstance(kinds, list) else [kinds]
        types[name] = frozenset().union(*(_TYPES.get(kind, set()) for kind in listed))
    return _Plain(types, frozenset(schema.get("required", ())))


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


_local = threading.local()
"""Of the comparison that this thread makes: the steps left, and the errors at each reference (`known`)."""


def _spend(steps: int) -> None:
    _local.steps -= steps
    if _local.steps < 0:
        raise RecursionError


def _counted(keyword: str, validator: Any, value: Any, instance: Any, schema: Any) -> Any:
    """Check a keyword that looks at one value again, as nested ones do without end."""
    _spend(1)
    return Draft202012Validator.VALIDATORS[keyword](validator, value, instance, schema)


def _reference(validator: Any, reference: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
    """Follow a reference once for each value: schemas that refer to one twice would double the work at each level."""
    _spend(1)
    key = (id(schema), id(instance))
    if (known := _local.known.get(key)) is not None:
        return map(_copied, known)
    _local.known[key] = ()  # one that leads back to itself says nothing more
    checked = Draft202012Validator.VALIDATORS["$ref"](validator, reference, instance, schema)
    found = list(islice(checked, _MOST_ERRORS))
    _local.known[key] = tuple(map(_copied, found))
    return iter(found)


def _copied(error: ValidationError) -> ValidationError:
    """Copy an error without its context, since whoever passes it on extends its path."""
    return ValidationError(
        error.message,
        validator=error.validator,
        path=error.relative_path,
        validator_value=error.validator_value,
        instance=error.instance,
        schema=error.schema,
        schema_path=error.relative_schema_path,
    )


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if isinstance(instance, str):
        _spend(1 + len(instance) // _CHARACTERS)
        if not matches(pattern, instance):
            yield ValidationError(f"{instance!r} does not match {pattern!r}")


def _pattern_properties(validator: Any, patterns: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    for pattern, name in product(patterns, instance if isinstance(instance, dict) else ()):
        _spend(1 + len(name) // _CHARACTERS)
        if matches(pattern, name):
            yield from validator.descend(instance[name], patterns[pattern], path=name, schema_path=pattern)


def _additional_properties(validator: Any, rest: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    patterns = schema.get("patternProperties", {})
    if patterns and isinstance(instance, dict):
        named = {name: True for name in instance if any(matches(pattern, name) for pattern in patterns)}
        schema = {"properties": {**schema.get("properties", {}), **named}}
    for error in Draft202012Validator.VALIDATORS["additionalProperties"](validator, rest, instance, schema):
        if patterns and rest is False:
            error.message += f", and not of the form {' or '.join(map(repr, sorted(patterns)))}"
        yield error


def _unique(validator: Any, unique: Any, instance: Any, schema: Any) -> Any:
    kinds = {*map(type, instance)} if isinstance(instance, list) else set()
    if len(kinds) > 1 or kinds & {list, dict}:
        _spend(len(instance) ** 2 // 10)  # they are compared in pairs
    return Draft202012Validator.VALIDATORS["uniqueItems"](validator, unique, instance, schema)


def _multiple_of(validator: Any, step: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    """Compare the decimals as they are written: 19.99 is a multiple of 0.01, and any integer can be compared."""
    if validator.is_type(instance, "number") and Fraction(str(instance)) % Fraction(str(step)):
        yield ValidationError(f"{instance!r} is not a multiple of {step}")


_REPEATING = (
    *("allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas", "contains", "propertyNames", "$dynamicRef"),
    *("unevaluatedProperties", "unevaluatedItems"),
)


@lru_cache
def _validator_class(types: Any) -> Any:
    """Return a validator of JSON Schema 2020-12 with these types, in which patterns take linear time and steps end."""
    keywords = {
        "$ref": _reference,
        "pattern": _pattern,
        "patternProperties": _pattern_properties,
        "additionalProperties": _additional_properties,
        "uniqueItems": _unique,
        "multipleOf": _multiple_of,
        **{keyword: partial(_counted, keyword) for keyword in _REPEATING},
    }
    return extend(Draft202012Validator, keywords, type_checker=types)  # type: ignore[no-untyped-call]  # jsonschema has no types


def _children(schema: dict[str, Any], step: str | int, loose: bool = False) -> list[Any]:
    """Return the schemas of one member or item; with `loose`, also those that apply only where others do not."""
    if isinstance(step, int):
        first, rest = schema.get("prefixItems", ()), schema.get("items")
        found = [first[step]] if step < len(first) else [] if rest is None else [rest]
        return [*found, *(schema.get(key) for key in ("unevaluatedItems", "contains") if loose)]
    properties, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    found = [properties[step]] if step in properties else []
    found += [inner for pattern, inner in patterns.items() if matches(pattern, step)]
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
