"""Grammars that force a tool call: structural tags, as XGrammar reads them in vLLM and in SGLang.

A structural tag can require a control token by its id. The policy then cannot spell the tag with other tokens, which
the parser would read as text (law 9). EBNF or a JSON schema cannot do this. Source: XGrammar 0.2.8,
`structural_tag.py`; vLLM 0.32 accepts them as `structured_outputs.structural_tag`, SGLang 0.5.23 as `structural_tag`.

A tool's schema is rewritten so that XGrammar allows every value that the schema allows. XGrammar 0.2.7 and 0.2.8 read
some keywords more narrowly than JSON Schema means them, and then a policy cannot say what the tool allows. Such
keywords are widened or left out; the arguments are held against the schema afterwards. What they do, as seen with both
versions:

- An object without "additionalProperties" has no others, a list without "items" none after "prefixItems", and a schema
  without "type" allows only objects where it has "properties" (lists where it has "items").
- A required name without a schema of its own makes the object impossible.
- A "pattern" matches the whole string, and a string with a pattern, a format or a length allows no escapes, so that a
  quotation mark or a line break could not be written.
- A name in "patternProperties" matches as a whole, too; "contains" and "propertyNames" forbid everything else.
- "oneOf" means "anyOf", as it has to where the options were widened: several of them may then allow a value.
- An impossible schema (`false`), or a reference that leads nowhere, is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from tito_core.ledger.errors import TITOError
from tito_core.parsing.completion import Tools
from tito_core.parsing.dialects import rewritten
from tito_core.parsing.markup import Markup
from tito_core.parsing.schema import KINDS, JsonSchema, ToolSchema, meaning

TagFormat = dict[str, Any]
"""A "format" object of a structural tag."""
CHOOSE_AUTO = 'Set tool_choice to {"auto": {}}, or set sampling.grammar.'
_CLOSED_TYPES = ("object", "array", "string")
"""JSON types whose text shows its own end; a number could always have one more digit."""
_OTHER_NAME = "{0}+( {0}+)*".format("[!#-&(-;?-~\u00c0-\u024f\u0400-\u0481\u4e00-\u9fff\uac00-\ud7a3]")
"""Names of parameters that a schema allows without declaring them, without characters that end a name in a format."""


class NoCallGrammarError(TITOError, ValueError):
    """A call cannot be forced: the format has no grammar, or the tool is unknown."""


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """A grammar for an engine.

    Attributes:
        kind: The kind of grammar; always "structural_tag".
        value: The grammar, as JSON.
        avoided_ids: Control tokens that need a negative logit bias: inside free text, such as a JSON string, XGrammar
            would accept one by its bytes. Tokens that end such text are not among them, since a bias against them could
            make it endless.
    """

    kind: str
    value: str
    avoided_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, grammar: TagFormat, controls: Iterable[int] = ()) -> CallGrammar:
        """Build a grammar from one format and the control tokens of the vocabulary."""
        value = json.dumps({"type": "structural_tag", "format": grammar}, ensure_ascii=False)
        return cls("structural_tag", value, tuple(sorted(set(controls) - _enders(grammar))))


def _enders(grammar: TagFormat) -> set[int]:
    """Return the tokens that end text which could continue; with a bias against them it might never end."""
    found: set[int] = set()
    _firsts(grammar, found)
    return found


def _firsts(grammar: TagFormat, enders: set[int]) -> tuple[set[int], bool]:
    """Return the tokens a format can begin with, and whether it can continue where it can end; add to `enders`."""
    kind = grammar["type"]
    if kind == "token":
        return {grammar["token"]}, False
    if kind == "const_string":
        return set(), False
    if kind == "json_schema":
        return set(), grammar["json_schema"].get("type") not in _CLOSED_TYPES
    if kind in ("optional", "star"):
        return _firsts(grammar["content"], enders)[0], True
    if kind == "or":
        each = [_firsts(element, enders) for element in grammar["elements"]]
        return set().union(*(firsts for firsts, _ in each)), any(continues for _, continues in each)
    if kind != "sequence":
        return set(), True
    begins: set[int] = set()
    before = False
    for element in grammar["elements"]:
        firsts, continues = _firsts(element, enders)
        enders |= firsts if before else set()
        begins = begins or firsts
        before = continues or (before and element["type"] == "const_string")
    return begins, before


def forced_tools(tools: Tools, name: str | None) -> Tools:
    """Return the tools that can be forced: all, or the one called `name`.

    Raises:
        NoCallGrammarError: There are no tools, or none has that name.
    """
    if not tools:
        raise NoCallGrammarError("A tool call cannot be forced: the request has no tools.")
    if name is None:
        return tools
    if name not in tools:
        raise NoCallGrammarError(f"Unknown tool {name!r}. Available: {', '.join(sorted(tools))}.")
    return {name: tools[name]}


def text(value: str) -> TagFormat:
    """Match exactly this text."""
    return {"type": "const_string", "value": value}


def tag(markup: Markup, value: str) -> TagFormat:
    """Match exactly this tag: by its token if the vocabulary has one, else by its text."""
    token = markup.token_of(value)
    return text(value) if token is None else {"type": "token", "token": token}


def anchored(markup: Markup, value: str, anchor: str) -> TagFormat:
    """Match exactly this text; `anchor` in it is matched by its token if the vocabulary has one."""
    token = markup.anchors.get(anchor)
    if token is None:
        return text(value)
    parts: list[TagFormat] = []
    for i, part in enumerate(value.split(anchor)):
        parts += [{"type": "token", "token": token}] if i else []
        parts += [text(part)] if part else []
    return sequence(*parts)


def either(options: Iterable[TagFormat]) -> TagFormat:
    """Match one of several formats."""
    elements = list(options)
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}


def sequence(*elements: TagFormat) -> TagFormat:
    """Match formats one after another. Texts that follow one another become one."""
    merged: list[TagFormat] = []
    for one in elements:
        if merged and one["type"] == merged[-1]["type"] == "const_string":
            merged[-1] = text(merged[-1]["value"] + one["value"])
        else:
            merged.append(one)
    return {"type": "sequence", "elements": merged}


def arguments_json(schema: JsonSchema) -> TagFormat:
    """Match JSON by a schema. Whitespace is limited, so that it cannot fill the turn."""
    return _json(for_grammar(meaning(schema)))


def _json(schema: dict[str, Any]) -> TagFormat:
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 2}


def json_calls(tools: Tools, *, before: str = "", arguments: str = "arguments", after: str = "") -> TagFormat:
    """Match a JSON object that calls one of the tools, between two texts; `arguments` is the key of its arguments."""
    return either(
        sequence(
            text(f'{before}{{"name": {json.dumps(name, ensure_ascii=False)}, "{arguments}": '),
            arguments_json(schema),
            text("}" + after),
        )
        for name, schema in tools.items()
    )


def after_reasoning(markup: Markup, close: str, grammar: TagFormat) -> TagFormat:
    """Match the rest of reasoning that the prompt opened, its closing tag, and then `grammar`."""
    token = markup.token_of(close)
    blank: TagFormat = {"type": "optional", "content": text("\n\n")}
    if token is None:
        thought: TagFormat = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": close}
        return sequence(thought, blank, grammar)
    thinking = {"type": "any_tokens", "exclude_tokens": sorted({token, *markup.special})}
    return sequence(thinking, tag(markup, close), blank, grammar)


@dataclass(frozen=True, slots=True)
class Parameters:
    """How a format writes the parameters of a call, each in tags of its own.

    Attributes:
        head: Returns what comes before a value; takes the parameter's name, and whether its value is plain text.
        end: The tag after the value.
        after: The text after that tag.
        anchor: The control token that is part of these tags, if any.
        tells_kind: Whether the head says if the value is plain text.
    """

    head: Callable[[TagFormat, bool], TagFormat]
    end: str
    after: str = ""
    anchor: str = ""
    tells_kind: bool = False

    def all(self, markup: Markup, schema: JsonSchema) -> list[TagFormat]:
        """Return the formats of all parameters that a tool's schema allows, in order.

        One that is not required is optional. Last come those that the schema allows without declaring them.
        """
        meant = meaning(schema)
        required = meant.required()
        names = dict.fromkeys(name for name in (*meant.names(), *sorted(required)) if name)
        written = [
            one if name in required else {"type": "optional", "content": one}
            for name in names
            for one in [self._one(markup, text(name), meant, name)]
        ]
        if not meant.is_closed():
            name: TagFormat = {"type": "regex", "pattern": _OTHER_NAME}
            written.append({"type": "star", "content": self._one(markup, name, meant, None)})
        return written

    def _one(self, markup: Markup, key: TagFormat, schema: ToolSchema, name: str | None) -> TagFormat:
        kinds = KINDS if name is None else schema.kinds((name,))
        wide = {} if name is None else for_grammar(schema, name)
        options = None if name is None else schema.options(name)
        close = anchored(markup, self.end, self.anchor) if self.anchor else tag(markup, self.end)
        after = [text(self.after)] if self.after else []
        if "string" not in kinds:
            return sequence(self.head(key, False), _json(wide), close, *after)
        if options and all(isinstance(option, str) or not self.tells_kind for option in options):
            return sequence(self.head(key, True), _one_of(options), close, *after)
        if close["type"] == "const_string":
            excluded = {"type": "any_text", "excludes": list(markup.texts)}
            anything = sequence({"type": "tag", "begin": "", "content": excluded, "end": self.end}, *after)
        else:
            anything = sequence(_any_tokens(markup), close, *after)
        plain = sequence(self.head(key, True), anything)
        if not self.tells_kind or kinds == {"string"}:
            return plain
        return either([plain, sequence(self.head(key, False), _json(wide), close, *after)])


def _any_tokens(markup: Markup) -> TagFormat:
    return {"type": "any_tokens", "exclude_tokens": sorted(markup.controls)}


def _one_of(options: Iterable[Any]) -> TagFormat:
    """Match one of the values, as plain text."""
    written = dict.fromkeys(one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in options)
    filled = [text(one) for one in written if one]
    if not filled:
        return {"type": "optional", "content": text(" ")}
    return either(filled) if "" not in written else {"type": "optional", "content": either(filled)}


_DROPPED = (
    *("minLength", "maxLength", "format", "patternProperties", "propertyNames", "minProperties", "maxProperties"),
    *("contains", "minContains", "maxContains", "unevaluatedItems", "not", "if", "then", "else"),
    *("dependentSchemas", "dependentRequired", "multipleOf", "$dynamicRef"),
)
_OBJECTS = ("properties", "required", "additionalProperties", "unevaluatedProperties", "patternProperties")
_LISTS = ("items", "prefixItems", "minItems", "maxItems", "contains", "uniqueItems")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_OTHERS = (*_BOUNDS, "pattern", "minLength", "maxLength")
_UNTYPED = frozenset(KINDS - {"integer"})
_PLAIN_PATTERN = re.compile(
    r"\^(?:[A-Za-z0-9 _@#%&=:;,<>~-]|\\[dw.+*?$()\[\]{}-]|\[[A-Za-z0-9 _@#%&=:;,.<>~-]+\]|[(){}+*?])*\$"
)
"""Patterns of characters that JSON never escapes, for a whole string."""
_DEFINITIONS = "-"


def for_grammar(schema: ToolSchema, name: str | None = None) -> dict[str, Any]:
    """Return the schema of a tool's arguments, or of the argument `name`, for XGrammar."""
    wide = rewritten({key: value for key, value in schema.json.items() if key != "$id"}, _wider)
    if name is None:
        return _with_references(wide, wide, "#") or {"type": "object"}
    one = wide.get("properties", {}).get(name)
    if not isinstance(one, dict):  # it is declared elsewhere
        return {"type": sorted(schema.kinds((name,))), "additionalProperties": True, "items": True}
    root = {"$defs": {_DEFINITIONS: wide}}
    moved: dict[str, Any] = _with_references({**root, **one}, root, f"#/$defs/{_DEFINITIONS}")
    return moved


def _wider(schema: dict[str, Any]) -> dict[str, Any]:
    typed = [key for key in ("type", "enum", "const", "$ref", "anyOf", "oneOf", "allOf") if key in schema]
    if not typed and any(key in schema for key in (*_OBJECTS, *_LISTS, *_OTHERS)):
        schema["type"] = sorted(_UNTYPED)
    _open_object(schema)
    _open_list(schema)
    if not _PLAIN_PATTERN.fullmatch(str(schema.get("pattern", ""))):
        schema.pop("pattern", None)
    if "number" in schema.get("type", ()):
        for key in _BOUNDS:
            schema.pop(key, None)  # its decimals are limited
    if "oneOf" in schema:  # options that are wider now may hold together
        schema.setdefault("anyOf", schema["oneOf"])
        del schema["oneOf"]
    for union in ("anyOf", "allOf"):
        if union in schema and not (kept := [one for one in schema[union] if one is not False]):
            del schema[union]
        elif union in schema:
            schema[union] = kept
    if schema.get("enum") == []:
        del schema["enum"]
    if "$id" in schema:
        return {}  # it changes what references mean
    return {key: value for key, value in schema.items() if key not in _DROPPED}


def _open_object(schema: dict[str, Any]) -> None:
    """Allow all names that JSON Schema allows."""
    others = schema.get("additionalProperties", True)
    unevaluated = schema.pop("unevaluatedProperties", True)
    inner = any(key in schema for key in ("$ref", "anyOf", "oneOf", "allOf", "if", "dependentSchemas"))
    if "additionalProperties" not in schema and not inner:
        others = unevaluated
    if "patternProperties" in schema:
        others = True
    properties = {key: value for key, value in schema.get("properties", {}).items() if value is not False}
    if "properties" in schema:
        schema["properties"] = properties
    if missing := [key for key in schema.get("required", ()) if key not in properties]:
        schema["properties"] = {**properties, **dict.fromkeys(missing, True if others is False else others)}
    kinds = schema.get("type", ())
    if kinds == "object" or (isinstance(kinds, list) and "object" in kinds) or "properties" in schema:
        schema["additionalProperties"] = others


def _open_list(schema: dict[str, Any]) -> None:
    """Allow all items that JSON Schema allows."""
    kinds = schema.get("type", ())
    if (kinds == "array" or (isinstance(kinds, list) and "array" in kinds)) and "items" not in schema:
        schema["items"] = True
    if schema.get("items") is False and "prefixItems" not in schema:
        schema.pop("items")
        schema["maxItems"] = 0
    if "prefixItems" in schema:
        schema["prefixItems"] = [True if one is False else one for one in schema["prefixItems"]]


def _with_references(schema: dict[str, Any], root: dict[str, Any], base: str) -> Any:
    """Return a schema whose references begin with `base` in place of `#`; those that lead nowhere are left out."""

    def change(one: dict[str, Any]) -> dict[str, Any]:
        reference = one.pop("$ref", None)
        if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
            pointer = base + reference[1:]
            if _leads(pointer, root):
                one["$ref"] = pointer
        return one

    return rewritten(schema, change)


def _leads(pointer: str, root: Any) -> bool:
    """Return whether a JSON pointer in a fragment leads to a schema."""
    found = root
    for step in pointer.split("/")[1:]:
        step = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and step.isdigit() and int(step) < len(found):
            found = found[int(step)]
        elif isinstance(found, dict) and step in found:
            found = found[step]
        else:
            return False
    return isinstance(found, dict)
